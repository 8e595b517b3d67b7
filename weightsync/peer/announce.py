"""A peer's records: what it says of its copies under its lease, and what the others say of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping

from weightsync.lease import LeaseKeeper
from weightsync.peer.copies import parse_key
from weightsync.peer.messages import Key
from weightsync.records import CopyRecord, Keys
from weightsync.store.protocol import Store


class Announcer:
    """Writes what changed. Every method raises StoreUnavailable, LeaseLost."""

    def __init__(self, store: Store, keys: Keys, host: str, lease_ttl_s: float) -> None:
        self._store, self._keys, self._host, self._lease_ttl_s = store, keys, host, lease_ttl_s
        self._said: dict[str, bytes] = {}
        self.lease: LeaseKeeper | None = None

    async def begin(self) -> LeaseKeeper:
        """Under a new lease everything is said again; what an earlier process of this host said is taken back."""
        former, self.lease = self.lease, await LeaseKeeper.grant(self._store, self._lease_ttl_s)
        found, _ = await self._store.list(self._keys.copies)
        mine = [kv.key for kv in found if (parse_key(self._keys, kv.key) or ("", ""))[1] == self._host]
        self._said = dict.fromkeys(mine, b"")
        if former is not None:
            await former.stop()  # its keys are written under the new one before it ends
        return self.lease

    async def say(self, records: Iterable[CopyRecord]) -> None:
        """Have the store say just this of this host."""
        assert self.lease is not None, "begin first"
        wanted = {self._keys.copy(record.digest, self._host): record.to_json() for record in records}
        for key, value in wanted.items():
            if self._said.get(key) != value:
                await self._store.put(key, value, self.lease.id)
                self._said[key] = value
        for key in self._said.keys() - wanted.keys():
            await self._store.delete(key)
            del self._said[key]

    async def end(self) -> None:
        """Take it all back, if the store can be reached."""
        if self.lease is not None:
            await self.lease.end()


class CopyBoard:
    """The copies of a model on all hosts, followed by a watch."""

    def __init__(self, keys: Keys, host: str) -> None:
        self._keys, self._host = keys, host
        self._records: dict[str, CopyRecord] = {}
        self.changed = asyncio.Event()

    async def follow(self, store: Store) -> None:
        """For ever. Raises StoreUnavailable, RecordError."""
        found, revision = await store.list(self._keys.copies)
        self._records = {kv.key: CopyRecord.from_json(kv.value) for kv in found if self._is_ours(kv.key)}
        self.changed.set()
        async with contextlib.aclosing(store.watch(self._keys.copies, revision + 1)) as events:
            async for event in events:
                if not self._is_ours(event.kv.key):
                    continue
                if event.kind == "put":
                    self._records[event.kv.key] = CopyRecord.from_json(event.kv.value)
                else:
                    self._records.pop(event.kv.key, None)
                self.changed.set()

    def offered(self, key: Key) -> list[CopyRecord]:
        """Who else can be asked for it."""
        return [r for r in self.others() if r.digest == key.digest and key.delta_of in ("", r.delta_of)]

    def others(self) -> list[CopyRecord]:
        """What other hosts have."""
        return [record for record in self._records.values() if record.host != self._host and record.slot]

    def _is_ours(self, key: str) -> bool:
        return parse_key(self._keys, key) is not None


class Since:
    """When each state began, so that a record changes only when what it says does."""

    def __init__(self) -> None:
        self._known: dict[tuple[Key, str], float] = {}

    def of(self, key: Key, state: str) -> float:
        """Unix seconds."""
        return self._known.setdefault((key, state), time.time())

    def keep(self, keys: Mapping[Key, object]) -> None:
        """Forget all others."""
        self._known = {k: since for k, since in self._known.items() if k[0] in keys}
