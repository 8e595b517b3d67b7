"""The counts of this gateway: plain numbers, cheap enough for every chunk of a stream (metrics.py shows them).

The readers of single requests, the access log and traces, are told of each when it is over (`Finished`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from server.errors import HttpError
from server.gateway.access.keys import Principal
from server.gateway.observe.context import TraceContext
from server.gateway.wire.bodies import Usage
from server.gateway.wire.capture import Capture, CaptureMemory
from server.gateway.wire.head import RequestHead
from server.key_limits import NAMED
from weightsync.control.chain import LedgerEntry
from weightsync.control.records import InstanceRecord, SwapRecord

FAILOVERS: Final = ("resumed", "complete", "nobody", "given_up", "not_resumable")
SWAP_PHASES: Final = ("prepare", "canary", "commit")
SWAP_ENDS: Final = ("done", "aborted")
Seen = list[tuple[str, float]]  # phases of a swap and when they were seen, unix seconds

# Upper bounds of buckets, in seconds. First tokens and gaps between tokens have bounds where targets for them lie.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
GAP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
STALL = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class State(Enum):
    """The state of a request."""

    QUEUED = "queued"
    HELD = "held"
    CONNECTING = "connecting"
    WAITING = "waiting"
    STREAMING = "streaming"
    ENDED = "ended"


PHASES: Final = (*(state.value for state in State if state is not State.ENDED), "stalled")


class Histogram:
    """Counts per bucket; `le` bounds as Prometheus has them."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(`le`, cumulative count) pairs, `+Inf` last."""
        pairs, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            pairs.append((bound, float(total)))
        return pairs


@dataclass
class Finished:
    """A finished request.

    These are ids, counts and times: never a key, a header that a client made up, or a word of a prompt or an answer.

    Times are in seconds, `ended` in unix seconds; None: there was no such thing.
    """

    request_id: str
    method: str
    route: str  # a public route, "-" where none was recognised
    status: int  # 499: the client left
    code: str | None  # of the gateway's own error
    key: str  # name of the key's owner
    ended: float
    duration_s: float
    queued_s: float = 0.0
    ttft_s: float | None = None
    instance: str | None = None  # the last that was asked
    first_version: int | None = None
    last_version: int | None = None
    drawn_version: int | None = None  # by a split of the traffic, whichever version answered
    cluster: int = -1  # of the requests that were drawn together with it, -1: it was drawn by itself
    lost: bool = False  # an instance failed it, though another may have answered
    load: int = 0  # requests of this gateway that its instance had when it came, with it
    usage: Usage | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    streamed: bool = False
    trace: TraceContext | None = None
    model: str = ""  # who answered, or was to; "" for what no model answers


def of_refusal(request_id: bytes, method: bytes, route: str, key: str, error: HttpError) -> Finished:
    """The record of a request that the gateway answered itself, without forwarding it."""
    return Finished(
        request_id=request_id.decode(),
        method=method.decode("latin-1") if method.isalpha() else "-",
        route=route,
        status=error.status,
        code=error.code,
        key=key,
        ended=time.time(),
        duration_s=0.0,
    )


class Watcher(Protocol):
    """A watcher hears of requests. It is called on the event loop, so it does little there and never waits."""

    def begin(self, head: RequestHead) -> TraceContext | None:
        """A request with this head is about to be forwarded; the trace it is in from here on, if it is in one."""

    def end(self, finished: Finished) -> None:
        """A request is over."""


class Collector(Protocol):
    """Wants whole answers (server/answers). It is called on the event loop, like a watcher."""

    def begin(self, principal: Principal, route: str, body: bytes) -> Capture[Any] | None:
        """A request with this body is about to be forwarded; where its answer goes, None if nobody wants it."""

    def end(self, capture: Capture[Any], finished: Finished) -> None:
        """The answer is over."""


@dataclass
class Tokens:
    """Tokens of one route. `estimated` are those of streams that were cut, whose counts nobody told."""

    prompt: int = 0
    completion: int = 0
    estimated: int = 0


class OfVersion:
    """Requests of one version, where versions share the traffic."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # by status
        self.duration = Histogram()
        self.first_byte = Histogram()


class HookCounts:
    """The counts of a webhook: attempts by outcome, and the entries that its URL has not got."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(delivered=0, failed=0, lost=0)
        self.behind = 0


class Swaps:
    """Counts and times of swaps, from the records the fleet's view gets.

    Times are this process's: a phase lasts from the moment its record was seen here to the moment the next one was.
    `told` hears of each swap that has ended, and of its phases.
    """

    def __init__(self, told: Callable[[SwapRecord, Seen], None]) -> None:
        self.ended = dict.fromkeys(SWAP_ENDS, 0)
        self.duration = Histogram(SECONDS)
        self.phases = {phase: Histogram(SECONDS) for phase in SWAP_PHASES}
        self.stall = Histogram(STALL)
        self._seen: Seen = []
        self._told = told

    def swap(self, before: SwapRecord | None, record: SwapRecord) -> None:
        """Counts a change of the swap record. The record that was there when this process began is not counted."""
        if before is None or (before.id == record.id and before.phase == record.phase):
            return
        now = time.time()
        if before.id != record.id:
            self._seen = []
        elif self._seen and before.phase in self.phases:
            self.phases[before.phase].observe(max(0.0, now - self._seen[-1][1]))
        self._seen.append((record.phase, now))
        if record.phase in SWAP_ENDS:
            self.ended[record.phase] += 1
            self.duration.observe(max(0.0, now - record.opened_at))
            self._told(record, self._seen)
            self._seen = []

    def instance(self, before: InstanceRecord, after: InstanceRecord) -> None:
        """An instance's record has changed: with its version, it tells how long its engine stood still."""
        if after.active_version != before.active_version and after.commit_ms is not None:
            self.stall.observe(after.commit_ms / 1e3)


class ProcessStats:
    """The counts of one gateway process that belong to no model, and who is told of the requests of all."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # by error code
        self.limited: Counter[str] = Counter(dict.fromkeys(NAMED, 0))
        self.swap_told: Callable[[str, SwapRecord, Seen], None] = lambda _, __, ___: None  # of those that have ended
        self.ledger_told: Callable[[LedgerEntry], None] = lambda _: None  # of new entries, in the gateway that leads
        self.webhooks: dict[str, HookCounts] = {}  # by URL
        self.watchers: list[Watcher] = []  # the access log and traces, where they are wanted
        self.collector: Collector | None = None  # who wants whole answers, those of keys that collect at least
        self.collects_all = False  # those of others too
        self.captured = CaptureMemory()
        self.answers_written: Counter[str] = Counter(answer=0, feedback=0)  # to the log, by kind of record
        self.answers_dropped: Counter[tuple[str, str]] = Counter()  # by who wanted them, and cause
        self.spans = dict.fromkeys(("exported", "dropped", "failed"), 0)  # dropped: the queue to the collector was full

    def tell(self, finished: Finished) -> None:
        """A request is over that was not forwarded."""
        for watcher in self.watchers:
            watcher.end(finished)


class Stats:
    """The counts of one model in one gateway process."""

    def __init__(self, process: ProcessStats | None = None, model: str = "") -> None:
        self.process = process or ProcessStats()
        self.model = model
        self.requests: Counter[tuple[str, int]] = Counter()
        self.disconnects: Counter[str] = Counter(dict.fromkeys(PHASES, 0))
        self.upstream_failures: Counter[str] = Counter()  # by error code
        self.stale_retries = 0
        self.holds: Counter[tuple[str, str]] = Counter()  # by kind (fleet, version) and outcome (served, refused, left)
        self.hold_seconds = Histogram()
        self.refusal_retries = 0
        self.failovers: Counter[str] = Counter(dict.fromkeys(FAILOVERS, 0))  # by outcome
        self.fallbacks: Counter[tuple[str, str]] = Counter()  # to which model, by error code
        self.inflight = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.first_byte = Histogram()
        self.first_token = Histogram(FIRST_TOKEN)
        self.gaps = Histogram(GAP)  # between pieces of streams as instances send them: one token each, as a rule
        self.tokens: dict[str, Tokens] = {}  # by route
        self.duration = Histogram()
        self.of_version: dict[int, OfVersion] = {}  # while versions share the traffic
        self.swaps = Swaps(lambda record, seen: self.process.swap_told(model, record, seen))
        self.store_up = True
        self.release = "none"  # state of the release under way, or of the last one
        self.watchers: list[Watcher] = []  # of this model's requests alone; those of all are the process's

    @property
    def watched(self) -> bool:
        """Whether anybody is told of requests."""
        return bool(self.watchers or self.process.watchers)

    def held(self, kind: str, outcome: str, seconds: float) -> None:
        """A request waited for an instance."""
        self.holds[kind, outcome] += 1
        self.hold_seconds.observe(seconds)

    def begin(self, head: RequestHead, size: int) -> TraceContext | None:
        """A request with this head and `size` bytes of body is being forwarded; the trace it is in, if any."""
        self.inflight += 1
        self.bytes_in += size
        trace = None
        for watcher in self.process.watchers:
            trace = watcher.begin(head) or trace
        return trace

    def handed_on(self, other: Stats, size: int) -> None:
        """It has begun here, with `size` bytes of body, and another model answers it."""
        self.inflight -= 1
        self.bytes_in -= size
        other.inflight += 1
        other.bytes_in += size

    def end(
        self,
        route: str,
        status: int,
        bytes_out: int,
        taken_s: float,
        ttft_s: float,
        streamed: bool,
        usage: Usage | None,
    ) -> None:
        """It is over, however it ended (status 499: the client left). `ttft_s`: below 0 if no byte came."""
        self.inflight -= 1
        self.requests[route, status] += 1
        self.bytes_out += bytes_out
        self.duration.observe(taken_s)
        if ttft_s >= 0.0:
            self.first_byte.observe(ttft_s)
            if streamed:
                self.first_token.observe(ttft_s)
        if usage is not None:
            self._count_tokens(route, usage)

    def shared(self, version: int | None, status: int, taken_s: float, ttft_s: float) -> None:
        """It was divided between versions, and is over. `version`: who answered, or was to; None if nobody was."""
        seen = self.of_version.get(version or 0)
        if seen is None:
            seen = self.of_version[version or 0] = OfVersion()
        seen.requests[status] += 1
        seen.duration.observe(taken_s)
        if ttft_s >= 0.0:
            seen.first_byte.observe(ttft_s)

    def tell(self, finished: Finished) -> None:
        """A request is over."""
        for watcher in self.watchers:
            watcher.end(finished)
        self.process.tell(finished)

    def _count_tokens(self, route: str, usage: Usage) -> None:
        tokens = self.tokens.get(route)
        if tokens is None:
            tokens = self.tokens[route] = Tokens()
        tokens.prompt += usage.prompt_tokens
        if usage.exact:
            tokens.completion += usage.completion_tokens
        else:
            tokens.estimated += usage.completion_tokens
