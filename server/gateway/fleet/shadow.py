"""Shadow traffic: a share of live requests is repeated on a version that is tried out; clients never see the answers.

Repeating one must cost its original nothing. So a repetition

* goes to instances of that version alone, and only while they are well and less than half full (`Window`), and nobody
  waits in the gateway's queue; there are at most MOST at a time, and each may take LIMIT_S seconds and LIMIT_BYTES;
* has a lower priority in the engine than any request can have, and is cut when a request needs its place;
* counts in no limit of a key, in no load, window or health of an instance, and for no share of a split;
* is begun when its original goes to an instance, and neither waits for the other. Whatever becomes of it is a number.

Repeated are requests of routes that only generate text, and that pin no version. A judge (`listen`) gets both answers
as they came, when both have ended; without one nothing of them is kept. The judge's queue is bounded, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import httptools
import orjson

from server.gateway.fleet.instance import Instance
from server.gateway.fleet.routing import Need
from server.gateway.observe.stats import Histogram
from server.gateway.routes import Target
from server.gateway.wire.head import RequestHead, upstream_head
from server.gateway.wire.pool import UpstreamConnection
from server.key_limits import MAX_PRIORITY
from weightsync.control.records import ActiveRecord

log: Final = logging.getLogger("hotswap.gateway")

MOST: Final = 16
LIMIT_S: Final = 120.0
LIMIT_BYTES: Final = 1 << 20  # of each answer, and of a request
FULL: Final = 0.5  # of an instance's window
KEPT: Final = 256  # results that wait for the judge

OUTCOMES: Final = ("answered", "failed", "no_room", "cut", "late", "too_large")
_PRIORITY: Final = b"x-hotswap-priority: %d\r\n" % (MAX_PRIORITY + 1)
_OWN: Final = (b"x-hotswap-priority:", b"traceparent:", b"tracestate:", b"baggage:")  # lines a repetition goes without
_VERSION: Final = b"x-hotswap-weight-version"


class Answer:
    """An answer as it came in, framing taken off. `taken_s` and `first_byte_s` count from its request."""

    def __init__(self) -> None:
        self.status = 0
        self.version: int | None = None
        self.sse = False
        self.body = b""
        self.first_byte_s = 0.0
        self.taken_s = 0.0
        self.complete = False
        self.nbytes = 0
        self._started = time.monotonic()
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Bytes of a response. Raises httptools.HttpParserError."""
        if not self.first_byte_s:
            self.first_byte_s = time.monotonic() - self._started
        self.nbytes += len(data)
        if not self.complete:
            self._parser.feed_data(data)

    def end(self) -> None:
        """No more comes."""
        self.taken_s = time.monotonic() - self._started
        self.body, self._pieces = b"".join(self._pieces), []

    @property
    def keep_alive(self) -> bool:
        """Whether its connection can be used again."""
        return self.complete and bool(self._parser.should_keep_alive())

    @property
    def texts(self) -> list[str]:
        """What was generated, by choice; empty where the body has no text. Log-probabilities are in `body`."""
        found: dict[int, str] = {}
        for told in self._objects():
            for at, choice in enumerate(told.get("choices") or ([told] if "text" in told else [])):
                said = choice.get("message") or choice.get("delta") or {}
                text = choice.get("text") or said.get("content") or ""
                index = choice.get("index", at)
                found[index] = found.get(index, "") + text
        return [found[index] for index in sorted(found)]

    def _objects(self) -> list[dict[str, Any]]:
        lines = self.body.split(b"\n") if self.sse else [b"data:" + self.body]
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    told = orjson.loads(line[5:])
                except orjson.JSONDecodeError:
                    continue  # [DONE], or an answer that was cut
                if isinstance(told, dict):
                    found.append(told)
        return found

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == _VERSION and value.isdigit():
            self.version = int(value)
        elif name.lower() == b"content-type":
            self.sse = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200


@dataclass
class Compared:
    """A request with the answer its client got and the one of the version that is tried out."""

    request_id: str
    route: str
    request: bytes
    original: Answer = field(default_factory=Answer)
    shadow: Answer = field(default_factory=Answer)


class Request(Protocol):
    """A request, as far as it is repeated."""

    target: Target
    head: RequestHead
    body: bytes
    need: Need | None


class OfFleet(Protocol):
    """What is known of the instances (view.py)."""

    serving: list[Instance]


class Shadows:
    """The repetitions of one gateway. `outcomes`: by version and one of OUTCOMES."""

    def __init__(self, fleet: OfFleet) -> None:
        self.on = False
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.dropped = 0  # results that the judge was too slow for
        self.seconds: dict[int, Histogram] = {}  # of those answered, by version
        self.running: deque[Repetition] = deque()
        self._fleet = fleet
        self._percents: dict[int, float] = {}
        self._credit: dict[int, float] = {}
        self._judge: asyncio.Queue[Compared] | None = None

    def listen(self) -> asyncio.Queue[Compared]:
        """The results from now on, at most KEPT that were not taken; more are dropped."""
        self._judge = asyncio.Queue(KEPT)
        return self._judge

    def follow(self, active: ActiveRecord | None) -> None:
        """The commit record says what is repeated where."""
        shares = active.split.shares if active is not None and active.split is not None else ()
        percents = {share.version: share.shadow for share in shares if share.shadow > 0}
        if percents != self._percents:
            self._percents, self._credit = percents, dict.fromkeys(percents, 0.0)
        self.on = bool(percents)

    def sample(self, request: Request, instance: Instance, waiting: int) -> Repetition | None:
        """Repeats the request that goes to `instance` now, if it is its turn; `waiting` others have no place yet."""
        if not request.target.route.continued or (request.need is not None and request.need.version is not None):
            return None
        for version, percent in self._percents.items():
            if version == instance.record.active_version:
                continue
            self._credit[version] += percent
            if self._credit[version] < 100.0:
                continue
            self._credit[version] -= 100.0
            return self._begin(request, version, waiting)
        return None

    def make_room(self, instance: Instance) -> None:
        """A request has gone there: repetitions give way, the latest first."""
        for each in reversed(list(self.running)):
            if instance.working + instance.shadowed <= instance.window.limit:
                return
            if each.instance is instance:
                each.end("cut")

    def sweep(self, now: float) -> None:
        """Ends those that take too long. Monotonic seconds."""
        for each in list(self.running):
            if now - each.started > LIMIT_S:
                each.end("late")

    def close(self) -> None:
        """Ends all."""
        for each in list(self.running):
            each.end("cut")

    def _begin(self, request: Request, version: int, waiting: int) -> Repetition | None:
        able = [i for i in self._fleet.serving if i.record.active_version == version and _has_room(i)]
        if waiting or not able or len(self.running) >= MOST or len(request.body) > LIMIT_BYTES:
            self.outcomes[version, "no_room"] += 1
            return None
        instance = min(able, key=lambda i: (i.working + i.shadowed, i.picked_at))
        return Repetition(self, request, version, instance)

    def ended(self, repetition: Repetition, outcome: str) -> None:
        """One is over, and its place is free."""
        self.running.remove(repetition)
        self.outcomes[repetition.version, outcome] += 1
        if outcome == "answered":
            seen = self.seconds.setdefault(repetition.version, Histogram())
            seen.observe(repetition.compared.shadow.taken_s)

    def deliver(self, compared: Compared) -> None:
        """Both answers have ended."""
        if self._judge is None:
            return
        try:
            self._judge.put_nowait(compared)
        except asyncio.QueueFull:
            self.dropped += 1


class Repetition:
    """A request that is repeated: the other answer's reader, and the place where its own is put by for the judge."""

    def __init__(self, shadows: Shadows, request: Request, version: int, instance: Instance) -> None:
        self.version, self.instance, self.started = version, instance, time.monotonic()
        head = request.head
        self.compared = Compared(head.request_id.decode(), request.target.route.name, request.body)
        self._shadows, self._target, self._head = shadows, request.target, _quiet(head)
        self._link: UpstreamConnection | None = None
        self._over = self._original_over = self._spoilt = False
        shadows.running.append(self)
        instance.shadowed += 1
        self._opening = asyncio.get_running_loop().create_task(self._open())

    # of the original

    def heard(self, data: bytes) -> None:
        """Bytes that its client gets."""
        original = self.compared.original
        if self._spoilt or original.nbytes + len(data) > LIMIT_BYTES:
            self._spoilt = True
            return
        try:
            original.feed(data)
        except httptools.HttpParserError:
            self._spoilt = True

    def original_ended(self) -> None:
        """Its client has its answer, or has left."""
        self.compared.original.end()
        self._original_over = True
        self._deliver()

    # of the repetition

    async def _open(self) -> None:
        try:
            link = self.instance.pool.take() or await self.instance.pool.connect()
            if self._over:
                link.release()
                return
            self._link = link
            method, path, body = self._target.route.method, self._target.upstream, self.compared.request
            link.send(self, upstream_head(method, path, self.instance.pool.opening, self._head, len(body)), body)
        except Exception as error:
            log.debug("%s is not repeated: %s", self.compared.request_id, error)
            self.end("failed")

    def upstream_data(self, data: bytes) -> None:
        """Bytes of the instance (pool.Owner)."""
        answer = self.compared.shadow
        if answer.nbytes + len(data) > LIMIT_BYTES:
            self.end("too_large")
            return
        try:
            answer.feed(data)
        except httptools.HttpParserError:
            self.end("failed")
            return
        if answer.complete:
            self.end("answered" if answer.status < 400 else "failed")

    def upstream_lost(self, exc: Exception | None) -> None:
        """The connection has ended (pool.Owner)."""
        self._link = None
        self.end("failed")

    def end(self, outcome: str) -> None:
        """It is over, and its connection with it unless that can be used again."""
        if self._over:
            return
        self._over = True
        link, self._link = self._link, None
        answer = self.compared.shadow
        if link is not None and answer.keep_alive:
            link.release()
        elif link is not None:
            link.abort()
        answer.end()
        self.instance.shadowed -= 1
        self._shadows.ended(self, outcome)
        self._deliver()

    def _deliver(self) -> None:
        if self._over and self._original_over and self.compared.shadow.complete and not self._spoilt:
            self._shadows.deliver(self.compared)


def _has_room(instance: Instance) -> bool:
    asks = instance.signals is not None and instance.signals.num_requests_waiting > 0
    room = max(1.0, instance.window.limit * FULL)
    calm = instance.state != "STAGING" and instance.health.well and not asks
    return calm and instance.working + instance.shadowed < room


def _quiet(head: RequestHead) -> RequestHead:
    """The head of a repetition: the least urgent, and in nobody's trace."""
    lines: Sequence[bytes] = head.forward.splitlines(keepends=True)
    kept = b"".join(line for line in lines if not line.startswith(_OWN))
    return replace(head, request_id=head.request_id + b"-shadow", forward=kept + _PRIORITY)
