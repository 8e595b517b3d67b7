"""The desk between the gateway's exchanges and whoever reads whole answers: the log (log.py), a judge of releases.

Each consumer says which requests it wants, of those a share, and how many answers may wait for it. On the event loop a
wanted exchange costs an append for each piece of its answer, and one to a queue at its end. One thread parses each
exchange once, and gives the record to all who wanted it. Nothing here holds up an answer: what finds no room is dropped
and counted, by cause:

    memory      the exchange was too large, or too many were captured at once (wire/capture.py)
    busy        too many answers waited for the consumer
    unreadable  the bytes are no exchange of the route
    failed      the consumer raised an error

What a user says of an answer goes the same way (`rate`), to those who ask for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from server.answers.feedback import Feedback, Known, Recent
from server.answers.parse import ROUTES, About, Answer, parse
from server.gateway.access.keys import Principal
from server.gateway.observe.logs import Backlog
from server.gateway.observe.stats import Finished, ProcessStats
from server.gateway.wire.capture import Capture

log = logging.getLogger("hotswap.gateway")

CAUSES: Final = ("memory", "busy", "unreadable", "failed")
_PREFIXES: Final = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}  # as vLLM makes ids of request ids


class Consumer(Protocol):
    """Reads answers. `wants` is called on the event loop, the others on the desk's thread."""

    name: str
    share: float  # of the exchanges that it wants, from 0 to 1
    most: int  # answers, and words about them, that may wait for it
    all_keys: bool  # it reads answers of keys that have not opted in; it keeps none of them

    def wants(self, principal: Principal) -> bool:
        """Whether it reads the answers of this key, and what is said of them."""

    def take(self, answer: Answer) -> None:
        """An answer that it wanted."""

    def rate(self, feedback: Feedback) -> None:
        """Takes a user's rating of an answer, in its share or not."""

    def tick(self) -> None:
        """Called a few times a second."""

    def close(self) -> None:
        """Nothing more comes."""


Captured: TypeAlias = "Capture[tuple[Principal, list[Consumer]]]"  # whose it is, and who reads it


class Desk:
    """Captures, parses and hands out (stats.Collector). `begin`, `end` and `rate` are for the event loop alone."""

    def __init__(self, stats: ProcessStats, recent: Recent) -> None:
        self._stats = stats
        self.recent = recent
        self._dropped = stats.answers_dropped
        self._consumers: tuple[Consumer, ...] = ()
        self._waiting: Counter[str] = Counter()  # by consumer; the loop adds
        self._taken: Counter[str] = Counter()  # and the thread, for its part
        self._thread: _Thread | None = None

    def add(self, consumer: Consumer) -> None:
        """From now on it gets answers."""
        for cause in CAUSES:
            self._dropped[consumer.name, cause] += 0
        self._use((*self._consumers, consumer))

    def remove(self, consumer: Consumer) -> None:
        """It gets no more; what was captured for it already may still come."""
        self._use(tuple(c for c in self._consumers if c is not consumer))

    def _use(self, consumers: tuple[Consumer, ...]) -> None:
        self._consumers = consumers
        self._stats.collector = self
        self._stats.collects_all = any(consumer.all_keys for consumer in consumers)

    # on the event loop

    def begin(self, principal: Principal, route: str, body: bytes) -> Captured | None:
        """Where the answer to this request goes; None if nobody wants it (stats.Collector)."""
        if route not in ROUTES:
            return None
        concerned = [consumer for consumer in self._consumers if consumer.wants(principal)]
        if not concerned:
            return None
        wanted = [c for c in concerned if c.share >= 1.0 or random.random() < c.share]  # noqa: S311 - no secret
        if wanted:
            return Capture(self._stats.captured, body, (principal, wanted))
        return Capture(self._stats.captured, None, (principal, wanted))  # it may be rated

    def end(self, capture: Captured, finished: Finished) -> None:
        """The answer is over (stats.Collector)."""
        principal, wanted = capture.wanted
        about = about_of(finished, principal)
        if finished.status in (200, 499):
            prefix = _PREFIXES.get(finished.route, "")
            self.recent.add(Known(about, principal), prefix + finished.request_id if prefix else "")
        if capture.lost:
            for consumer in wanted:
                self._dropped[consumer.name, "memory"] += 1
            return
        accepted = self._with_room(wanted)
        if accepted:
            self._put(lambda: self._hand_out(capture, about, accepted))
        else:
            capture.drop()

    def rate(self, feedback: Feedback, principal: Principal) -> None:
        """Takes a user's rating of an answer that a key got."""
        concerned = self._with_room([consumer for consumer in self._consumers if consumer.wants(principal)])
        if concerned:
            self._put(lambda: self._tell(feedback, concerned))

    def _with_room(self, consumers: list[Consumer]) -> list[Consumer]:
        """Those that take one more; the others' is dropped."""
        accepted = []
        for consumer in consumers:
            if self._waiting[consumer.name] - self._taken[consumer.name] >= consumer.most:
                self._dropped[consumer.name, "busy"] += 1
            else:
                self._waiting[consumer.name] += 1
                accepted.append(consumer)
        return accepted

    def _put(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = _Thread(self._tick)
        self._thread.put(work, _run)

    async def settled(self) -> None:
        """Waits, for a moment, until everything that has ended is parsed and handed out."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.flush)

    def close(self) -> None:
        """Hands out what is waiting, for a moment, and closes the consumers. It blocks."""
        if self._thread is not None:
            self._thread.close()
        for consumer in self._consumers:
            consumer.close()

    # on the thread

    def _hand_out(self, capture: Captured, about: About, accepted: list[Consumer]) -> None:
        answer: Answer | None = None
        try:
            answer = parse(capture.body, b"".join(capture.pieces), about)
            self.recent.name(about.request_id, capture.wanted[0].digest, answer.id)
        except ValueError as error:
            log.warning("an answer cannot be read: %s", error)
            for consumer in accepted:
                self._dropped[consumer.name, "unreadable"] += 1
        finally:
            capture.close()
        for consumer in accepted:
            if answer is not None:
                self._guarded(consumer, consumer.take, answer)
            self._taken[consumer.name] += 1

    def _tell(self, feedback: Feedback, concerned: list[Consumer]) -> None:
        for consumer in concerned:
            self._guarded(consumer, consumer.rate, feedback)
            self._taken[consumer.name] += 1

    def _tick(self) -> None:
        for consumer in self._consumers:
            self._guarded(consumer, consumer.tick)

    def _guarded(self, consumer: Consumer, call: Callable[..., None], *given: Any) -> None:
        try:
            call(*given)
        except Exception:
            log.exception("%s failed to take an answer", consumer.name)
            self._dropped[consumer.name, "failed"] += 1


def _run(work: Callable[[], None]) -> None:
    work()


def about_of(finished: Finished, principal: Principal) -> About:
    """The fields of an exchange that its record has."""
    return About(
        request_id=finished.request_id,
        served=finished.model,
        route=finished.route,
        status=finished.status,
        key=principal.name,
        key_id=principal.id,
        ended=finished.ended,
        duration_s=round(finished.duration_s, 6),
        first_byte_s=None if finished.ttft_s is None else round(finished.ttft_s, 6),
        queued_s=round(finished.queued_s, 6),
        code=finished.code,
        instance=finished.instance,
        first_version=finished.first_version,
        last_version=finished.last_version,
        drawn_version=finished.drawn_version,
        cluster=finished.cluster,
        streamed=finished.streamed,
    )


class _Thread(Backlog):
    """Runs what it is given, one after the other, and the consumers' ticks in between."""

    most: ClassVar[int] = 65536  # the consumers' own bounds come first
    batch: ClassVar[int] = 64
    interval_s: ClassVar[float] = 0.1

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        super().__init__("answers")

    def _send(self, batch: list[tuple[Any, Callable[[Any], Any]]]) -> None:
        for work, run in batch:
            try:
                run(work)
            except Exception:  # it would end the thread
                log.exception("a fault of the gateway with an answer")

    def _empty(self) -> None:
        super()._empty()
        self._tick()
