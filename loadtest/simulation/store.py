"""A simulated store: compare-and-swap, leases, events with revisions, outages.

`ModelStore` is the store itself, synchronous. A `Client` is the connection of a process that awaits: its calls and its
watches take time, and it can be cut off by itself.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TypeVar

from loadtest.simulation.clock import Clock
from weightsync.errors import Conflict, LeaseLost, StoreUnavailable
from weightsync.store.protocol import MISSING, Event, KeyValue

Puts = Mapping[str, bytes | None]
T = TypeVar("T")


class ModelStore:
    """The promises of `weightsync.store`, and no others: one transaction may be several events of one revision.

    Watchers read `events` from an index of their own, as late as they like.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.up, self.revision = clock, True, 0
        self.lose_answer = False  # of the next transaction: it is written, and its writer hears of an outage
        self.events: list[Event] = []
        self.on_write: Callable[[Puts], None] = lambda puts: None
        self.written: asyncio.Event | None = None  # for watches that await: set at the next event
        self._found: dict[str, KeyValue] = {}
        self._leases: dict[int, tuple[float, float]] = {}  # id: time to live, end
        self._granted = 0

    @property
    def now(self) -> float:
        return self.clock.now

    def get(self, key: str) -> KeyValue | None:
        return self._found.get(key)

    def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        self.require()
        return [kv for key, kv in self._found.items() if key.startswith(prefix)], self.revision

    def txn(self, compares: Mapping[str, int], puts: Puts, leases: Mapping[str, int] | None = None) -> int:
        self.require()
        for key, expected in compares.items():
            under = key.endswith("/")
            there = [kv.mod_revision for k, kv in self._found.items() if k == key or (under and k.startswith(key))]
            found = max(there, default=MISSING)
            if found > expected or (found != expected and not under):
                raise Conflict(key, expected, found)
        leases = leases or {}
        for lease in leases.values():
            if lease not in self._leases:
                raise LeaseLost(lease)
        self._apply(puts, leases)
        if self.lose_answer:
            self.lose_answer = False
            raise _away()
        return self.revision

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return self.txn({}, {key: value}, {key: lease} if lease is not None else None)

    def grant(self, ttl_s: float) -> int:
        self.require()
        self._granted += 1
        self._renew(self._granted, ttl_s, self.now + ttl_s)
        return self._granted

    def keep_alive(self, lease: int) -> None:
        self.require()
        if lease not in self._leases:
            raise LeaseLost(lease)
        ttl_s, _ = self._leases[lease]
        self._renew(lease, ttl_s, self.now + ttl_s)

    def holds(self, lease: int | None) -> bool:
        return lease in self._leases

    def revoke(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            keys = [key for key, kv in self._found.items() if kv.lease == lease]
            self._apply(dict.fromkeys(keys), {})

    def expire(self) -> None:
        """Ends the leases that have run out, unless the store is away."""
        if self.up:
            for lease in [lease for lease, (_, end) in self._leases.items() if end <= self.now]:
                self.revoke(lease)

    def tick(self, seconds: float, renewed: Iterable[int | None]) -> None:
        """Time goes by, in which the owners of `renewed` renew them if the store is there."""
        until = self.now + seconds
        for lease in renewed:
            if self.up and lease is not None and lease in self._leases:
                ttl_s, _ = self._leases[lease]
                self._renew(lease, ttl_s, until + ttl_s)
        self.clock.run(until)
        self.expire()

    def require(self) -> None:
        if not self.up:
            raise _away()

    def _renew(self, lease: int, ttl_s: float, end: float) -> None:
        self._leases[lease] = (ttl_s, end)
        self.clock.at(end, self.expire)

    def _apply(self, puts: Puts, leases: Mapping[str, int]) -> None:
        self.on_write(puts)
        self.revision += 1
        for key, value in puts.items():
            before = self._found.pop(key, None)
            if value is not None:
                created = before.create_revision if before is not None else self.revision
                self._found[key] = KeyValue(key, value, created, self.revision, leases.get(key))
                self.events.append(Event("put", self._found[key]))
            elif before is not None:
                gone = KeyValue(key, before.value, before.create_revision, self.revision, before.lease)
                self.events.append(Event("delete", gone))
        if self.written is not None:
            self.written.set()
            self.written = None


class Client:
    """A `weightsync.store.Store` of one process. A call takes twice `latency_s`, an event `lag_s`."""

    url = "model://"

    def __init__(self, store: ModelStore, latency_s: float = 0.001) -> None:
        self.store, self.latency_s, self.lag_s = store, latency_s, latency_s
        self.away = False

    async def get(self, key: str) -> KeyValue | None:
        return await self._call(lambda: self.store.get(key))

    async def list(self, prefix: str, *, first: str = "") -> tuple[list[KeyValue], int]:
        found, revision = await self._call(lambda: self.store.list(prefix))
        return sorted((kv for kv in found if kv.key >= first), key=lambda kv: kv.key), revision

    async def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return await self._call(lambda: self.store.put(key, value, lease))

    async def delete(self, key: str) -> bool:
        return await self._call(lambda: self.store.get(key) is not None and bool(self.store.txn({}, {key: None})))

    async def compare_and_swap(
        self, key: str, expected_mod_revision: int, value: bytes, lease: int | None = None
    ) -> int:
        leases = {key: lease} if lease is not None else None
        return await self.txn({key: expected_mod_revision}, {key: value}, leases)

    async def txn(self, compares: Mapping[str, int], puts: Puts, leases: Mapping[str, int] | None = None) -> int:
        return await self._call(lambda: self.store.txn(compares, puts, leases))

    async def grant_lease(self, ttl_s: float) -> int:
        return await self._call(lambda: self.store.grant(ttl_s))

    async def keep_alive(self, lease: int) -> None:
        await self._call(lambda: self.store.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self.store.revoke(lease))

    async def watch(
        self, prefix: str, start_revision: int | None = None, *, first: str = ""
    ) -> AsyncGenerator[Event, None]:
        events = self.store.events
        start = self.store.revision + 1 if start_revision is None else start_revision
        at = bisect.bisect_left(events, start, key=lambda event: event.kv.mod_revision)
        while True:
            if at == len(events):
                self.store.written = self.store.written or asyncio.Event()
                await self.store.written.wait()
            end = len(events)
            await asyncio.sleep(self.lag_s)
            self._require()
            for event in events[at:end]:
                if event.kv.key.startswith(prefix) and event.kv.key >= first:
                    yield event
            at = end

    async def close(self) -> None:
        self.away = True

    async def _call(self, do: Callable[[], T]) -> T:
        """A call that is cut off between the write and its answer is written, and nobody knows."""
        await asyncio.sleep(self.latency_s)
        self._require()
        found = do()
        await asyncio.sleep(self.latency_s)
        self._require()
        return found

    def _require(self) -> None:
        self.store.require()
        if self.away:
            raise _away()


def _away() -> StoreUnavailable:
    return StoreUnavailable("model", "away", "wait")
