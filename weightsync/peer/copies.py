"""Copies in the store: which hosts have which slots, which slots a host should have, and where they are here.

A process that will open a version's slots calls `wait_for_slots`, which waits while the host's peer fetches them. A
peer writes the records of its own copies under a lease (`Announcer`), and follows those of other hosts (`CopyBoard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weightsync.control.board import Board
from weightsync.control.editions import EditionRecord, key_of
from weightsync.control.hosts import HOST_ENV, arena_key, host_of, local_path
from weightsync.control.lease import LeaseKeeper
from weightsync.control.parts import BASE, base_of, slots_of
from weightsync.control.records import (
    ArenaRecord,
    CopyHostRecord,
    CopyRecord,
    Keys,
    PartRecord,
    VersionRecord,
    shared_versions,
)
from weightsync.control.state import in_flight
from weightsync.errors import ManifestError, PeerError, RecordError, SlotBusy, copy_unavailable
from weightsync.memory.receiver import SlotReader
from weightsync.peer.slices import PartCopyRecord, part_copy_key
from weightsync.store.protocol import KeyValue, Store

log = logging.getLogger("hotswap.peer")

DIGEST_LENGTH = 32
Copies = Mapping[str, CopyRecord]  # one host's, by manifest digest
STILL_WANTED_S = 2.0  # between looks whether the version is still asked for


def parse_key(keys: Keys, key: str) -> tuple[str, str] | None:
    """(manifest digest, host) of a copy's key; None for one of another model whose name begins with this one's."""
    digest, _, host = key.removeprefix(keys.copies).partition("/")
    return (digest, host) if len(digest) == DIGEST_LENGTH and host and "/" not in host else None


def parsed(keys: Keys, found: Iterable[KeyValue]) -> list[CopyRecord]:
    """The copies of a model. Raises RecordError."""
    return [CopyRecord.from_json(kv.value) for kv in found if parse_key(keys, kv.key) is not None]


async def ready_digests(store: Store, keys: Keys) -> set[str]:
    """The slots of which at least one host has a whole copy."""
    return {copy.digest for copy in parsed(keys, (await store.list(keys.copies))[0]) if copy.state == "ready"}


async def kept_digests(store: Store, keys: Keys, records: Iterable[VersionRecord]) -> set[str]:
    """The slots of which hosts have a whole copy; those of the base models of `records` also if their shares are
    there."""
    copies = parsed(keys, (await store.list(keys.copies))[0])
    there = {(copy.digest, copy.host) for copy in copies if copy.slot}
    whole = {copy.digest for copy in copies if copy.state == "ready"}
    for record in records:
        hosts = {host_of(record.slot), *record.shares}
        if record.shares and all((record.manifest_digest, host) in there for host in hosts):
            whole.add(record.manifest_digest)
    return whole


async def share_hosts(store: Store, keys: Keys, host: str) -> dict[str, str]:
    """The other hosts whose peers take up a share of a version that was written there, and the directories of their
    slots; none while a peer is of a release that knows nothing of shares, or none runs on `host`."""
    takers = {kv.key.removeprefix(takers_prefix(keys)) for kv in (await store.list(takers_prefix(keys)))[0]}
    peers = {kv.key.removeprefix(keys.copy_hosts) for kv in (await store.list(keys.copy_hosts))[0]}
    if host not in takers or peers - takers:
        return {}
    arenas = {name: await store.get(arena_key(name)) for name in takers - {host}}
    return {name: ArenaRecord.from_json(kv.value).directory for name, kv in arenas.items() if kv is not None}


async def own_copies(store: Store, keys: Keys, host: str) -> dict[str, CopyRecord]:
    """The copies on `host` by manifest digest; without a name there are none, and the store is not asked."""
    if not host:
        return {}
    found = (await store.list(keys.copies))[0]
    mine = [kv for kv in found if (parse_key(keys, kv.key) or ("", ""))[1] == host]  # others' may be of another release
    return {copy.digest: copy for copy in parsed(keys, mine)}


def takers_prefix(keys: Keys) -> str:
    """Hosts whose peers take up shares, each under its peer's lease; below `copies`, where no slot has this name."""
    return f"{keys.copies}takers/"


def all_parts(record: VersionRecord) -> list[PartRecord]:
    """Every slot of a ready version as a part, the base model first."""
    base = base_of(record)
    return [base, *record.parts] if base is not None else list(record.parts)


def local_slot(part: PartRecord, host: str, own: Copies) -> Path | None:
    """The path of a slot on `host`, whose whole copies are in `own`; None if it is not there."""
    copy = own.get(part.manifest_digest)
    if copy is not None and copy.state == "ready":
        return local_path(copy.slot, host)
    if copy is not None and part.shares and copy.slot == part.slot:
        return None  # it was published with chunks elsewhere, and not all of them are here
    return local_path(part.slot, host)


def with_local_slots(record: VersionRecord, where: Callable[[PartRecord], Path | None]) -> VersionRecord:
    """`record` with the path of each slot instead of its name; a slot for which `where` is None keeps its name."""

    def at(part: PartRecord) -> PartRecord:
        path = where(part)
        return part if path is None else replace(part, slot=str(path))

    found = {part.name: at(part) for part in all_parts(record)}
    return replace(record, slot=found[BASE].slot, parts=tuple(found[part.name] for part in record.parts))


def kept_parts(board: Board) -> list[PartRecord]:
    """The parts that are worth keeping: the slots of ready versions, and those of adapters' editions."""
    versions = [part for version in board.versions if version.state == "ready" for part in all_parts(version)]
    return [*versions, *(edition.as_part for edition in board.editions)]


def wanted_slots(board: Board) -> list[PartRecord]:
    """The slots of the version that is being swapped in, of the one asked for, the active one and the one before; then
    those of adapters' editions, the newest first."""
    found: dict[str, PartRecord] = {}
    for number in wanted_versions(board):
        version = board.version(number)
        if version is not None and version.state == "ready":
            for part in all_parts(version):
                found.setdefault(part.manifest_digest, part)
    for edition in reversed(board.editions):
        found.setdefault(edition.manifest_digest, edition.as_part)
    return list(found.values())


def wanted_versions(board: Board) -> list[int]:
    """The versions that instances may have to stage, the most urgent first."""
    swap, target, active = board.swap, board.target, board.active
    numbers: list[int | None] = []
    if swap is not None and in_flight(swap):
        numbers += [swap.target, *shared_versions(swap.split)]
    if target is not None and (swap is None or not swap.answers(target)):
        numbers += [target.version, *shared_versions(target.split)]
    if active is not None:
        numbers += [active.version, *shared_versions(active.split), active.previous]
    return list(dict.fromkeys(number for number in numbers if number is not None))


async def wait_for_slots(
    store: Store, keys: Keys, version: VersionRecord, host: str, timeout_s: float, slices: str = ""
) -> VersionRecord:
    """`version` with the path of each slot's copy on `host` instead of its name, once all are there.

    With `slices`, the digest of what the instance has said it needs there, a copy that has those will do, which only
    `SlotReader.open(part=True)` opens. On the one host ("") that is `version` itself, at once. Raises PeerError: the
    peer cannot fetch it, it is not here after `timeout_s`, or nobody wants it any more; StoreUnavailable.
    """
    if not host:
        _require_here(version.version, slots_of(version))
        return version

    async def wanted() -> bool:
        found = [await store.get(key) for key in (keys.swap, keys.target, keys.active)]
        return version.version in wanted_versions(Board(keys, [kv for kv in found if kv is not None], 0))

    wait = _Wait(store, keys, version.version, host, slices, wanted)
    paths = await wait.paths(all_parts(version), timeout_s)
    return with_local_slots(version, lambda part: paths[part.manifest_digest])


async def wait_for_edition(store: Store, keys: Keys, edition: EditionRecord, host: str, timeout_s: float) -> PartRecord:
    """The edition of an adapter as a part, with the path of its copy on `host`, once that is there. Raises as
    `wait_for_slots`."""
    part = edition.as_part
    if not host:
        _require_here(edition.number, [part.slot])
        return part

    async def wanted() -> bool:
        return await store.get(key_of(keys, edition.name, edition.number)) is not None

    paths = await _Wait(store, keys, edition.number, host, "", wanted).paths([part], timeout_s)
    return replace(part, slot=str(paths[part.manifest_digest]))


def _require_here(version: int, slots: Iterable[str]) -> None:
    """Raises PeerError for what only a peer could bring to the one host."""
    if elsewhere := {host for slot in slots if (host := host_of(slot))}:
        reason = f"it lies on host {min(elsewhere)}: set {HOST_ENV}, and run `hotswap peer` on this host"
        raise copy_unavailable(version, "", reason)


class _Wait:
    """A wait for the slots of one version, for as long as it is `wanted`. `_last` is the latest record of the host's
    peer on what is missing."""

    def __init__(
        self, store: Store, keys: Keys, version: int, host: str, slices: str, wanted: Callable[[], Awaitable[bool]]
    ) -> None:
        self._store, self._keys, self._version, self._host, self._slices = store, keys, version, host, slices
        self._wanted = wanted
        self._last: CopyRecord | None = None

    async def paths(self, parts: Sequence[PartRecord], timeout_s: float) -> dict[str, Path]:
        """By manifest digest, when all are here. Raises PeerError."""
        found = asyncio.create_task(self._paths(parts))
        dropped = asyncio.create_task(self._until_unwanted())
        try:
            await asyncio.wait({found, dropped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if found.done():
                return found.result()
            if dropped.done():
                dropped.result()
                raise self._error("nobody wants it any more, so it is not waited for")
            raise self._error(f"it was not here after {timeout_s:g} s")
        finally:
            for task in (found, dropped):
                task.cancel()
            await asyncio.gather(found, dropped, return_exceptions=True)

    async def _paths(self, parts: Sequence[PartRecord]) -> dict[str, Path]:
        return {part.manifest_digest: await self._path(part) for part in parts}

    async def _until_unwanted(self) -> None:
        while True:
            await asyncio.sleep(STILL_WANTED_S)
            if not await self._wanted():
                return

    def _error(self, reason: str) -> PeerError:
        """The error for `reason`, with what the peer last said."""
        last = self._last
        if last is None:
            reason += f"; no peer of {self._host} has begun to fetch it: is `hotswap peer` running there?"
            return copy_unavailable(self._version, self._host, reason)
        if last.error is None:
            return copy_unavailable(self._version, self._host, f"{reason}; its peer is still at it")
        return copy_unavailable(self._version, self._host, f"{reason}; {last.error.message}", last.error.code)

    async def _path(self, part: PartRecord) -> Path:
        path = local_path(part.slot, self._host)
        if path is not None and await asyncio.to_thread(_is_there, path, part.manifest_digest):
            return path
        digest = part.manifest_digest
        whole, part_key = self._keys.copy(digest, self._host), part_copy_key(self._keys, digest, self._host)
        if self._slices and (path := await self._there(part_key, self._part)) is not None:
            return path  # also if the peer could not fetch what somebody else needs
        ways = [self._put(whole, self._whole), *([self._put(part_key, self._part)] if self._slices else [])]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _there(self, key: str, path_in: Callable[[bytes], Path | None]) -> Path | None:
        """The path that `path_in` finds in the record at `key` now."""
        found = await self._store.get(key)
        return path_in(found.value) if found is not None else None

    async def _put(self, key: str, path_in: Callable[[bytes], Path | None]) -> Path:
        """The path that `path_in` finds in the record at `key`, once there is one."""
        found, revision = await self._store.list(key)
        for kv in found:
            if kv.key == key and (path := path_in(kv.value)) is not None:
                return path
        async with contextlib.aclosing(self._store.watch(key, revision + 1)) as events:
            async for event in events:
                if event.kv.key == key and event.kind == "put" and (path := path_in(event.kv.value)) is not None:
                    return path
        raise AssertionError("unreachable: a watch does not end")

    def _part(self, raw: bytes) -> Path | None:
        copy = PartCopyRecord.from_json(raw)
        return local_path(copy.slot, self._host) if self._slices in copy.slices else None

    def _whole(self, raw: bytes) -> Path | None:
        """Raises PeerError when the peer has failed to fetch it."""
        self._last = copy = CopyRecord.from_json(raw)
        if copy.state == "failed":
            raise self._error("its peer could not fetch it")
        return local_path(copy.slot, self._host) if copy.state == "ready" else None


def _is_there(path: Path, digest: str) -> bool:
    """Whether a slot that was published here still holds the version; after a restart of the host it does not."""
    try:
        SlotReader.open(path, manifest_digest=digest, populate=False).close()
    except SlotBusy:
        return True  # somebody looks for a free slot, and has it for a moment
    except (ManifestError, OSError):
        return False
    return True


class Announcer:
    """Writes what changed. Every method raises StoreUnavailable, LeaseLost."""

    def __init__(self, store: Store, keys: Keys, host: str, lease_ttl_s: float, rack: str = "") -> None:
        self._store, self._keys, self._host, self._lease_ttl_s = store, keys, host, lease_ttl_s
        self._rack = rack
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

    async def say(
        self,
        records: Iterable[CopyRecord],
        alive: Iterable[str],
        parts: Iterable[PartCopyRecord] = (),
        slices: str = "",
    ) -> None:
        """Make `records`, `parts`, and the one of the host itself, which needs `slices`, the only records of this host
        in the store.

        The first call after `begin` also deletes what an earlier process of this host wrote for the digests `alive`.
        """
        assert self.lease is not None, "begin first"
        keys, host = self._keys, self._host
        wanted = {f"{keys.copy_hosts}{host}": CopyHostRecord(host, self._rack, slices).to_json()}
        wanted[f"{takers_prefix(keys)}{host}"] = b"{}"
        wanted |= {keys.copy(record.digest, host): record.to_json() for record in records}
        wanted |= {part_copy_key(keys, record.digest, host): record.to_json() for record in parts}
        if self._is_first:
            for digest in alive:
                self._said |= {keys.copy(digest, host): b"", part_copy_key(keys, digest, host): b""}
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

    def offered(self, digest: str) -> list[CopyRecord]:
        """The records of the hosts that can be asked for it."""
        return [record for record in self._records.get(digest, {}).values() if record.slot]

    def _read(self, kv: KeyValue) -> CopyRecord | None:
        """None for this host's own, for what cannot be read, as another release may have written it, and for a record
        that does not say what its key says."""
        named = parse_key(self._keys, kv.key)
        if named is None or named[1] == self._host:
            return None
        try:
            record = CopyRecord.from_json(kv.value)
        except RecordError as error:
            log.warning("%s is passed over: %s", kv.key, error)
            return None
        return record if (record.digest, record.host) == named else None


async def hosts_with_peers(store: Store, keys: Keys, slices: str | None = None) -> list[tuple[str, str]]:
    """(rack, host) of each host that has a peer now, and needs just these `slices`, by their digest (None: whatever it
    needs). Raises StoreUnavailable."""
    found = [(kv.key.removeprefix(keys.copy_hosts), kv) for kv in (await store.list(keys.copy_hosts))[0]]
    hosts = []
    for host, kv in found:
        try:
            record = CopyHostRecord.from_json(kv.value)
        except RecordError as error:
            log.warning("%s is passed over: %s", kv.key, error)
            continue
        if record.host == host and slices in (None, record.slices):
            hosts.append((record.rack, host))
    return hosts


class Since:
    """When each state began, so that a record changes only when what it says does."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float] = {}  # by digest and state

    def of(self, digest: str, state: str) -> float:
        """Unix seconds."""
        return self._known.setdefault((digest, state), time.time())

    def keep(self, digests: set[str]) -> None:
        """Forget all others."""
        self._known = {known: since for known, since in self._known.items() if known[0] in digests}
