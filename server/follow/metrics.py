"""The follower's metrics, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weightsync.bucket.metrics import SECONDS


class FollowMetrics:
    """The candidates that were tried, the time that this took, and how far the fleet is behind its source."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self.registry = registry = CollectorRegistry()
        self._clock, self._behind = clock, dict[str, float]()
        self.tried = Counter(
            "hotswap_follow_candidates",
            "Candidates by what became of them: released, refused, superseded",
            ["outcome"],
            registry=registry,
        )
        self.fetched = Counter("hotswap_follow_fetched_bytes", "Bytes of candidates fetched", registry=registry)
        self.seconds = Histogram(
            "hotswap_follow_seconds",
            "Seconds until a candidate was fetched and verified (fetch), was a version of the fleet (publish)",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self.failures = Counter(
            "hotswap_follow_failures", "Steps that failed and are tried again", ["code"], registry=registry
        )
        self.version = Gauge(
            "hotswap_follow_released_version", "The fleet's number of what was released last", registry=registry
        )
        self._lag = Gauge(
            "hotswap_follow_lag_candidates", "Candidates seen that are neither released nor over", registry=registry
        )
        self._lag_s = Gauge(
            "hotswap_follow_lag_seconds", "Since when the oldest of these was seen; 0 without", registry=registry
        )
        self._lag.set_function(lambda: float(len(self._behind)))
        self._lag_s.set_function(self._lag_seconds)

    def seen(self, identity: str) -> None:
        """A candidate that is to be taken."""
        self._behind.setdefault(identity, self._clock())

    def over(self, identity: str, outcome: str, version: int | None) -> None:
        """A candidate is over; so are those seen before one that is released, as the newest goes first."""
        self.tried.labels(outcome).inc()
        since = self._behind.pop(identity, 0.0)
        if outcome == "released":
            self._behind = {other: seen for other, seen in self._behind.items() if seen > since}
            self.version.set(version or 0)

    def _lag_seconds(self) -> float:
        return self._clock() - min(self._behind.values()) if self._behind else 0.0
