"""The tokens that keys have used of their budgets of the month, for all gateways and over restarts.

    gateway/spent/{YYYY-MM}/{key id}   SpentRecord: tokens of the calendar month (UTC)
    gateway/added/{gateway}            the id of the gateway's last addition, for an hour: written with the sum, so a
                                       gateway that got no answer sees whether the addition has arrived

No request waits for the store. A gateway adds what its answers have cost once a second, and hears of what others have
added; so where several gateways run, a budget can be overrun by what the others have in flight, and what they have
answered in the last second. One that is killed loses its last second.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from server.gateway.access.limits import Limits, Month, this_month
from server.gateway.access.records import SPENT_PREFIX
from weightsync.control.strict_json import Record
from weightsync.errors import Conflict, LeaseLost, RecordError, StoreError
from weightsync.store import MISSING, KeyValue, Store

log = logging.getLogger("hotswap.gateway")

INTERVAL_S = 1.0
RETRY_STORE_S = 0.5
ADDED_PREFIX = "gateway/added/"
MARKED_S = 3600.0


@dataclass(frozen=True)
class SpentRecord(Record):
    """Tokens that one key has used in one month."""

    tokens: int


class Budgets:
    """Writes what the meters of `limits` have used, and tells them what is written."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._saved: dict[str, int] = {}  # by key of the store
        self._mark = ADDED_PREFIX + uuid.uuid4().hex
        self._sent = ("", 0, b"")  # an addition without an answer: where, tokens, id
        self._lease, self._leased_at = 0, -MARKED_S
        limits.saved = self._tell

    def used(self, key_id: str, limit: int) -> dict[str, Any]:
        """The state of a key's month, with the tokens that are not written yet."""
        month, until = this_month(time.time())
        tokens = self._saved.get(_place(month, key_id), 0)
        for meter in self._limits.meters():
            if meter.key == key_id:
                tokens += sum(quota.unsaved.get(month, 0) for quota in meter.months())
        return {"month": month, "tokens": tokens, "left": max(0, limit - tokens), "resets_at": until}

    async def run(self) -> None:
        """Follows and writes for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._save_forever())

    async def refresh(self) -> int:
        """Reads this month's records; returns their revision. Raises StoreError."""
        items, revision = await self._store.list(f"{SPENT_PREFIX}{this_month(time.time())[0]}/")
        for kv in items:
            self._put(kv)
        self._tell_all()
        return revision

    async def save(self) -> None:
        """Adds what has been used since the last time. Raises StoreError."""
        used = [
            (_place(month, meter.key), month, meter, quota)
            for meter in self._limits.meters()
            for quota in meter.months()
            for month in quota.unsaved
        ]
        for place, month, meter, quota in sorted(used, key=lambda one: one[0] != self._sent[0]):
            added = await self._add(place, quota.unsaved[month])
            quota.unsaved[month] -= added
            if not quota.unsaved[month]:
                del quota.unsaved[month]
            self._tell(meter.key, quota)

    async def _add(self, place: str, tokens: int) -> int:
        """Adds `tokens`, or what an earlier call has sent without an answer; returns how many."""
        if place != self._sent[0]:
            self._sent = (place, tokens, uuid.uuid4().hex.encode())
        _, tokens, mine = self._sent
        while True:
            last = await self._store.get(self._mark)  # before the sum, which then has what it says
            found = await self._store.get(place)
            total = SpentRecord.from_json(found.value).tokens if found is not None else 0
            if last is None or last.value != mine:
                total += tokens
                puts: dict[str, bytes | None] = {place: SpentRecord(total).to_json(), self._mark: mine}
                compares = {place: _revision(found), self._mark: _revision(last)}
                try:
                    await self._store.txn(compares, puts, {self._mark: await self._leased()})
                except Conflict:  # another gateway has added, or an earlier call arrives; so look again
                    continue
                except LeaseLost:  # the store was restored
                    self._leased_at = -MARKED_S
                    raise
            self._sent = ("", 0, b"")
            self._saved[place] = total
            return tokens

    async def _leased(self) -> int:
        """A lease without a renewal, so that a gateway that is killed leaves nothing."""
        if time.monotonic() - self._leased_at > MARKED_S / 2:
            self._lease, self._leased_at = await self._store.grant_lease(MARKED_S), time.monotonic()
        return self._lease

    async def _save_forever(self) -> None:
        away = False
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.save()
                away = False
            except (StoreError, RecordError) as exc:
                if not away:
                    log.warning("what keys use of their budgets is kept here until the store takes it: %s", exc)
                away = True

    async def _follow(self) -> None:
        while True:
            try:
                revision = await self.refresh()
                async for event in self._store.watch(SPENT_PREFIX, revision + 1):
                    if event.kind == "put":
                        self._put(event.kv)
                        self._tell_all()
            except StoreError:
                await asyncio.sleep(RETRY_STORE_S)

    def _put(self, kv: KeyValue) -> None:
        try:
            self._saved[kv.key] = SpentRecord.from_json(kv.value).tokens
        except RecordError as exc:
            log.error("ignoring %s: %s", kv.key, exc)

    def _tell_all(self) -> None:
        month = SPENT_PREFIX + this_month(time.time())[0]
        self._saved = {place: tokens for place, tokens in self._saved.items() if place.startswith(month)}
        for meter in self._limits.meters():
            for quota in meter.months():
                self._tell(meter.key, quota)

    def _tell(self, key_id: str, quota: Month) -> None:
        quota.saved = self._saved.get(_place(quota.month, key_id), 0)
        quota.total()


def _revision(found: KeyValue | None) -> int:
    return found.mod_revision if found is not None else MISSING


def _place(month: str, key_id: str) -> str:
    return f"{SPENT_PREFIX}{month}/{key_id}"
