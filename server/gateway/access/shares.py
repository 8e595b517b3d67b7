"""How several gateways divide a limit among them, without asking anybody while requests come in; no I/O here.

A resource is one limit of one key. Each gateway *holds* a part of it, whole units, and uses no more than it holds; the
rule that keeps a limit is that what all hold together is never more than the limit. Because what was used in the last
minute is kept back when a part is handed on (one who has used 30 of 60 can give away 30), the same rule bounds what all
have used in any 60 seconds.

    nothing said of a resource -> each holds limit // (number of gateways it allows for)
    it is in use somewhere     -> all say what they hold, and once a second hand on what others need more

Holding less takes effect at once and is then written down. Holding more is first written down, in a transaction that
fails if anybody else has come to hold more since this gateway last looked (`gateway/usage/round` is compared and
changed). So of two that reach for the same units, one gets them.

    ENTERING --all others allow for it, which they say by naming it--> ACTIVE --it ends--> LEFT

A gateway that enters holds nothing. One that has left holds what it had used, for a minute, by a record it leaves
behind: so limits outlive restarts, also of a lone gateway. One that was killed is forgotten, with what it had used, as
soon as its lease ends; and one that only lost the store goes on with its last part, while others may take that over
then. By so much a limit can be overrun.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weightsync.records import Record

State = Literal["entering", "active", "left"]
SPARE = 0.05  # of what is free goes to all alike, so that one who had nothing to do can begin


@dataclass(frozen=True)
class Share(Record):
    """A gateway's part of one resource: what it holds, what of it is in use, and what it was asked for a second."""

    resource: str
    held: int
    used: int
    demand: int


@dataclass(frozen=True)
class UsageRecord(Record):
    """What one gateway says. Only while it is active does it hold a part of what it does not name."""

    gateway: str
    state: State
    allows_for: tuple[str, ...]
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """What this gateway knows of a resource: its limit, units in use here, units asked for a second."""

    limit: int
    used: int
    demand: int


class Other:
    """Another gateway, as it last said."""

    def __init__(self, record: UsageRecord) -> None:
        self.state = record.state
        self.allows_for = frozenset(record.allows_for)
        self.shares = {share.resource: share for share in record.shares}

    def held(self, resource: str, limit: int) -> int:
        """Units it may use."""
        share = self.shares.get(resource)
        if share is not None:
            return share.held
        return limit // max(1, len(self.allows_for)) if self.state == "active" else 0


@dataclass(frozen=True)
class Plan:
    """What to write next. `grows`: it makes this gateway hold more, so it needs the transaction to be true."""

    state: State
    allows_for: frozenset[str]
    held: Mapping[str, int]
    grows: bool


class Division:
    """One gateway's side of it."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.others: dict[str, Other] = {}
        self._active = False
        self._allows_for = frozenset({me})
        self._held: dict[str, int] = {}

    @property
    def alone(self) -> bool:
        """All limits are this gateway's, whole, and it need say nothing of them."""
        return self._active and not self.others and len(self._allows_for) == 1 and not self._held

    @property
    def active(self) -> bool:
        """It may use what it holds."""
        return self._active

    def held(self, resource: str, limit: int) -> int:
        """Units this gateway may use."""
        if not self._active:
            return 0
        held = self._held.get(resource)
        return limit // len(self._allows_for) if held is None else min(held, limit)

    def elsewhere(self, resource: str) -> int:
        """Units others last said to be in use."""
        return sum(o.shares[resource].used for o in self.others.values() if resource in o.shares)

    def is_short(self, resource: str, use: Use) -> bool:
        """It was asked for more than it holds, and there are units that nobody holds."""
        wanting = use.demand > 0 and use.used + use.demand > self.held(resource, use.limit)
        return wanting and self._room(resource, use.limit) > self.held(resource, use.limit)

    def can_give(self, share: Share, use: Use) -> bool:
        """Another one was asked for more than it holds, and this one does not use all of its own."""
        return share.demand > 0 and share.used + share.demand > share.held and self._spare(share.resource, use) > 0

    # what others say

    def seen(self, record: UsageRecord, uses: Mapping[str, Use]) -> bool:
        """Takes in what another gateway says; True if it was not known, and now is to be told that it is."""
        self.others[record.gateway] = Other(record)
        if record.gateway in self._allows_for or record.state == "left":
            return False
        self._allows_for |= {record.gateway}
        for resource, use in uses.items():  # what is used already cannot be given to the new one
            if resource not in self._held and use.used > use.limit // len(self._allows_for):
                self._held[resource] = use.used
        return True

    def gone(self, gateway: str) -> None:
        """Another gateway has ended."""
        self.others.pop(gateway, None)

    # what to say

    def plan(self, uses: Mapping[str, Use]) -> Plan:
        """Gives up what others need more (at once), and says what to hold from now on."""
        if not self._active:
            return self._entrance(uses)
        kept = self._allows_for & {self.me, *(n for n, o in self.others.items() if o.state != "left")}
        if kept != self._allows_for:
            return self._wider(kept, uses)
        wanted = {r: self._wanted(r, use) for r, use in uses.items() if self._matters(r, use)}
        before = {r: self.held(r, uses[r].limit) for r in wanted}
        self._held |= {r: min(units, before[r]) for r, units in wanted.items()}
        grows = any(units > before[r] for r, units in wanted.items())
        for resource in self._held.keys() - wanted.keys():
            grows |= self._let_go(resource, uses.get(resource), wanted)
        return Plan("active", kept, wanted, grows)

    def limit_changed(self, resource: str, limit: int) -> None:
        """To be told by all before anybody uses more: each falls back to an equal part at most."""
        if resource in self._held:
            self._held[resource] = min(self._held[resource], limit // len(self._allows_for))

    def adopt(self, plan: Plan) -> None:
        """`plan` was written: it holds."""
        self._active = plan.state == "active"
        self._allows_for = plan.allows_for
        self._held = dict(plan.held)

    def record(self, plan: Plan | None, uses: Mapping[str, Use]) -> UsageRecord:
        """What to write: `plan`, or, without one, what holds already."""
        held = self._held if plan is None else plan.held
        shares = (_share(r, units, uses.get(r)) for r, units in sorted(held.items()))
        state: State = plan.state if plan is not None else "active" if self._active else "entering"
        allows_for = self._allows_for if plan is None else plan.allows_for
        return UsageRecord(self.me, state, tuple(sorted(allows_for)), tuple(shares))

    def farewell(self, uses: Mapping[str, Use]) -> UsageRecord:
        """What to leave behind: this gateway takes no more requests. Those that still run end with it."""
        spent = {r: use.used for r, use in sorted(uses.items()) if not r.endswith("/concurrency")}
        shares = (Share(r, used, used, 0) for r, used in spent.items() if used)
        return UsageRecord(self.me, "left", (), tuple(shares))

    def resources(self) -> set[str]:
        """All that anybody speaks of."""
        return self._held.keys() | {r for other in self.others.values() for r in other.shares}

    def _entrance(self, uses: Mapping[str, Use]) -> Plan:
        """With nothing of what is in use, and an equal part of the rest."""
        welcome = all(self.me in other.allows_for for other in self.others.values() if other.state != "left")
        state: State = "active" if welcome else "entering"
        in_use = self.resources() | {r for r, use in uses.items() if use.used}
        return Plan(state, self._allows_for, dict.fromkeys(in_use if self.others else (), 0), grows=welcome)

    def _wider(self, kept: frozenset[str], uses: Mapping[str, Use]) -> Plan:
        """One has gone. Of what anybody holds by name, this gateway's part is named too, and so stays what it is."""
        named = {r: self.held(r, uses[r].limit) for r in self.resources() if r in uses}
        return Plan("active", kept, named, grows=True)

    def _matters(self, resource: str, use: Use) -> bool:
        if use.used or use.demand:
            return bool(self.others)
        said = [o.shares[resource] for o in self.others.values() if resource in o.shares]
        return any(share.used or share.demand for share in said)

    def _let_go(self, resource: str, use: Use | None, wanted: dict[str, int]) -> bool:
        """Nobody uses it: back to an equal part, where that is free. Whether that makes this gateway hold more."""
        limit = use.limit if use is not None else 0
        equal = limit // len(self._allows_for)
        if self._held[resource] >= equal:
            del self._held[resource]
            return False
        if self._room(resource, limit) >= equal:
            return True
        wanted[resource] = self._held[resource]
        return False

    def _spare(self, resource: str, use: Use) -> int:
        return self.held(resource, use.limit) - use.used

    def _room(self, resource: str, limit: int) -> int:
        return limit - sum(other.held(resource, limit) for other in self.others.values())

    def _wanted(self, resource: str, use: Use) -> int:
        """This gateway's part by need: what it has used, and of what is free a part by demand."""
        said = {n: o.shares.get(resource) for n, o in self.others.items()}
        takers = {n: said[n] for n, o in self.others.items() if o.state == "active"}
        demands = {n: share.demand if share is not None else 0 for n, share in takers.items()}
        free = use.limit - use.used - sum(share.used for share in said.values() if share is not None)
        target = use.used + divide(max(0, free), demands | {self.me: use.demand})[self.me]
        held = self.held(resource, use.limit)
        if target <= held:
            return target  # not below what is used
        return max(held, min(target, self._room(resource, use.limit)))


def divide(units: int, demands: Mapping[str, int]) -> dict[str, int]:
    """`units` in parts by demand, whole ones, all of them (largest remainders); equal ones where there is no demand."""
    total, n = sum(demands.values()), len(demands)
    spare = SPARE if total else 1.0
    exact = {k: units * (spare / n + (1 - spare) * (d / total if total else 0)) for k, d in demands.items()}
    parts = {k: math.floor(x) for k, x in exact.items()}
    for name in _by_remainder(exact)[: units - sum(parts.values())]:
        parts[name] += 1
    return parts


def _by_remainder(exact: Mapping[str, float]) -> list[str]:
    return sorted(exact, key=lambda name: (math.floor(exact[name]) - exact[name], name))


def _share(resource: str, held: int, use: Use | None) -> Share:
    return Share(resource, held, use.used, use.demand) if use is not None else Share(resource, held, 0, 0)
