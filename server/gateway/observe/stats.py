"""Counts of the hot path: plain integers, turned into Prometheus families when somebody asks (metrics.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from server.gateway.observe.context import TraceContext
from server.gateway.observe.finished import Finished, Watcher
from server.gateway.observe.histogram import FIRST_TOKEN, GAP, Histogram
from server.gateway.observe.swaps import Swaps
from server.gateway.wire.bodies import Usage
from server.gateway.wire.head import RequestHead

PHASES: Final = ("queued", "held", "connecting", "waiting", "streaming", "stalled")

FAILOVERS: Final = ("resumed", "complete", "nobody", "given_up", "not_resumable")


@dataclass
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
        self.limited: Counter[str] = Counter(dict.fromkeys(("requests", "tokens", "concurrency", "max_output"), 0))
        self.disconnects: Counter[str] = Counter(dict.fromkeys(PHASES, 0))
        self.upstream_failures: Counter[str] = Counter()  # by error code
        self.stale_retries = 0
        self.holds: Counter[tuple[str, str]] = Counter()  # by kind (fleet, version) and outcome (served, refused, left)
        self.hold_seconds = Histogram()
        self.refusal_retries = 0
        self.failovers: Counter[str] = Counter(dict.fromkeys(FAILOVERS, 0))  # by outcome
        self.inflight = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.first_byte = Histogram()
        self.first_token = Histogram(FIRST_TOKEN)
        self.gaps = Histogram(GAP)  # between pieces of streams as instances send them: one token each, as a rule
        self.tokens: dict[str, Tokens] = {}  # by route
        self.duration = Histogram()
        self.swaps = Swaps()
        self.store_up = True
        self.watchers: list[Watcher] = []  # the access log and traces, where they are wanted
        self.spans = dict.fromkeys(("exported", "dropped", "failed"), 0)  # dropped: the queue to the collector was full

    def held(self, kind: str, outcome: str, seconds: float) -> None:
        """A request waited for an instance."""
        self.holds[kind, outcome] += 1
        self.hold_seconds.observe(seconds)

    def begin(self, head: RequestHead, size: int) -> TraceContext | None:
        """A request with this head and `size` bytes of body is being forwarded; the trace it is in, if any."""
        self.inflight += 1
        self.bytes_in += size
        trace = None
        for watcher in self.watchers:
            trace = watcher.begin(head) or trace
        return trace

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

    def tell(self, finished: Finished) -> None:
        """A request is over, one that was not forwarded too."""
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
