"""Puts the version committed last back into shared memory, from what is there already or from its copy on disk.

The records change in one transaction, which also moves the counter's revision: a publisher that chose its slots
meanwhile has to choose again. The transaction names the new slots in every version that has the same piece; versions
of which something is nowhere any more become `retired`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from weightsync.control.board import readable_versions
from weightsync.control.editions import key_of, prefix_of, readable
from weightsync.control.hosts import local_path, slot_name, this_host
from weightsync.control.parts import slots_of
from weightsync.control.records import (
    ActiveRecord,
    CopyRecord,
    Keys,
    PartRecord,
    VersionRecord,
    shared_versions,
)
from weightsync.control.swap import recommit
from weightsync.errors import (
    ArenaError,
    CheckpointError,
    Conflict,
    ManifestError,
    PersistError,
    TensorError,
    VersionLost,
    WeightSyncError,
    digest_mismatch,
    unknown_version,
)
from weightsync.format.manifest import PREAMBLE, Layout, clear_gaps, write_header
from weightsync.memory.arena import Arena, SlotLock, pool_of
from weightsync.peer.copies import all_parts, kept_digests, local_slot, own_copies, with_local_slots
from weightsync.persist.disk import Disk, Piece, disk_piece, slot_header, slot_is_left, slot_is_whole
from weightsync.publish.writer import copy_sums
from weightsync.store.protocol import MISSING, KeyValue, Store

log = logging.getLogger("hotswap.persist")
ATTEMPTS = 10
DAMAGED = (ManifestError, CheckpointError, TensorError, OSError)


@dataclass(frozen=True)
class Restored:
    """`version` is active, and all of it in shared memory: it was still there, or came at least partly from disk.

    `previous` is the version that a rollback goes to, if that is there too. `retired` are versions that are nowhere.
    `home`: the directory of the copy.
    """

    version: int
    source: Literal["memory", "disk"]
    previous: int | None = None
    retired: tuple[int, ...] = ()
    home: Path | None = field(default=None, compare=False)


async def restore(
    store: Store, *, model: str, directories: Sequence[Path], arena: Arena, version: int | None = None
) -> Restored | None:
    """Have the version committed last in shared memory again; None when none was ever committed.

    Every byte is compared with the digests of its manifest. `directories`: where copies may be. `version` is the
    decision to serve another one than was committed last (see `VersionLost.offer`): it is committed with an epoch of
    its own, and the history says so.

    Raises VersionLost, SwapError (`version` is nowhere), ArenaError, StoreError, PersistError.
    """
    disks = [Disk(directory) for directory in directories if directory.is_dir()]
    for _ in range(ATTEMPTS):
        with contextlib.suppress(Conflict):
            attempt = await _Attempt.begin(store, Keys(model), disks, arena)
            if attempt is None:
                return None
            with contextlib.closing(attempt):
                return await attempt.run(version)
    raise PersistError("the records changed again and again while they were restored: is another server at work?")


async def restore_editions(store: Store, *, model: str, directories: Sequence[Path], arena: Arena) -> tuple[str, ...]:
    """Have the editions of adapters in shared memory again, each by itself; the full names of those that are nowhere.

    Raises StoreError, PersistError.
    """
    disks = [Disk(directory) for directory in directories if directory.is_dir()]
    attempt = await _Attempt.begin(store, Keys(model), disks, arena)
    if attempt is None:
        return ()
    with contextlib.closing(attempt):
        return await attempt.bring_editions()


@dataclass
class _Attempt:
    """The records as they were read, and slots that were filled and are held until the records name them."""

    store: Store
    keys: Keys
    disks: Sequence[Disk]
    arena: Arena
    host: str
    active: ActiveRecord
    found: dict[str, KeyValue | None]  # what it is decided on
    versions: dict[int, VersionRecord]
    own: dict[str, CopyRecord]
    copied: set[str]
    editions: dict[str, KeyValue]
    filled: dict[str, SlotLock] = field(default_factory=dict)  # by manifest digest
    whole: dict[str, bool] = field(default_factory=dict)  # what was read in memory, by manifest digest
    home: Path | None = None  # where the last one that was filled came from
    split_ends: bool = False  # a version of it is lost, so the active one gets its requests

    @classmethod
    async def begin(cls, store: Store, keys: Keys, disks: Sequence[Disk], arena: Arena) -> _Attempt | None:
        found = {key: await store.get(key) for key in (keys.counter, keys.active)}
        active = found[keys.active]
        if active is None:
            return None
        listed = (await store.list(keys.versions))[0]
        found |= {kv.key: kv for kv in listed}
        versions = readable_versions(listed)
        host = this_host()
        return cls(
            store,
            keys,
            disks,
            arena,
            host,
            ActiveRecord.from_json(active.value),
            found,
            {record.version: record for record in versions},
            dict(await own_copies(store, keys, host)),
            await kept_digests(store, keys, versions) if host else set(),
            {kv.key: kv for kv in (await store.list(prefix_of(keys)))[0]},
        )

    def close(self) -> None:
        for lock in self.filled.values():
            lock.release()
        self.filled.clear()

    async def run(self, asked: int | None) -> Restored:
        wanted = self.active.version if asked is None else asked
        record = self._record(wanted)
        if record is None:
            if asked is not None:
                raise unknown_version(asked, None)
            raise VersionLost(wanted, "the store does not know it, and no copy is on disk", await self._offer(wanted))
        try:
            source, home = await self._bring(record), self.home
        except DAMAGED as error:
            if asked is not None and asked != self.active.version:
                raise unknown_version(asked, f"nowhere whole ({error})") from error
            raise VersionLost(wanted, str(error), await self._offer(wanted)) from error
        previous = await self._previous(wanted)
        if not await self._shared(wanted):
            self.split_ends = True
        return replace(await self._write(record, source, previous), home=home)

    def _record(self, version: int) -> VersionRecord | None:
        """As the store has it; of a version it does not know (any more), as the disk has it."""
        known = self.versions.get(version)
        if known is not None and known.manifest_digest:
            return known
        return next((k.record for disk in self.disks for k in disk.kept() if k.version == version), None)

    async def _bring(self, record: VersionRecord) -> Literal["memory", "disk"]:
        """Have every piece in memory. Raises DAMAGED, ArenaError."""
        source: Literal["memory", "disk"] = "memory"
        for piece in all_parts(record):
            if not await self._in_memory(piece):
                self.filled[piece.manifest_digest] = await asyncio.to_thread(self._fill, piece)
                source = "disk"
        return source

    async def _in_memory(self, piece: PartRecord) -> bool:
        """Whether it is whole on this host, or on others that live."""
        digest = piece.manifest_digest
        if digest in self.filled:
            return True
        if digest not in self.whole:
            path = local_slot(piece, self.host, self.own)
            whole = path is not None and await asyncio.to_thread(slot_is_whole, path, digest)
            self.whole[digest] = whole or ((path is None or bool(piece.shares)) and digest in self.copied)
        return self.whole[digest]

    def _fill(self, piece: PartRecord) -> SlotLock:
        """From the first copy on disk that is right. Raises DAMAGED: why the last one is not."""
        digest, where = piece.manifest_digest, f"version {piece.version}{f' ({piece.name})' if piece.name else ''}"
        homes = [(home, disk.directory) for disk in self.disks for home in disk.homes(digest)]
        last: Exception = ManifestError(f"{where} is not in shared memory any more, and has no copy on disk")
        for home, directory in homes:
            try:
                with disk_piece(home, digest) as stored:
                    lock = self._into_slot(piece, stored)
                self.home = directory
                return lock
            except DAMAGED as error:
                log.error("the copy of %s in %s is damaged: %s", where, home, error)
                last = error
        raise last

    def _into_slot(self, piece: PartRecord, stored: Piece) -> SlotLock:
        layout = Layout.of(stored.manifest.schema)
        if any(entry.offset != layout.offsets[name] for name, entry in stored.manifest.tensors.items()):
            raise ManifestError(f"version {piece.version} was laid out by another release: publish it again")
        lock = self.arena.claim(pool_of(self.keys.model, piece.name), layout.total_nbytes, self._in_use())
        try:
            with _mapped(lock) as slot:
                slot[:PREAMBLE] = bytes(PREAMBLE)  # nobody takes it for what was here before
                for name, entry in stored.manifest.tensors.items():
                    target = slot[entry.offset : entry.offset + entry.nbytes]
                    sums = copy_sums(target, stored.files[name], entry.spec)
                    target.release()
                    if (sums.digest, sums.checksum) != (entry.digest, entry.checksum):
                        raise digest_mismatch(name, entry.digest, sums.digest)
                clear_gaps(slot, stored.manifest.schema, layout)
                write_header(slot, stored.manifest, layout)
            lock.share()
        except BaseException:
            lock.release()
            raise
        return lock

    def _in_use(self) -> set[str]:
        """Slots of this host that records name, but for those whose bytes are no longer what they should be."""
        damaged = {digest for digest, whole in self.whole.items() if not whole}
        named = {
            piece.slot
            for record in self.versions.values()
            if record.state == "ready"
            for piece in all_parts(record)
            if piece.manifest_digest not in damaged
        }
        named |= {slot for r in self.versions.values() if r.state == "publishing" for slot in slots_of(r)}
        named |= {edition.slot for edition in readable({key: kv.value for key, kv in self.editions.items()})}
        local = {str(path) for slot in named - {""} if (path := local_path(slot, self.host)) is not None}
        return local | {str(lock.path) for lock in self.filled.values()}

    async def _previous(self, wanted: int) -> int | None:
        """The version to roll back to, had back too if that can be; what it lacks keeps nobody from serving."""
        version = self.active.previous if wanted == self.active.version else None
        record = self.versions.get(version) if version is not None else None
        if record is None or record.state != "ready":
            return None
        try:
            await self._bring(record)
        except (*DAMAGED, ArenaError) as error:
            log.warning("version %d, to which a rollback would go, cannot be had back: %s", record.version, error)
            return None
        return version

    async def _shared(self, wanted: int) -> bool:
        """Whether the versions that share the traffic with `wanted` are there; had back if that can be."""
        for version in shared_versions(self.active.split) if wanted == self.active.version else ():
            record = self.versions.get(version)
            try:
                if record is None or record.state != "ready":
                    raise ManifestError("the store does not know it any more")
                await self._bring(record)
            except (*DAMAGED, ArenaError) as error:
                log.warning("version %d, which shared the traffic, cannot be had back: %s", version, error)
                return False
        return True

    async def bring_editions(self) -> tuple[str, ...]:
        """Have those of adapters back that are no longer in memory, each record in a write of its own; the full names
        of those that are nowhere, whose records go."""
        lost = []
        for edition in readable({key: kv.value for key, kv in self.editions.items()}):
            piece, key = edition.as_part, key_of(self.keys, edition.name, edition.number)
            if self._has_slot(piece) or piece.manifest_digest in self.copied:
                continue
            try:
                lock = self.filled[piece.manifest_digest] = await asyncio.to_thread(self._fill, piece)
                there = replace(edition, slot=slot_name(lock.path, self.host)).to_json()
                await self.store.compare_and_swap(key, self.editions[key].mod_revision, there)
            except ArenaError as error:
                log.error("there is no room for %s in shared memory: %s", edition.full_name, error)
            except DAMAGED:
                lost.append(edition.full_name)
                await self.store.delete(key)
        return tuple(lost)

    async def _offer(self, lost: int) -> int | None:
        """The newest other version that is whole, in memory or on disk."""
        kept = [copy for disk in self.disks for copy in disk.kept()]
        for version in sorted({*self.versions, *(copy.version for copy in kept)} - {lost}, reverse=True):
            record = self.versions.get(version)
            ready = record is not None and record.state == "ready"
            if record is not None and ready and all([await self._in_memory(piece) for piece in all_parts(record)]):
                return version
            for copy in (k for k in kept if k.version == version and (record is None or k.is_copy_of(record))):
                with contextlib.suppress(*DAMAGED):
                    await asyncio.to_thread(copy.verify)
                    return version
        return None

    async def _write(self, record: VersionRecord, source: Literal["memory", "disk"], previous: int | None) -> Restored:
        puts: dict[str, bytes | None] = {}
        retired = []
        for known in [record, *(v for v in self.versions.values() if v.version != record.version)]:
            if known is not record and known.state != "ready":
                continue
            there = known is record or known.version == previous or self._is_named(known)
            changed = self._renamed(replace(known, state="ready") if there else replace(known, state="retired"))
            if not there:
                retired.append(known.version)
            if changed != self.versions.get(known.version):
                puts[self.keys.version(known.version)] = changed.to_json()
        await recommit(self.store, self.keys, self.active, record, self.found, puts, split_ends=self.split_ends)
        for version in retired:
            log.warning("version %d is retired: it is neither in shared memory nor on disk", version)
        return Restored(record.version, source, previous, tuple(sorted(retired)))

    def _is_named(self, record: VersionRecord) -> bool:
        """Whether its slots are there, as their headers say: who stages it reads all of it."""
        return all(self._has_slot(piece) for piece in all_parts(record))

    def _has_slot(self, piece: PartRecord) -> bool:
        digest, path = piece.manifest_digest, local_slot(piece, self.host, self.own)
        if digest in self.filled or path is None:  # another host's is that host's to judge
            return True
        if piece.shares and (digest in self.copied or slot_is_left(path, digest)):
            return True  # this host's slot lacks what others have: that is theirs to judge
        return self.whole[digest] if digest in self.whole else _digest_at(path) == digest

    def _renamed(self, record: VersionRecord) -> VersionRecord:
        """With the new slots of what was filled."""
        names = {digest: slot_name(lock.path, self.host) for digest, lock in self.filled.items()}

        def where(part: PartRecord) -> Path | None:
            name = names.get(part.manifest_digest)
            return Path(name) if name is not None else None

        return with_local_slots(record, where)


def _digest_at(path: Path) -> str | None:
    """The manifest digest of the slot at `path`, as its header says; None when there is none."""
    with contextlib.suppress(WeightSyncError, OSError):
        return slot_header(path)[1]
    return None


@contextlib.contextmanager
def _mapped(lock: SlotLock) -> Iterator[memoryview]:
    """The slot, for this once: a server that runs for long must not keep its pages."""
    with mmap.mmap(lock.fd, lock.nbytes) as mapping, memoryview(mapping) as view:
        yield view


def _revision(found: KeyValue | None) -> int:
    return found.mod_revision if found is not None else MISSING
