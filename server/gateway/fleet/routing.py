"""The routing policy: which instance answers a request. Everything about the choice is in this file.

1. Whoever refused a connection a moment ago, or stages a version, is asked only if nobody better is there.
2. Of the rest, the least cost counts: requests there, less what a cached prefix is worth.
3. Equal costs: the same prompt or session goes the same way from every gateway; others take turns.

Cost is `load - worth * cached`. `worth` is the bound on affinity: the instance that has all of the prompt is preferred
while it has at most SLACK requests and SPREAD of the mean load more than the least loaded one, so that with load L on
average nobody is sent more than (1 + SPREAD) * L + SLACK by affinity (consistent hashing with bounded loads, Mirrokni
et al. 2018, has the same bound); half of the prompt is worth half of that.

All instances are looked at, rather than two drawn at random: the longest prefix must be found among all anyway, and the
herd that two choices avoid comes of stale loads, while the requests this gateway sends count at once.

`Candidate` lists what a policy can look at; to change the policy, change `pick`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from server.gateway.fleet.affinity import NO_HINT, Hint
from server.gateway.fleet.signals import Signals
from weightsync.records import ActiveRecord, InstanceRecord, SwapRecord

# An instance that stages goes on serving the version it has, so it is asked when nobody better is there: with a single
# instance a swap must not turn a request away. COMMITTING drains, or has flipped ahead of the commit.
_RANK: Final = {"SERVING": 0, "STAGED": 0, "STAGING": 1}
_UNDER_WAY: Final = ("prepare", "canary", "commit")
_AVOID_AFTER_FAILURE_S: Final = 1.0

SLACK: Final = 4.0
SPREAD: Final = 0.25
_FULL_FROM: Final = 0.8  # of the KV cache: from here on vLLM may have to preempt
_FULL_COST: Final = 8.0  # requests that a full KV cache counts for


class Candidate(Protocol):
    """What is known of an instance when a request is routed."""

    @property
    def state(self) -> str: ...

    @property
    def load(self) -> float:
        """Requests there now (this gateway's exactly, the others' as of the last scrape), and its `pressure`."""
        ...

    @property
    def failed_at(self) -> float:
        """When it last refused a connection (monotonic seconds), 0.0 if never."""
        ...

    @property
    def picked_at(self) -> int:
        """Serial number of the last request routed there: equal load takes turns."""
        ...

    def cached(self, hint: Hint) -> float:
        """How much of the prompt it is likely to have in its prefix cache (0 to 1); 1 if it has the session."""
        ...

    def tie_break(self, hint: Hint) -> int:
        """Whose turn it is for this prompt or session: the highest one's."""
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


def pressure(signals: Signals | None) -> float:
    """What an instance's own state adds to its requests, in requests: who queues there waits for a whole answer."""
    if signals is None:
        return 0.0
    full = max(0.0, signals.kv_cache_usage - _FULL_FROM) / (1.0 - _FULL_FROM)
    return signals.num_requests_waiting + _FULL_COST * full


def pick(candidates: Sequence[C], now: float, hint: Hint = NO_HINT) -> C | None:
    """The instance for the next request, of those that are eligible for it; None if there are none."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    peers = _best_placed(candidates, now)
    loads = [c.load for c in peers]
    if hint.prefixes or hint.session:
        worth = SLACK + SPREAD * sum(loads) / len(loads)
        loads = [load - worth * c.cached(hint) for c, load in zip(peers, loads, strict=True)]
    least = min(loads)
    if loads.count(least) == 1:
        return peers[loads.index(least)]
    equal = [c for c, load in zip(peers, loads, strict=True) if load == least]
    return max(equal, key=lambda c: c.tie_break(hint)) if hint.key else min(equal, key=lambda c: c.picked_at)


def _best_placed(candidates: Sequence[C], now: float) -> Sequence[C]:
    """Those of the lowest rank; who refused a connection a moment ago comes last."""
    since = now - _AVOID_AFTER_FAILURE_S
    if not any(c.failed_at > since or c.state == "STAGING" for c in candidates):
        return candidates
    ranks = [_RANK[c.state] + 2 * (c.failed_at > since) for c in candidates]
    lowest = min(ranks)
    return [c for c, rank in zip(candidates, ranks, strict=True) if rank == lowest]
