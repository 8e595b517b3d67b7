"""Users' feedback on answers: its form, the answers that can still be rated, and the way to the gateway that knows one.

A gateway knows the answers that it gave, the last `MOST` of them and for `window_s` seconds. Feedback on another one
is passed on through the store: the gateway writes `gateway/feedback/{model}/{id}`, and every gateway of the model looks
whether it knows the answer. The one that does deletes the record and has the feedback then; the poster takes the record
back after `PASS_ON_S` and says that there is no such answer. The record is under a lease, so that none stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from server.answers.parse import FORMAT, About
from server.errors import HttpError
from server.gateway.access.keys import Principal
from server.gateway.access.records import FEEDBACK_PREFIX, USAGE_PREFIX, USAGE_ROUND
from weightsync.errors import Conflict, StoreError
from weightsync.store import Event, KeyValue, Store

log = logging.getLogger("hotswap.gateway")

MOST: Final = 32_768
WINDOW_S: Final = 86_400.0
PASS_ON_S: Final = 2.0
LEASE_S: Final = 30.0
RETRY_STORE_S: Final = 0.5
LARGEST: Final = 256 * 2**10  # bytes of a body
Text = Annotated[str, Meta(max_length=64 * 2**10)]


class Correction(msgspec.Struct, omit_defaults=True):
    """A correction as the assistant's message."""

    content: Text | None = None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[dict[str, Any]] = []


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of POST /v1/feedback. `choice`: of an answer with several."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    rating: Literal["up", "down"] | None = None
    score: Annotated[float, Meta(ge=0, le=1)] | None = None
    correction: Text | Correction | None = None
    comment: Text | None = None
    metadata: dict[str, Any] = {}
    choice: Annotated[int, Meta(ge=0, le=1024)] = 0


class Feedback(msgspec.Struct, tag_field="record", tag="feedback"):
    """A user's rating of an answer, as a record. `key` is that which got the answer; `by` says who rated it.

    `score` is 1 for up and 0 for down; None where there is a correction alone. `correction` is a text, or a message of
    the assistant. The versions are the answer's. `replaced` is the score that was said of it before.
    """

    format: int
    id: str
    request_id: str
    key: str
    key_id: str
    time: float
    by: Literal["key", "admin"]
    choice: int = 0
    rating: Literal["up", "down"] | None = None
    score: float | None = None
    correction: str | Correction | None = None
    comment: str | None = None
    metadata: dict[str, Any] = {}
    first_version: int | None = None
    last_version: int | None = None
    drawn_version: int | None = None  # by a split of the traffic, whichever version answered
    cluster: int = -1
    replaced: float | None = None
    model: str = ""  # that answered

    @property
    def version(self) -> int | None:
        """The version that wrote the whole answer, as far as its ends tell."""
        return self.first_version if self.first_version == self.last_version else None


def read_posted(body: bytes) -> FeedbackRequest:
    """The body of a request. Raises HttpError (400)."""
    try:
        posted = msgspec.json.decode(body.removeprefix(BOM_UTF8), type=FeedbackRequest)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"{error}; docs/feedback.md lists the fields.", code="invalid_parameter") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    said = [name for name in ("rating", "score") if getattr(posted, name) is not None]
    if len(said) > 1:
        raise HttpError(400, "Send one of rating and score.", code="invalid_parameter", param="score")
    if not said and posted.correction is None:
        raise HttpError(400, "Send a rating, a score or a correction.", code="invalid_parameter", param="rating")
    message = posted.correction
    if message == "" or (isinstance(message, Correction) and not (message.content or message.tool_calls)):
        raise HttpError(400, "The correction is empty.", code="invalid_parameter", param="correction")
    return posted


class Known:
    """An answer that may be rated, and whose it is."""

    __slots__ = ("about", "id", "names", "principal", "score")

    def __init__(self, about: About, principal: Principal) -> None:
        self.about, self.principal = about, principal
        self.id = about.request_id
        self.names: list[str] = []
        self.score: float | None = None

    def rated(self, posted: FeedbackRequest, *, by: Literal["key", "admin"]) -> Feedback:
        """The record of what is said of it now, which replaces what was said before."""
        about, before = self.about, self.score
        self.score = {"up": 1.0, "down": 0.0}.get(posted.rating or "", posted.score)
        return Feedback(
            format=FORMAT, id=self.id, request_id=about.request_id, key=about.key, key_id=about.key_id,
            time=time.time(), by=by, choice=posted.choice, rating=posted.rating, score=self.score,
            correction=posted.correction, comment=posted.comment, metadata=posted.metadata,
            first_version=about.first_version, last_version=about.last_version,
            drawn_version=about.drawn_version, cluster=about.cluster, replaced=before, model=about.served,
        )  # fmt: skip


class Recent:
    """The answers that may be rated, by each id that their clients have seen. Threads may call its methods."""

    def __init__(self, window_s: float = WINDOW_S, most: int = MOST) -> None:
        self._window_s, self._most = window_s, most
        self._lock = threading.Lock()
        self._order: deque[Known] = deque()
        self._by_name: dict[tuple[str, bytes], Known] = {}
        self._owners: dict[str, bytes] = {}  # the last key that had an answer of that name

    def __len__(self) -> int:
        return len(self._order)

    def add(self, known: Known, answer_id: str = "") -> None:
        """An answer is over. `answer_id` is the one in its body, if that is known already."""
        with self._lock:
            self._order.append(known)
            self._named(known, known.about.request_id)
            if answer_id:
                known.id = answer_id
                self._named(known, answer_id)
            while len(self._order) > self._most:
                self._forget(self._order.popleft())

    def name(self, request_id: str, digest: bytes, answer_id: str) -> None:
        """The answer to this request has said its id."""
        with self._lock:
            known = self._by_name.get((request_id, digest))
            if known is not None and answer_id and known.id != answer_id:
                known.id = answer_id
                self._named(known, answer_id)

    def find(self, answer_id: str, digest: bytes | None) -> Known:
        """The answer that the key with this digest got; None: whoever got it. Raises HttpError (404)."""
        with self._lock:
            owner = self._owners.get(answer_id) if digest is None else digest
            known = self._by_name.get((answer_id, owner)) if owner is not None else None
        if known is None:
            advice = "send the `id` or the x-request-id of an answer that this key got, and that is collected"
            raise HttpError(
                404, f"No recent answer has the id {answer_id!r}; {advice}.", code="unknown_answer", param="id"
            )
        if known.about.ended + self._window_s < time.time():
            window = f"answers may be rated for {self._window_s:g} s"
            raise HttpError(404, f"The answer {answer_id!r} is too old; {window}.", code="answer_expired", param="id")
        return known

    def _named(self, known: Known, name: str) -> None:
        known.names.append(name)
        self._by_name[name, known.principal.digest] = known
        self._owners[name] = known.principal.digest

    def _forget(self, known: Known) -> None:
        digest = known.principal.digest
        for name in known.names:
            if self._by_name.get((name, digest)) is known:
                del self._by_name[name, digest]
                if self._owners.get(name) == digest:
                    del self._owners[name]


class _Passed(msgspec.Struct, forbid_unknown_fields=True):
    """The record by which feedback is passed on. `digest` is the key's, None for an admin's."""

    digest: bytes | None
    posted: FeedbackRequest


Take = Callable[[Feedback, Principal], None]


class Passing:
    """Passes on what is said of other gateways' answers, and takes what is said of this one's."""

    def __init__(self, store: Store, model: str, recent: Recent, take: Take) -> None:
        self._store, self._recent, self._take = store, recent, take
        self._prefix = f"{FEEDBACK_PREFIX}{model}/"

    async def run(self) -> None:
        """Follows what others pass on, for ever."""
        while True:
            with contextlib.suppress(StoreError):
                items, revision = await self._store.list(self._prefix)
                for kv in items:
                    await self._look_at(kv)
                async for event in self._store.watch(self._prefix, revision + 1):
                    if event.kind == "put":
                        await self._look_at(event.kv)
            await asyncio.sleep(RETRY_STORE_S)

    async def _look_at(self, kv: KeyValue) -> None:
        try:
            passed = msgspec.json.decode(kv.value, type=_Passed)
            known = self._recent.find(passed.posted.id, passed.digest)
        except msgspec.MsgspecError as error:
            log.error("ignoring %s: %s", kv.key, error)
            return
        except HttpError:
            return
        with contextlib.suppress(Conflict):  # another gateway was quicker, or its poster has taken it back
            await self._store.txn({kv.key: kv.mod_revision}, {kv.key: None})
            by: Literal["key", "admin"] = "admin" if passed.digest is None else "key"
            self._take(known.rated(passed.posted, by=by), known.principal)

    async def pass_on(self, posted: FeedbackRequest, digest: bytes | None) -> bool:
        """Whether another gateway has taken it. Raises StoreError."""
        gateways = {kv.key for kv in (await self._store.list(USAGE_PREFIX))[0]} - {USAGE_ROUND}
        if len(gateways) < 2:
            return False
        key = self._prefix + uuid.uuid4().hex
        lease = await self._store.grant_lease(LEASE_S)
        try:
            value = msgspec.json.encode(_Passed(digest, posted))
            revision = await self._store.put(key, value, lease)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PASS_ON_S):
                    return await self._is_taken(key, revision)
            try:
                await self._store.txn({key: revision}, {key: None})
            except Conflict:
                return True
            return False
        finally:
            with contextlib.suppress(StoreError):
                await self._store.revoke(lease)

    async def _is_taken(self, key: str, revision: int) -> bool:
        event: Event
        async with contextlib.aclosing(self._store.watch(key, revision + 1)) as events:
            async for event in events:
                if event.kind == "delete":
                    return True
        return False
