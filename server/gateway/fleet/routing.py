"""The routing policy: which instance answers a request. Everything about the choice is in this file.

Least load, among the instances that may be asked at all. `Candidate` lists what a policy can look at; to change the
policy, change `pick`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from weightsync.records import ActiveRecord, InstanceRecord, SwapRecord

# An instance that stages goes on serving the version it has, so it is asked when nobody better is there: with a single
# instance a swap must not turn a request away. COMMITTING drains, or has flipped ahead of the commit.
_RANK = {"SERVING": 0, "STAGED": 0, "STAGING": 1}
_UNDER_WAY = ("prepare", "canary", "commit")
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


def eligible(record: InstanceRecord, active: ActiveRecord | None, swap: SwapRecord | None) -> bool:
    """Whether it may be asked at all: in a serving state, and with the weights of the commit record."""
    return record.state in _RANK and fresh(record, active, swap)


def fresh(record: InstanceRecord, active: ActiveRecord | None, swap: SwapRecord | None) -> bool:
    """Whether it runs what is committed; while that commit is being carried out, also what was before it."""
    if active is None:
        return True  # nothing is committed that it could lag behind
    if record.active_epoch == active.epoch:
        known = bool(record.fingerprint and active.fingerprint)
        return record.active_version == active.version and (not known or record.fingerprint == active.fingerprint)
    # `active` may be seen a moment before the swap's phase, which the same transaction wrote: any open phase will do.
    under_way = swap is not None and swap.id == active.swap_id and swap.phase in _UNDER_WAY
    return under_way and record.active_epoch == active.epoch - 1


def pick(candidates: Sequence[C], now: float) -> C | None:
    """The instance for the next request, of those that are eligible for it; None if there are none."""
    return min(candidates, key=lambda c: _cost(c, now), default=None)


def _cost(c: Candidate, now: float) -> tuple[bool, int, float, int]:
    shunned = c.failed_at > 0.0 and now - c.failed_at < _AVOID_AFTER_FAILURE_S
    return shunned, _RANK[c.state], max(c.inflight, c.reported), c.picked_at
