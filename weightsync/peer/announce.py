"""A peer's records in the store: it writes those of its own copies under a lease, and follows those of other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping

from weightsync.control.lease import LeaseKeeper
from weightsync.control.records import CopyHostRecord, CopyRecord, Keys
from weightsync.errors import RecordError
from weightsync.peer.copies import parse_key
from weightsync.peer.messages import Key
from weightsync.store.protocol import KeyValue, Store

log = logging.getLogger("hotswap.peer")


class Announcer:
    """Writes what changed. Every method raises StoreUnavailable, LeaseLost."""

    def __init__(self, store: Store, keys: Keys, host: str, lease_ttl_s: float, rack: str = "") -> None:
        self._store, self._keys, self._host, self._lease_ttl_s = store, keys, host, lease_ttl_s
        self._here = {f"{keys.copy_hosts}{host}": CopyHostRecord(host, rack).to_json()}
        self._said: dict[str, bytes] = {}
        self._is_first = True
        self.lease: LeaseKeeper | None = None

    async def begin(self) -> LeaseKeeper:
        """Take a new lease. The next `say` writes every record again; the old ones expire with their lease."""
        former, self.lease = self.lease, await LeaseKeeper.grant(self._store, self._lease_ttl_s)
        self._said, self._is_first = {}, True
        if former is not None:
            await former.stop()
        return self.lease

    async def say(self, records: Iterable[CopyRecord], alive: Iterable[str]) -> None:
        """Make `records`, and the one of the host itself, the only records of this host in the store.

        The first call after `begin` also deletes what an earlier process of this host wrote for the digests `alive`.
        """
        assert self.lease is not None, "begin first"
        wanted = self._here | {self._keys.copy(record.digest, self._host): record.to_json() for record in records}
        if self._is_first:
            self._said |= {self._keys.copy(digest, self._host): b"" for digest in alive}
            self._is_first = False
        for key, value in wanted.items():
            if self._said.get(key) != value:
                await self._store.put(key, value, self.lease.id)
                self._said[key] = value
        for key in self._said.keys() - wanted.keys():
            await self._store.delete(key)
            del self._said[key]

    async def end(self) -> None:
        """Delete the records of this host, if the store can be reached."""
        if self.lease is not None:
            await self.lease.end()


class CopyBoard:
    """The copies on other hosts of the slots that this host is to fetch.

    Each slot has a watch of its own, so that changes to slots that are already here wake nobody.
    """

    def __init__(self, keys: Keys, host: str) -> None:
        self._keys, self._host = keys, host
        self._records: dict[str, dict[str, CopyRecord]] = {}  # by digest and key
        self._wanted: set[str] = set()
        self._asked = asyncio.Event()
        self.changed = asyncio.Event()

    def keep_to(self, digests: set[str]) -> None:
        """Follow just these slots."""
        if digests != self._wanted:
            self._wanted = digests
            self._asked.set()

    async def follow(self, store: Store) -> None:
        """For ever. Raises an ExceptionGroup of StoreUnavailable, WatchCompacted."""
        following: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._asked.clear()
                for digest in following.keys() - self._wanted:
                    following.pop(digest).cancel()
                for digest in self._records.keys() - self._wanted:  # also what was known before the store was away
                    del self._records[digest]
                for digest in self._wanted - following.keys():
                    following[digest] = tasks.create_task(self._follow(store, digest))
                await self._asked.wait()

    async def _follow(self, store: Store, digest: str) -> None:
        prefix = self._keys.copies_of(digest)
        found, revision = await store.list(prefix)
        records = self._records[digest] = {kv.key: r for kv in found if (r := self._read(kv)) is not None}
        self.changed.set()
        async with contextlib.aclosing(store.watch(prefix, revision + 1)) as events:
            async for event in events:
                records.pop(event.kv.key, None)
                if event.kind == "put" and (record := self._read(event.kv)) is not None:
                    records[event.kv.key] = record
                self.changed.set()

    def offered(self, key: Key) -> list[CopyRecord]:
        """The records of the hosts that can be asked for it."""
        records = self._records.get(key.digest, {}).values()
        return [r for r in records if r.slot and key.delta_of in ("", r.delta_of)]

    def _read(self, kv: KeyValue) -> CopyRecord | None:
        """None for this host's own, and for what cannot be read: another release may have written it."""
        return other_copy(self._keys, kv, self._host)


async def copies_elsewhere(store: Store, keys: Keys, digests: Iterable[str], host: str) -> list[CopyRecord]:
    """The copies of these slots on hosts other than `host`, as of now. Raises StoreUnavailable."""
    found = [kv for digest in digests for kv in (await store.list(keys.copies_of(digest)))[0]]
    return [record for kv in found if (record := other_copy(keys, kv, host)) is not None and record.slot]


async def hosts_with_peers(store: Store, keys: Keys) -> list[tuple[str, str]]:
    """(rack, host) of each host that has a peer now. Raises StoreUnavailable."""
    found = [(kv.key.removeprefix(keys.copy_hosts), kv) for kv in (await store.list(keys.copy_hosts))[0]]
    hosts = []
    for host, kv in found:
        try:
            record = CopyHostRecord.from_json(kv.value)
        except RecordError as error:
            log.warning("%s is passed over: %s", kv.key, error)
            continue
        if record.host == host:
            hosts.append((record.rack, host))
    return hosts


def other_copy(keys: Keys, kv: KeyValue, host: str) -> CopyRecord | None:
    """The record, unless it is that of `host` or does not say what its key says."""
    named = parse_key(keys, kv.key)
    if named is None or named[1] == host:
        return None
    try:
        record = CopyRecord.from_json(kv.value)
    except RecordError as error:
        log.warning("%s is passed over: %s", kv.key, error)
        return None
    return record if (record.digest, record.host) == named else None


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
