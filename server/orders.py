"""Orders of operators for instances, as the store has them: to sleep, and to get no new requests (drains).

The admin port writes orders to sleep; instances follow them and say that they sleep. Such an order holds for the
instance's id, not for one process: an instance that is started while it is ordered to sleep sleeps before it has an
engine. It may hang on a lease, so that whatever ordered it cannot forget it: when the lease is over the instance wakes
by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from weightsync.control.lease import LeaseKeeper
from weightsync.control.records import InstanceRecord, Keys
from weightsync.control.strict_json import Record
from weightsync.errors import RecordError, StoreError
from weightsync.store.protocol import Store

log = logging.getLogger("hotswap.sleep")

Level = Literal[1, 2]
RETRY_S = 0.2
LEASE_TTL_S = 5.0


@dataclass(frozen=True)
class SleepOrder(Record):
    """This instance is to sleep while the record exists. `since` is unix seconds, `ttl_s` that of its lease.

    `level` 1 gives up what is quick to have again, 2 everything; `drain_s` is the time requests get to end before.
    """

    id: str
    level: Level
    drain_s: float
    requested_by: str
    since: float
    ttl_s: float | None = None


@dataclass(frozen=True)
class SleeperRecord(Record):
    """An instance that sleeps, written by itself under its lease. `in_place`: its engine is there, without memory."""

    id: str
    level: Level
    pid: int
    host: str
    since: float
    in_place: bool = False


def orders(keys: Keys) -> str:
    """The prefix of the orders' keys."""
    return f"{keys.root}sleeps/"


def sleepers(keys: Keys) -> str:
    """The prefix of the keys of what sleeps now."""
    return f"{keys.root}sleepers/"


async def ordered(store: Store, keys: Keys, instance_id: str) -> SleepOrder:
    """Return when the instance is to sleep. Outlives outages of the store."""
    async with contextlib.aclosing(_follow(store, orders(keys) + instance_id)) as found:
        async for order in found:
            if order is not None:
                return order
    raise AssertionError("a watch without an end has ended")


async def stay_asleep(store: Store, keys: Keys, record: SleeperRecord) -> None:
    """Say in the store that it sleeps until the order is gone. While the store is away, it sleeps on."""
    saying = asyncio.create_task(_say(store, sleepers(keys) + record.id, record), name=f"sleeper {record.id}")
    try:
        async with contextlib.aclosing(_follow(store, orders(keys) + record.id)) as found:
            async for order in found:
                if order is None:
                    return
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)


async def _follow(store: Store, key: str) -> AsyncGenerator[SleepOrder | None, None]:
    """The order as it stands, then every change of it; None: there is none."""
    while True:
        try:
            found, revision = await store.list(key)
            yield next((_parsed(kv.value) for kv in found if kv.key == key), None)
            async with contextlib.aclosing(store.watch(key, revision + 1)) as events:
                async for event in events:
                    if event.kv.key == key:
                        yield _parsed(event.kv.value) if event.kind == "put" else None
        except StoreError as error:
            log.debug("no orders are seen without the store: %s", error)
        await asyncio.sleep(RETRY_S)


async def _say(store: Store, key: str, record: SleeperRecord) -> None:
    while True:
        with contextlib.suppress(StoreError):
            keeper = await LeaseKeeper.grant(store, LEASE_TTL_S)
            try:
                await store.put(key, record.to_json(), keeper.id)
                await keeper.lost.wait()
            finally:
                await keeper.end()
        await asyncio.sleep(RETRY_S)


def _parsed(raw: bytes) -> SleepOrder | None:
    try:
        return SleepOrder.from_json(raw)
    except RecordError as error:  # of a newer version: it is not known what it wants
        log.error("ignoring an order to sleep: %s", error)
        return None


@dataclass(frozen=True)
class DrainRecord(Record):
    """No new requests for this process of the instance, from any gateway. `since` is unix seconds.

    One that is started anew under the same id takes requests. An instance that is stopped drains by itself, and says so
    in its own record.
    """

    id: str
    address: str
    pid: int
    since: float

    def meant_for(self, record: InstanceRecord) -> bool:
        """Whether `record` is still the process that was to be drained."""
        return (self.id, self.address, self.pid) == (record.id, record.address, record.pid)


def drains(keys: Keys) -> str:
    """The prefix of the drain records' keys."""
    return f"{keys.root}drains/"
