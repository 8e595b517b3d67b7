"""Shadow traffic: a share of live requests is repeated on a version that is tried out; clients never see the answers.

Repeating one must cost its original nothing. So a repetition

* goes to instances of that version alone, and only while they are well and less than half full (`Window`), and nobody
  waits in the gateway's queue; there are at most MOST at a time, and each may take LIMIT_S seconds and LIMIT_BYTES;
* has a lower priority in the engine than any request can have, and is cut when a request needs its place;
* counts in no limit of a key, in no load, window or health of an instance, and for no share of a split;
* is begun when its original goes to an instance, and neither waits for the other. Its outcome is only counted.

Repeated are requests of routes that only generate text, and that pin no version. A judge (`listen`) gets each answer
that has come to its end, and each failure of the version or its engine, under the request id of the original; without a
judge nothing of them is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, Protocol

from server.errors import BadUpstream
from server.gateway.access.keys import Principal
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.retries import LOST
from server.gateway.fleet.routing import Need
from server.gateway.observe.stats import Finished, Histogram
from server.gateway.routes import Target
from server.gateway.wire.bodies import last_version
from server.gateway.wire.capture import Capture, CaptureMemory
from server.gateway.wire.head import RequestHead, upstream_head
from server.gateway.wire.pool import UpstreamConnection
from server.gateway.wire.relay import ResponseRelay
from server.key_limits import MAX_PRIORITY
from weightsync.control.records import ActiveRecord

log: Final = logging.getLogger("hotswap.gateway")

MOST: Final = 16
LIMIT_S: Final = 120.0
LIMIT_BYTES: Final = 1 << 20  # of an answer, and of a request
FULL: Final = 0.5  # of an instance's window
KEPT: Final = 256  # answers that wait for the judge

_PRIORITY: Final = b"x-hotswap-priority: %d\r\n" % (MAX_PRIORITY + 1)
_OWN: Final = (b"x-hotswap-priority:", b"traceparent:", b"tracestate:", b"baggage:")  # lines a repetition goes without
_VERSION: Final = b"x-hotswap-weight-version"


@dataclass(frozen=True)
class Repeated:
    """The answer to a repetition, or its failure. `capture` has the bodies of request and answer, which its reader
    closes; those of a failure show nothing, and the event loop drops them.

    `finished` tells of the repetition what is told of any request; its `request_id` is the original's.
    """

    capture: Capture[Principal]
    finished: Finished
    failed: bool = False


class Request(Protocol):
    """A request, as far as it is repeated."""

    target: Target
    head: RequestHead
    body: bytes
    need: Need | None
    principal: Principal
    repeated: bool
    cluster: int


class OfFleet(Protocol):
    """The gateway's view of the instances (view.py)."""

    serving: list[Instance]


class Shadows:
    """The repetitions of one gateway. `outcomes`, by version: answered, failed, no_room, cut, late, too_large."""

    def __init__(self, fleet: OfFleet) -> None:
        self.on = False
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.dropped = 0  # answers that the judge was too slow for
        self.seconds: dict[int, Histogram] = {}  # of those answered, by version
        self.running: deque[Repetition] = deque()
        self.memory = CaptureMemory(per_answer=2 * LIMIT_BYTES)
        self._fleet = fleet
        self._percents: dict[int, float] = {}
        self._credit: dict[int, float] = {}
        self._judge: asyncio.Queue[Repeated] | None = None

    def listen(self) -> asyncio.Queue[Repeated]:
        """The answers from now on, at most KEPT that were not taken; more are dropped."""
        self._judge = asyncio.Queue(KEPT)
        return self._judge

    def ignore(self) -> None:
        """Takes the judge away, and drops the answers it has not read."""
        judge, self._judge = self._judge, None
        while judge is not None and not judge.empty():
            judge.get_nowait().capture.drop()

    def follow(self, active: ActiveRecord | None) -> None:
        """The commit record says what is repeated where."""
        shares = active.split.shares if active is not None and active.split is not None else ()
        percents = {share.version: share.shadow for share in shares if share.shadow > 0}
        if percents != self._percents:
            self._percents, self._credit = percents, dict.fromkeys(percents, 0.0)
        self.on = bool(percents)

    def sample(self, request: Request, instance: Instance, waiting: int) -> None:
        """Repeats the request that goes to `instance` now, if it is its turn; `waiting` others have no place yet."""
        pinned = request.need is not None and request.need.version is not None
        if request.repeated or pinned or not request.target.route.continued:
            return
        request.repeated = True  # or passed over: once is enough
        for version, percent in self._percents.items():
            if version == instance.record.active_version:
                continue
            self._credit[version] += percent
            if self._credit[version] >= 100.0:
                self._credit[version] -= 100.0
                self._begin(request, version, waiting)

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

    def _begin(self, request: Request, version: int, waiting: int) -> None:
        able = [i for i in self._fleet.serving if i.record.active_version == version and _has_room(i)]
        if waiting or not able or len(self.running) >= MOST or len(request.body) > LIMIT_BYTES:
            self.outcomes[version, "no_room"] += 1
            return
        instance = min(able, key=lambda i: (i.working + i.shadowed, i.picked_at))
        Repetition(self, request, version, instance, keep=self._judge is not None)

    def ended(self, repetition: Repetition, outcome: str, finished: Finished) -> None:
        """One is over, and its place is free."""
        self.running.remove(repetition)
        self.outcomes[repetition.version, outcome] += 1
        if outcome == "answered":
            self.seconds.setdefault(repetition.version, Histogram()).observe(finished.duration_s)
        capture = repetition.capture
        if capture is None:
            return
        failed = outcome == "failed" and (finished.lost or finished.status >= 500)
        if (failed or (outcome == "answered" and not capture.lost)) and self._judge is not None:
            try:
                self._judge.put_nowait(Repeated(capture, finished, failed))
                return
            except asyncio.QueueFull:
                self.dropped += 1
        capture.drop()


class Repetition:
    """A request that is repeated, and the reader of its answer (pool.Owner)."""

    def __init__(self, shadows: Shadows, request: Request, version: int, instance: Instance, *, keep: bool) -> None:
        self.version, self.instance, self.started = version, instance, time.monotonic()
        self.capture = Capture(shadows.memory, request.body, request.principal) if keep else None
        self._shadows, self._target, self._head, self._body = shadows, request.target, request.head, request.body
        self._name, self._cluster = request.principal.name, request.cluster
        self._relay = ResponseRelay(request.head.request_id, http10=False, keep_alive=True)
        self._relay.capture = self.capture
        self._link: UpstreamConnection | None = None
        self._first_byte_s = 0.0
        self._over = self._lost = self._pooled = False
        shadows.running.append(self)
        instance.shadowed += 1
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self, *, again: bool = False) -> None:
        try:
            pool = self.instance.pool
            link = None if again else pool.take()
            self._pooled = link is not None
            link = link or await pool.connect()
            if self._over:
                link.release()
                return
            self._link, body = link, self._body
            method, path = self._target.route.method, self._target.upstream
            link.send(self, upstream_head(method, path, pool.opening, _quiet(self._head), len(body)), body)
        except Exception as error:
            log.debug("%s is not repeated: %s", self._head.request_id.decode(), error)
            self._lost = again  # the instance may have died of what it was sent first
            self.end("failed")

    def upstream_data(self, data: bytes) -> None:
        """Bytes of the instance (pool.Owner)."""
        relay = self._relay
        try:
            relay.feed(data)
        except BadUpstream:
            self._lost = True
            self.end("failed")
            return
        if not self._first_byte_s and relay.body_bytes:
            self._first_byte_s = time.monotonic() - self.started
        if relay.complete:
            self._lost = relay.refused == LOST
            self.end("answered" if relay.status < 400 and not relay.refused else "failed")
        elif relay.body_bytes > LIMIT_BYTES:
            self.end("too_large")

    def upstream_lost(self, exc: Exception | None) -> None:
        """The connection has ended (pool.Owner)."""
        self._link = None
        if self._pooled and not self._relay.seen and not self._over:  # it was idle, and closed on the way
            self._opening = asyncio.get_running_loop().create_task(self._open(again=True))
            return
        self._lost = True
        self.end("failed")

    def end(self, outcome: str) -> None:
        """It is over, and its connection with it unless that can be used again."""
        if self._over:
            return
        self._over = True
        link, self._link = self._link, None
        if link is not None and self._relay.complete and self._relay.reusable:
            link.release()
        elif link is not None:
            link.abort()
        self.instance.shadowed -= 1
        self._shadows.ended(self, outcome, self._finished())
        self._relay.close()

    def _finished(self) -> Finished:
        relay, first = self._relay, self._relay.header(_VERSION)
        version = int(first) if first.isdigit() else None
        return Finished(
            self._head.request_id.decode(),
            self._target.route.method.decode(),
            self._target.route.name,
            relay.status,
            None,
            self._name,
            time.time(),
            time.monotonic() - self.started,
            ttft_s=self._first_byte_s or None,
            instance=self.instance.id,
            first_version=version,
            last_version=last_version(relay.tail()) or version,
            drawn_version=self.version,
            cluster=self._cluster,
            lost=self._lost,
            usage=relay.usage(),
            bytes_in=len(self._body),
            bytes_out=relay.body_bytes,
            streamed=relay.sse,
        )


def _has_room(instance: Instance) -> bool:
    asks = instance.signals is not None and instance.signals.num_requests_waiting > 0
    room = max(1.0, instance.window.limit * FULL)
    calm = instance.state != "STAGING" and instance.health.well and not asks
    return calm and instance.working + instance.shadowed < room


def _quiet(head: RequestHead) -> RequestHead:
    """The head of a repetition: the least urgent, and in nobody's trace."""
    lines = head.forward.splitlines(keepends=True)
    kept = b"".join(line for line in lines if not line.startswith(_OWN))
    return RequestHead(head.request_id + b"-shadow", kept + _PRIORITY)
