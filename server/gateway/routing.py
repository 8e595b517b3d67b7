"""The routing policy: which instance answers a request. Everything about the choice is in this file.

Least load, among the instances that may be asked at all. `Candidate` lists what a policy can look at; to change the
policy, change `pick`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

# An instance that stages or flips goes on serving the version it has, so it is asked when nobody better is there: with
# a single instance a swap must not turn a request away.
_RANK = {"SERVING": 0, "STAGED": 0, "STAGING": 1, "COMMITTING": 1}
_AVOID_AFTER_FAILURE_S = 1.0


class Candidate(Protocol):
    """What is known of an instance when a request is routed."""

    @property
    def state(self) -> str: ...

    @property
    def inflight(self) -> int:
        """Requests this gateway has there now."""
        ...

    @property
    def reported(self) -> float:
        """Requests running and waiting there, as it said at the last scrape (all gateways' requests)."""
        ...

    @property
    def failed_at(self) -> float:
        """When it last refused a connection (monotonic seconds), 0.0 if never."""
        ...

    @property
    def picked_at(self) -> int:
        """Serial number of the last request routed there: equal load takes turns."""
        ...


C = TypeVar("C", bound=Candidate)


def routable(candidate: Candidate) -> bool:
    """Whether it may be asked at all. TORN, DRAINING, STARTING and STOPPED never are."""
    return candidate.state in _RANK


def pick(candidates: Sequence[C], now: float) -> C | None:
    """The instance for the next request; None if none may be asked."""
    able = [c for c in candidates if routable(c)]
    return min(able, key=lambda c: _cost(c, now), default=None)


def _cost(c: Candidate, now: float) -> tuple[bool, int, float, int]:
    shunned = c.failed_at > 0.0 and now - c.failed_at < _AVOID_AFTER_FAILURE_S
    return shunned, _RANK[c.state], max(c.inflight, c.reported), c.picked_at
