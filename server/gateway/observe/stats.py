"""Counts of the hot path: plain integers, turned into Prometheus families when somebody asks (metrics.py)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.gateway.observe.finished import Finished, Watcher, of_exchange
from server.gateway.proxy.usage import Usage

if TYPE_CHECKING:
    from server.gateway.proxy.exchange import Exchange

# Upper bounds of buckets, in seconds. First tokens and gaps between tokens have bounds where targets for them lie.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
GAP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)

PHASES = ("queued", "held", "connecting", "waiting", "streaming", "stalled")


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


@dataclass(slots=True)
class Tokens:
    """Tokens of one route. `estimated` are those of streams that were cut, whose counts nobody told."""

    prompt: int = 0
    completion: int = 0
    estimated: int = 0


class Stats:
    """All counts of one gateway process."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.refused: Counter[str] = Counter()  # by error code
        self.disconnects: Counter[str] = Counter(dict.fromkeys(PHASES, 0))
        self.upstream_failures: Counter[str] = Counter()  # by error code
        self.stale_retries = 0
        self.holds: Counter[tuple[str, str]] = Counter()  # by kind (fleet, version) and outcome (served, refused, left)
        self.hold_seconds = Histogram()
        self.refusal_retries = 0
        self.inflight = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.first_byte = Histogram()
        self.first_token = Histogram(FIRST_TOKEN)
        self.gaps = Histogram(GAP)  # between pieces of streams as instances send them: one token each, as a rule
        self.queue_time = Histogram()
        self.tokens: dict[str, Tokens] = {}  # by route
        self.duration = Histogram()
        self.swaps: Counter[str] = Counter({"done": 0, "aborted": 0})  # by outcome
        self.swap_duration = Histogram()
        self.store_up = True
        self.watchers: list[Watcher] = []  # the access log and traces, where they are wanted

    def held(self, kind: str, outcome: str, seconds: float) -> None:
        """A request waited for an instance."""
        self.holds[kind, outcome] += 1
        self.hold_seconds.observe(seconds)

    def begin(self, exchange: Exchange) -> None:
        """A request is being forwarded."""
        self.inflight += 1
        self.bytes_in += exchange.bytes_in
        for watcher in self.watchers:
            watcher.begin(exchange)

    def end(self, exchange: Exchange) -> None:
        """It is over, however it ended (status 499: the client left)."""
        self.inflight -= 1
        self.requests[exchange.route, exchange.status] += 1
        self.bytes_out += exchange.bytes_out
        self.duration.observe(time.monotonic() - exchange.started)
        self.queue_time.observe(exchange.queued_s)
        if exchange.first_byte:
            taken = exchange.first_byte - exchange.started
            self.first_byte.observe(taken)
            if exchange.streams:
                self.first_token.observe(taken)
        if exchange.usage is not None:
            self._count_tokens(exchange.route, exchange.usage)
        if self.watchers:
            self._tell(of_exchange(exchange))

    def refuse(self, refusal: Finished) -> None:
        """The gateway has answered a request itself that it did not forward."""
        self._tell(refusal)

    def _tell(self, finished: Finished) -> None:
        for watcher in self.watchers:
            watcher.end(finished)

    def _count_tokens(self, route: str, usage: Usage) -> None:
        tokens = self.tokens.get(route)
        if tokens is None:
            tokens = self.tokens[route] = Tokens()
        tokens.prompt += usage.prompt_tokens
        if usage.exact:
            tokens.completion += usage.completion_tokens
        else:
            tokens.estimated += usage.completion_tokens
