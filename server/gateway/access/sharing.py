"""Dividing limits with the other gateways of a store: one small record each, under a lease (shares.py has the rules).

No request waits for anything here. A gateway that is alone writes nothing but its lease; where there are several, each
writes its record once a second while limited keys are in use, and sooner when one is short of what another has. While
the store is away the last parts stay in force.
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

from server.gateway.access.limits import Limits, Meter
from server.gateway.access.quota import Quota
from server.gateway.access.records import USAGE_PREFIX, USAGE_ROUND, KeyLimits
from server.gateway.access.shares import Division, Plan, UsageRecord, Use
from weightsync.errors import Conflict, LeaseLost, RecordError, StoreError
from weightsync.lease import LeaseKeeper
from weightsync.store import Event, Store

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
        self._keeper = await LeaseKeeper.grant(self._store, TTL_S)
        await self._store.put(self._key, division.record(None, {}).to_json(), self._keeper.id)
        self._start_anew(division)
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

    def _start_anew(self, division: Division) -> None:
        """Until it is active, the parts of before stay in force."""
        if self._division.active:
            self._before = self._division
        self._division = division
        self._written = division.record(None, {})
        self._revisions.clear()
        self._known_limits.clear()

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
        watching = asyncio.create_task(self._watch(revision + 1))
        try:
            assert self._keeper is not None
            while not self._keeper.lost.is_set():
                if await self._something_new():
                    await self._step()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self, revision: int) -> None:
        self._news = news = asyncio.Queue[Event | StoreError | None]()
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
                return self._heard(await self._news.get()) or not self._division.active
        return False

    def _hurry(self) -> None:
        """Somebody is short: the next step comes soon."""
        if self._hurry_at == math.inf:
            self._hurry_at = self._stepped_at + HURRY_S
            self._news.put_nowait(None)

    # what others say

    def _heard(self, news: Event | StoreError | None) -> bool:
        if isinstance(news, StoreError):
            raise news
        return news is not None and self._take_in(news)

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
        shares = [share for share in record.shares if share.resource in uses]
        return any(
            self._division.can_give(share, uses[share.resource])
            or self._division.is_short(share.resource, uses[share.resource])
            for share in shares
        )

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
        """What the meter may use, here and now."""
        for resource, quota in meter.quotas().items():
            self._check_limit(resource, quota.limit)
            quota.allotted = self._before.held(resource, quota.limit)
            quota.elsewhere = self._before.elsewhere(resource)
