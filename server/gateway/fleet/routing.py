"""Routing: which instances may answer a request, and which of them does.

An instance that is not `eligible` is never asked. One that refused a connection a moment ago, or stages a version, is
asked only if no better one is there. Of the rest a `Policy` chooses, which `--routing` names: one of POLICIES, or
`MODULE:NAME` of a function or class outside. `Candidate` lists what a policy can look at. A policy is added by writing
it here and naming it in POLICIES: the option, its help and the check of the settings follow from that.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from server.errors import ConfigError, HttpError
from server.gateway.fleet.affinity import NO_HINT, Hint
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord

log: Final = logging.getLogger("hotswap.gateway")

# An instance that stages goes on serving the version it has, so it is asked when nobody better is there: with a single
# instance a swap must not turn a request away. COMMITTING drains, or tries a version as a canary.
_RANK: Final = {"SERVING": 0, "STAGED": 0, "STAGING": 1}
_UNDER_WAY: Final = ("prepare", "canary", "commit", "revert")
_AVOID_AFTER_FAILURE_S: Final = 1.0

SLACK: Final = 4.0
SPREAD: Final = 0.25


class Candidate(Protocol):
    """An instance as routing sees it."""

    @property
    def id(self) -> str: ...

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
        """The weight of an instance for this prompt or session; the highest is chosen."""
        ...


@dataclass(frozen=True)
class Need:
    """The versions that may answer; `wait_s`: how long the client waits for one of them."""

    version: int | None
    min_version: int | None
    wait_s: float

    def met_by(self, version: int | None) -> bool:
        """Whether an instance that runs `version` may be asked."""
        if version is None:
            return False
        return self.version in (None, version) and (self.min_version is None or version >= self.min_version)

    def unmet(self, active: ActiveRecord | None) -> HttpError:
        """The answer when the wait is over, or none was asked for."""
        words = f"version {self.version}" if self.version is not None else f"version {self.min_version} or later"
        serving = f"version {active.version} is active" if active is not None else "no version is active"
        details = {"active_version": active.version if active is not None else None}
        details |= {"version": self.version, "min_version": self.min_version}
        if self.wait_s:
            message = f"No instance came to serve {words} within {self.wait_s:g} s; {serving}."
            return HttpError(504, message, code="version_wait_timeout", details=details)
        message = f"No instance serves {words}; {serving}. Ask for that one, or wait with x-hotswap-wait-s."
        return HttpError(409, message, code="version_unavailable", details=details)


C = TypeVar("C", bound=Candidate)


def eligible(record: InstanceRecord, active: ActiveRecord | None, swap: SwapRecord | None) -> bool:
    """Whether it may be asked at all: in a serving state, with the weights of the commit record, and not on trial."""
    tries = active is not None and active.of(record.id).trial is not None
    return record.state in _RANK and not tries and fresh(record, active, swap)


def fresh(record: InstanceRecord, active: ActiveRecord | None, swap: SwapRecord | None) -> bool:
    """Whether it runs what is committed; while that commit is being carried out, also what was before it."""
    if active is None:
        return True  # nothing is committed that it could lag behind
    active = active.of(record.id)
    if record.active_epoch == active.epoch:
        known = bool(record.fingerprint and active.fingerprint)
        return record.active_version == active.version and (not known or record.fingerprint == active.fingerprint)
    # `active` may be seen a moment before the swap's phase, which the same transaction wrote: any open phase will do.
    under_way = swap is not None and swap.id == active.swap_id and swap.phase in _UNDER_WAY
    returned = swap is not None and swap.phase == "revert" and record.active_version == active.version
    return under_way and (record.active_epoch == active.epoch - 1 or returned)


class Policy(Protocol):
    """Chooses the instance for a request. To write one, write a function with this signature, or a class whose objects
    are called like it; a class is made without arguments, once in each gateway process, and may keep state.

    `candidates` are two or more, all of which may be asked; one of them must be returned. `now` is monotonic seconds.
    `hint` is what is known of the request (affinity.py): prefixes of its prompt and its session. It is called on the
    event loop, for every request that has a choice, so it must not wait. Where a policy from outside raises, or returns
    something else, the default one chooses, and the log says so once.

        def shortest_name(candidates, now, hint):
            return min(candidates, key=lambda candidate: len(candidate.id))
    """

    def __call__(self, candidates: Sequence[C], now: float, hint: Hint, /) -> C: ...


def affinity(candidates: Sequence[C], now: float, hint: Hint) -> C:
    """The least cost: requests there, less what a cached prefix is worth. Equal costs: the same prompt or session goes
    the same way from every gateway; others take turns.

    Cost is `load - worth * cached`. `worth` is the bound on affinity: the instance that has all of the prompt is
    preferred while it has at most SLACK requests and SPREAD of the mean load more than the least loaded one, so that
    with load L on average nobody is sent more than (1 + SPREAD) * L + SLACK by affinity (consistent hashing with
    bounded loads, Mirrokni et al. 2018, has the same bound); half of the prompt is worth half of that.

    All instances are looked at, rather than two drawn at random: the longest prefix must be found among all anyway, and
    the herd that two choices avoid comes of stale loads, while the requests this gateway sends count at once.
    """
    loads = [c.load for c in candidates]
    if hint.prefixes or hint.session:
        worth = SLACK + SPREAD * sum(loads) / len(loads)
        loads = [load - worth * c.cached(hint) for c, load in zip(candidates, loads, strict=True)]
    least = min(loads)
    if loads.count(least) == 1:
        return candidates[loads.index(least)]
    equal = [c for c, load in zip(candidates, loads, strict=True) if load == least]
    return max(equal, key=lambda c: c.tie_break(hint)) if hint.key else min(equal, key=lambda c: c.picked_at)


def least_loaded(candidates: Sequence[C], now: float, hint: Hint) -> C:
    """The fewest requests, whatever is cached; equal ones take turns."""
    return min(candidates, key=lambda c: (c.load, c.picked_at))


def round_robin(candidates: Sequence[C], now: float, hint: Hint) -> C:
    """Each in its turn, whatever its load."""
    return min(candidates, key=lambda c: c.picked_at)


DEFAULT: Final = "affinity"
POLICIES: Final[dict[str, Policy]] = {DEFAULT: affinity, "least-loaded": least_loaded, "round-robin": round_robin}
CHOICES: Final = f"{', '.join(POLICIES)}, or MODULE:NAME of your own"


def pick(candidates: Sequence[C], now: float, hint: Hint = NO_HINT, policy: Policy = affinity) -> C | None:
    """The instance for the next request, of those that are eligible for it; None if there are none."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    peers = _best_placed(candidates, now)
    return policy(peers, now, hint) if len(peers) > 1 else peers[0]


def _best_placed(candidates: Sequence[C], now: float) -> Sequence[C]:
    """Those of the lowest rank; who refused a connection a moment ago comes last."""
    since = now - _AVOID_AFTER_FAILURE_S
    if not any(c.failed_at > since or c.state == "STAGING" for c in candidates):
        return candidates
    ranks = [_RANK[c.state] + 2 * (c.failed_at > since) for c in candidates]
    lowest = min(ranks)
    return [c for c, rank in zip(candidates, ranks, strict=True) if rank == lowest]


def find(name: str) -> Policy:
    """The policy that --routing names. Raises ConfigError."""
    known = POLICIES.get(name)
    if known is not None:
        return known
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"--routing {name}: there is no such policy; give {CHOICES}.")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(found, type):
            found = found()
    except Exception as exc:
        raise ConfigError(f"--routing {name}: it cannot be loaded ({exc}); give {CHOICES}.") from exc
    if not callable(found):
        raise ConfigError(f"--routing {name}: it is no function and no class of a policy; give {CHOICES}.")
    return _Outside(name, found)


class _Outside:
    """A policy of somebody else's, whose faults cost no request."""

    def __init__(self, name: str, policy: Any) -> None:
        self._name = name
        self._policy = policy
        self._told = False

    def __call__(self, candidates: Sequence[C], now: float, hint: Hint, /) -> C:
        try:
            found = self._policy(candidates, now, hint)
            for candidate in candidates:
                if candidate is found:
                    return candidate
            raise ValueError(f"{found!r} is none of the candidates")
        except Exception:
            if not self._told:
                self._told = True
                log.exception("--routing %s has failed; %s chooses where it does", self._name, DEFAULT)
        return affinity(candidates, now, hint)
