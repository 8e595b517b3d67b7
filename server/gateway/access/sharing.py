"""Several gateways divide a limit among them, without asking anybody while requests come in.

No request waits for anything here. A gateway that is alone writes nothing but its lease; where there are several, each
writes one small record under a lease: once a second while limited keys are in use, and sooner when one is short of what
another has. While the store is away the last parts stay in force. `Division` has the rules and does no I/O, `Sharing`
carries them out.

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

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from server.gateway.access.limits import Limits, Meter, Quota
from server.gateway.access.records import USAGE_PREFIX, USAGE_ROUND
from server.key_limits import LIMITS, NAMED, KeyLimits
from weightsync.control.lease import LeaseKeeper
from weightsync.control.strict_json import Record
from weightsync.errors import Conflict, LeaseLost, RecordError, StoreError
from weightsync.store import Event, Store

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
    """The record of one gateway. Only while it is active does it hold a part of what it does not name."""

    gateway: str
    state: State
    allows_for: tuple[str, ...]
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """This gateway's knowledge of a resource: its limit, units in use here, units asked for a second."""

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
    """The next record to write. `grows`: it makes this gateway hold more, so it needs the transaction to be true."""

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
        self._changed: dict[str, int] = {}  # equal parts of limits that have changed since the last plan

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
        held = self.held(resource, use.limit)
        wanting = use.demand > 0 and use.used + use.demand > held
        return wanting and self._room(resource, use.limit) > held

    def can_give(self, share: Share, use: Use) -> bool:
        """Another one was asked for more than it holds, and this one does not use all of its own."""
        wanting = share.demand > 0 and share.used + share.demand > share.held
        return wanting and self.held(share.resource, use.limit) > use.used

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
        self._changed.clear()
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
        """To be told by all before anybody uses more: each falls back to an equal part at most, also of a plan that is
        being written."""
        self._changed[resource] = equal = limit // len(self._allows_for)
        if resource in self._held:
            self._held[resource] = min(self._held[resource], equal)

    def adopt(self, plan: Plan) -> None:
        """`plan` was written: it holds."""
        self._active = plan.state == "active"
        self._allows_for = plan.allows_for
        self._held = {resource: min(units, self._changed.get(resource, units)) for resource, units in plan.held.items()}

    def record(self, plan: Plan | None, uses: Mapping[str, Use]) -> UsageRecord:
        """The record to write: of `plan`, or, without one, of what holds already."""
        held = self._held if plan is None else plan.held
        shares = (_share(r, units, uses.get(r)) for r, units in sorted(held.items()))
        state: State = plan.state if plan is not None else "active" if self._active else "entering"
        allows_for = self._allows_for if plan is None else plan.allows_for
        return UsageRecord(self.me, state, tuple(sorted(allows_for)), tuple(shares))

    def farewell(self, uses: Mapping[str, Use]) -> UsageRecord:
        """The last record of this gateway, which takes no more requests. Those that still run end with it."""
        shares = (Share(r, use.used, use.used, 0) for r, use in sorted(uses.items()) if use.used and _lasts(r))
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
        """An unused resource goes back to an equal part, where that is free. Whether this gateway then holds more."""
        limit = use.limit if use is not None else 0
        equal = limit // len(self._allows_for)
        if self._held[resource] >= equal:
            del self._held[resource]
            return False
        if self._room(resource, limit) >= equal:
            return True
        wanted[resource] = self._held[resource]
        return False

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
    by_remainder = sorted(exact, key=lambda name: (parts[name] - exact[name], name))
    for name in by_remainder[: units - sum(parts.values())]:
        parts[name] += 1
    return parts


def _lasts(resource: str) -> bool:
    """Whether units taken of the resource count for a minute, not only while the request runs."""
    field = NAMED.get(resource.rpartition("/")[2])
    return field is None or LIMITS[field].counts == "minute"


def _share(resource: str, held: int, use: Use | None) -> Share:
    return Share(resource, held, use.used, use.demand) if use is not None else Share(resource, held, 0, 0)


log = logging.getLogger("hotswap.gateway")

INTERVAL_S = 1.0
HURRY_S = 0.1  # between two steps, when somebody is short
TTL_S = 10.0
REMEMBERED_S = 62.0  # what a gateway has used is counted for so long after its end
RETRY_STORE_S = 0.5
FORGET_TICKS = 60


class Sharing:
    """This gateway's part in dividing the limits of `keys()` (by id), which `limits` enforces."""

    def __init__(self, store: Store, limits: Limits, keys: Callable[[], Mapping[str, KeyLimits]]) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store = store
        self._limits = limits
        self._keys = keys
        self._division = Division(self.id)
        self._before = self._division  # the one in force until that is active
        self.entered = asyncio.Event()
        self._keeper: LeaseKeeper | None = None
        self._news: asyncio.Queue[Event | StoreError | None] = asyncio.Queue()  # None: look again when the next is due
        self._revisions: dict[str, int] = {}  # of the other gateways' records
        self._round = (0, "")  # the revision at which a share last grew, and whose it was
        self._written: UsageRecord | None = None
        self._demand: dict[str, int] = {}
        self._known_limits: dict[str, int] = {}
        self._tick_at = time.monotonic() + INTERVAL_S
        self._ticks = 0
        self._stepped_at = 0.0
        self._hurry_at = math.inf
        limits.allot = self._allot
        limits.short = self._hurry

    # the life of it

    async def run(self) -> None:
        """Takes part for ever; `leave` ends it."""
        while True:
            try:
                if self._keeper is None or self._keeper.lost.is_set():
                    await self.enter()
                await self._follow()
            except LeaseLost:
                assert self._keeper is not None
                self._keeper.lost.set()
            except StoreError as exc:
                log.warning("limits are divided as before until the store answers: %s", exc)
                await asyncio.sleep(RETRY_STORE_S)

    async def enter(self) -> None:
        """Says that this gateway is here, and looks who else is. Raises StoreError."""
        if self._keeper is not None:
            await self._keeper.stop()
        division = Division(self.id)
        said = division.record(None, {})
        self._keeper = await LeaseKeeper.grant(self._store, TTL_S)
        await self._store.put(self._key, said.to_json(), self._keeper.id)
        if self._division.active:
            self._before = self._division  # until the new one is active, the parts of before stay in force
        self._division, self._written = division, said
        self._revisions.clear()
        self._known_limits.clear()
        await self._read_all()
        await self._step()

    async def leave(self) -> None:
        """Leaves behind what was used here, for a minute: whoever goes on counts it."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        with contextlib.suppress(StoreError):
            farewell = self._division.farewell(self._uses())
            if farewell.shares:
                lease = await self._store.grant_lease(REMEMBERED_S)
                await self._store.put(self._key, farewell.to_json(), lease)
        await keeper.end()

    @property
    def _key(self) -> str:
        return USAGE_PREFIX + self.id

    async def _read_all(self) -> int:
        items, revision = await self._store.list(USAGE_PREFIX)
        for gone in self._revisions.keys() - {kv.key.removeprefix(USAGE_PREFIX) for kv in items}:
            self._gone(gone)
        for kv in items:
            self._take_in(Event("put", kv))
        return revision

    async def _follow(self) -> None:
        """Until the lease is lost. Raises StoreError."""
        revision = await self._read_all()
        self._news = asyncio.Queue()  # what an earlier watch brought is older than what was read
        watching = asyncio.create_task(self._watch(revision + 1, self._news))
        try:
            assert self._keeper is not None
            new = not self._division.active  # the answers to `enter` may be among what was read
            while not self._keeper.lost.is_set():
                if new:
                    await self._step()
                new = await self._something_new()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self, revision: int, news: asyncio.Queue[Event | StoreError | None]) -> None:
        try:
            async for event in self._store.watch(USAGE_PREFIX, revision):
                news.put_nowait(event)
        except StoreError as exc:
            news.put_nowait(exc)

    async def _something_new(self) -> bool:
        """Waits for word of the others, or for the next second. Whether there is something to do. Raises StoreError."""
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick()
            return not self._division.alone
        if now >= self._hurry_at:
            self._hurry_at = math.inf
            self._note_demand()
            return not self._division.alone
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._tick_at, self._hurry_at) - now):
                news = await self._news.get()
                if isinstance(news, StoreError):
                    raise news
                return (news is not None and self._take_in(news)) or not self._division.active
        return False

    def _hurry(self) -> None:
        """Lets the next step come soon, as units are short."""
        if self._hurry_at == math.inf:
            self._hurry_at = self._stepped_at + HURRY_S
            self._news.put_nowait(None)

    # what others say

    def _take_in(self, event: Event) -> bool:
        """Whether somebody has come or gone."""
        if event.kv.key == USAGE_ROUND:
            self._round = (event.kv.mod_revision, event.kv.value.decode())
            return False
        gateway = event.kv.key.removeprefix(USAGE_PREFIX)
        if gateway == self.id:
            return False
        if event.kind == "delete":
            self._gone(gateway)
            return True
        self._revisions[gateway] = event.kv.mod_revision
        try:
            record = UsageRecord.from_json(event.kv.value)
        except RecordError as exc:
            log.error("ignoring %s: %s", event.kv.key, exc)
            return False
        uses = self._uses()
        new = self._division.seen(record, uses)
        self._apply()
        if self._worth_a_step(record, uses):
            self._hurry()
        return new

    def _worth_a_step(self, record: UsageRecord, uses: Mapping[str, Use]) -> bool:
        """Units may change hands, by what `record` says."""
        known = [(share, uses[share.resource]) for share in record.shares if share.resource in uses]
        return any(self._division.can_give(s, use) or self._division.is_short(s.resource, use) for s, use in known)

    def _gone(self, gateway: str) -> None:
        self._revisions.pop(gateway, None)
        self._division.gone(gateway)

    def _up_to_date(self) -> bool:
        """The record of whoever came to hold more last has been seen, not only that it did."""
        revision, grower = self._round
        return grower not in self._revisions or self._revisions[grower] >= revision

    # what to say

    async def _step(self) -> None:
        """Takes stock, and writes what has changed. Raises StoreError."""
        self._stepped_at, self._hurry_at = time.monotonic(), math.inf
        uses = self._uses()
        plan = self._division.plan(uses)
        self._apply()
        try:
            if plan.grows and self._up_to_date():
                await self._grow(plan, uses)
            elif not plan.grows:
                await self._write(self._division.record(plan, uses))
                self._division.adopt(plan)
            else:
                await self._write(self._division.record(None, uses))
        except Conflict:
            pass  # somebody else came to hold more: their word is on its way, and then there is another step
        self._apply()

    async def _grow(self, plan: Plan, uses: Mapping[str, Use]) -> None:
        assert self._keeper is not None
        record = self._division.record(plan, uses)
        puts: dict[str, bytes | None] = {self._key: record.to_json(), USAGE_ROUND: self.id.encode()}
        self._written = None  # should it not be known whether it is
        revision = await self._store.txn({USAGE_ROUND: self._round[0]}, puts, {self._key: self._keeper.id})
        self._round = (revision, self.id)
        self._written = record
        self._division.adopt(plan)

    async def _write(self, record: UsageRecord) -> None:
        assert self._keeper is not None
        if record != self._written:
            self._written = None
            await self._store.put(self._key, record.to_json(), self._keeper.id)
            self._written = record

    # the meters

    def _tick(self) -> None:
        """A second has gone by: what was asked in it is the demand, which lasts a little while."""
        self._tick_at = time.monotonic() + INTERVAL_S
        self._ticks += 1
        if self._ticks % FORGET_TICKS == 0:
            self._limits.forget_idle()
        self._demand = {resource: was * 3 // 4 for resource, was in self._demand.items() if was > 1}
        self._note_demand()
        for quota in self._quotas().values():
            quota.asked = 0

    def _note_demand(self) -> None:
        for resource, quota in self._quotas().items():
            self._demand[resource] = max(self._demand.get(resource, 0), quota.asked)

    def _quotas(self) -> dict[str, Quota]:
        return {r: quota for meter in self._limits.meters() for r, quota in meter.quotas().items()}

    def _uses(self) -> dict[str, Use]:
        """Of every resource that is in use here, or that another gateway speaks of."""
        now, uses = int(time.monotonic()), {}
        for resource, quota in self._quotas().items():
            quota.advance(now)
            uses[resource] = Use(quota.limit, quota.used, self._demand.get(resource, 0))
        for resource in self._division.resources() - uses.keys():
            limit = self._limit_of(resource)
            if limit is not None:
                uses[resource] = Use(limit, 0, 0)
        for resource, use in uses.items():
            self._check_limit(resource, use.limit)
        return uses

    def _limit_of(self, resource: str) -> int | None:
        key, _, kind = resource.partition("/")
        limits = self._keys().get(key)
        return limits.of(kind) if limits is not None else None

    def _check_limit(self, resource: str, limit: int) -> None:
        if self._known_limits.setdefault(resource, limit) != limit:
            self._known_limits[resource] = limit
            self._division.limit_changed(resource, limit)

    def _apply(self) -> None:
        if self._division.active:
            self._before = self._division
            self.entered.set()
            for meter in self._limits.meters():
                self._allot(meter)

    def _allot(self, meter: Meter) -> None:
        """Sets the units that the meter may use, here and now."""
        for resource, quota in meter.quotas().items():
            self._check_limit(resource, quota.limit)
            quota.allotted = self._before.held(resource, quota.limit)
            quota.elsewhere = self._before.elsewhere(resource)
