"""The state that `hotswap up` finds of the last run and goes on with, settled before any process starts.

    nothing was ever committed     the checkpoint becomes the first version
    the version committed last     is served again, under its number: from shared memory, else from its copy on disk
    it is lost in both             the newest version that is whole is served, as a commit of its own; else the
                                   checkpoint becomes a new version. Both are said
    the checkpoint is another one  refused: what is meant cannot be known

A swap that was under way is left to the coordinator, which ends it from its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server.errors import CliError
from server.gateway.access.records import DOOR, KEYS_PREFIX, DoorRecord
from server.up.state import own, owner, require_own
from weightsync import open_store
from weightsync.control.arenas import ensure_arena
from weightsync.control.board import readable_versions
from weightsync.control.hosts import arena_key, this_host
from weightsync.control.parts import DRAFT, LORA
from weightsync.control.records import (
    ActiveRecord,
    ArenaRecord,
    CounterRecord,
    DiskRecord,
    InstanceRecord,
    Keys,
    PartRecord,
    VersionRecord,
)
from weightsync.control.strict_json import Record
from weightsync.errors import CheckpointError, Conflict, RecordError, StoreError, VersionLost
from weightsync.memory.arena import Arena, SlotLock
from weightsync.peer.copies import all_parts, local_slot, own_copies
from weightsync.persist import Restored, restore, restore_editions
from weightsync.persist.disk import Disk, slot_is_left, slot_is_whole
from weightsync.publish.checkpoint import Checkpoint
from weightsync.store import MISSING, Store
from weightsync.store.sqlite import SqliteStore

ORIGIN = "origin"  # and under it, by model; the key alone is of releases that knew one model
SLOT = "slot-"  # what the names of slots begin with in an arena


@dataclass(frozen=True)
class OriginRecord(Record):
    """The checkpoint that the store of a state directory began with. `digest` is `Checkpoint.glance` ("": no
    weights)."""

    model: str
    path: str
    digest: str


@dataclass(frozen=True)
class Wanted:
    """The model that `up` was asked to serve: a checkpoint under a name, and what goes with it.

    `copies`: where versions are copied to, None if nowhere; `kept`: where else there may be some. `arena`: where the
    slots go; of a shared store, unless it says where.
    """

    model: str
    checkpoint: Path
    draft: Path | None
    adapters: bool
    copies: Path | None
    kept: Path
    arena: Path


@dataclass(frozen=True)
class Begun:
    """The state of the last run, to go on with.

    `url` opens this very store. `publish`: by model the arguments of `weightsync.push` for what must be published
    first. `said` is for the operator.
    """

    url: str
    arena: Path
    publish: Mapping[str, tuple[str, ...]]
    said: tuple[str, ...] = ()


async def begin(url: str, wanted: Sequence[Wanted], remember: Callable[[str], None] | None) -> Begun:
    """Opens the store, makes it if need be, and puts it in order for the models that are `wanted`.

    `remember` is told the id of the store of a state directory; None: it is an etcd, which others use too.

    Raises StoreError, ArenaError, PersistError, CliError.
    """
    store = open_store(url)
    try:
        if remember is not None:
            assert isinstance(store, SqliteStore)
            remember(store.store_id)
        models = [_Beginning(store, one, shared=remember is None) for one in wanted]
        names = {one.model for one in wanted}
        served = [(model, await model.judge(names)) for model in models]
        arena = await _settle_arena(store, wanted[0].arena, names, shared=remember is None)
        publish = {}
        for model, digest in served:
            if (what := await model.run(arena, digest)) is not None:
                publish[model.wanted.model] = tuple(what)
        said = [f"{m.wanted.model}: {line}" if len(models) > 1 else line for m in models for line in m.said]
        here = store.url_of_this if isinstance(store, SqliteStore) else store.url
        return Begun(here, arena.directory, publish, tuple(said))
    finally:
        await store.close()


async def describe(url: str, wanted: Iterable[str]) -> tuple[str, list[Path]]:
    """The content of a store in a line, for a user about to discard it; and where copies were last written."""
    try:
        store = open_store(url, create=False)
    except StoreError as error:
        return f"a store that cannot be read ({error})", []
    try:
        made = [kv for kv in (await store.list(KEYS_PREFIX))[0] if kv.key != DOOR]
        door = await store.get(DOOR)
        closed = ", inference closed to who has none" if door and not DoorRecord.from_json(door.value).open else ""
        parts, copies = [f"{len(made)} API key(s){closed}"], []
        models = list(dict.fromkeys([*await _origins(store), *wanted]))
        for model in models:
            keys = Keys(model)
            counter = await store.get(keys.counter)
            newest = CounterRecord.from_json(counter.value).version if counter is not None else 0
            swaps = len((await store.list(keys.history))[0])
            of = f" of {model}" if len(models) > 1 else ""
            versions = f"versions 1 to {newest}" if newest else "no version"
            parts.append(f"{versions}{of} and a history of {swaps} swap(s)")
            if (kept := await _copies(store, keys)) is not None:
                copies.append(Path(kept.directory))
        return ", ".join(parts), copies
    except StoreError as error:
        return f"a store that cannot be read ({error})", []
    finally:
        await store.close()


async def _origins(store: Store) -> dict[str, OriginRecord]:
    """The checkpoints that a store began with, by model."""
    records = [OriginRecord.from_json(kv.value) for kv in (await store.list(ORIGIN))[0]]
    return {record.model: record for record in records}


async def _copies(store: Store, keys: Keys) -> DiskRecord | None:
    """The record of this host's disk when copies were last written."""
    found = await store.get(keys.disk(this_host()))
    return DiskRecord.from_json(found.value) if found is not None else None


def lost(url: str) -> str | None:
    """Why the store that `url` names cannot be used now; None if it can."""

    async def look() -> None:
        await open_store(url, create=False).close()

    try:
        asyncio.run(look())
    except StoreError as error:
        return str(error)
    return None


def process_lives(pid: int) -> bool:
    """Whether there is such a process on this host."""
    return Path(f"/proc/{pid}").exists()


def free_arena(directory: Path) -> None:
    """Give back what nobody uses of the shared memory in `directory`."""
    _remove_unused(directory)
    with contextlib.suppress(OSError):
        directory.rmdir()


async def _settle_arena(store: Store, directory: Path, wanted: Iterable[str], shared: bool) -> Arena:
    """The arena with the slots. Other files that a killed run has left there cannot be verified, and go."""
    if shared:
        return await ensure_arena(store, directory)
    arena = Arena(directory)
    record = ArenaRecord(str(arena.directory)).to_json()
    key = arena_key(this_host())
    found = await store.get(key)
    if found is None or found.value != record:  # the directory was moved, or copied: its memory is its own
        await store.put(key, record)
    known = [(await store.list(Keys(model).versions))[0] for model in {*await _origins(store), *wanted}]
    _remove_unused(arena.directory, but=SLOT if any(known) else None)
    return arena


class _Beginning:
    """The start of one model. `store` is nobody else's meanwhile, unless it is shared."""

    def __init__(self, store: Store, wanted: Wanted, shared: bool) -> None:
        self.store, self.wanted, self.shared = store, wanted, shared
        self.keys = Keys(wanted.model)
        self.said: list[str] = []
        self.copies: DiskRecord | None = None

    async def run(self, arena: Arena, digest: str) -> Sequence[str] | None:
        """The arguments of the publication that must come first, None without one. `digest`: of the checkpoint."""
        active = await self._active()
        if self.wanted.copies is not None:
            require_own(self.wanted.copies, self._name)
        self.copies = await _copies(self.store, self.keys)
        await self._count_on()
        await self._forget_killed()
        restored = await self._restore(arena, active)
        if lost := await restore_editions(self.store, **self._about(arena)):
            self.said.append(
                f"publish again {', '.join(lost)}: adapters' editions that are in no memory and on no disk"
            )
        if self.wanted.copies is not None:
            own(self.wanted.copies, self._name)
        if restored is not None:
            return await self._missing_draft(restored.version)
        await self._retire_gone()
        if not self.shared:
            await self._write_origin(digest)
        publish = [str(self.wanted.checkpoint)]
        return [*publish, *([] if self.wanted.draft is None else ["--with", f"{DRAFT}={self.wanted.draft}"])]

    @property
    def _name(self) -> str:
        """The name that tells this store from others, wherever its file is moved."""
        if isinstance(self.store, SqliteStore):
            return self.store.store_id
        return "etcd " + self.store.url.partition("?")[0].partition("://")[2].partition("/")[2]

    # what the command line means here

    async def judge(self, wanted: set[str]) -> str:
        """The digest of the checkpoint. `wanted`: the models that are asked for. Raises CliError if what is
        served began with another one."""
        active = await self._active()
        digest = glance(self.wanted.checkpoint)
        if self.shared:
            return digest
        origins = await _origins(self.store)
        if not wanted & origins.keys():
            for other in origins:
                if await self.store.get(Keys(other).active) is not None:
                    raise CliError(
                        f"this state directory serves {other}, not {self.wanted.model}: name another --state-dir, or "
                        f"begin anew with --fresh (it discards {(await describe(self.store.url, wanted))[0]})"
                    )
        origin = origins.get(self.wanted.model)
        if origin is None:
            if active is not None:  # of a release that noted none
                await self._write_origin(digest)
            return digest
        if active is None:
            return digest
        named = str(self.wanted.checkpoint)
        if digest != origin.digest and named != origin.path:
            raise CliError(
                f"this state directory began with {origin.path} and serves version {active.version}; {named} is "
                f"another checkpoint. To serve it as the next version, start with --model {origin.path} and run "
                f"`hotswap weights push {named}`; to serve it beside, name another --state-dir or --name; to begin "
                f"anew with it, --fresh (it discards {(await describe(self.store.url, wanted))[0]})"
            )
        if digest and digest != origin.digest:
            self.said.append(
                f"{named} has changed since this state began with it: `hotswap weights push {named}` serves it as it is"
            )
        elif named != origin.path:  # it was moved
            await self._write_origin(digest)
        return digest

    async def _write_origin(self, digest: str) -> None:
        origin = OriginRecord(self.wanted.model, str(self.wanted.checkpoint), digest)
        await self.store.put(f"{ORIGIN}/{self.wanted.model}", origin.to_json())

    # shared memory

    async def _restore(self, arena: Arena, active: ActiveRecord | None) -> Restored | None:
        """Have a version in shared memory to go on with; None if there is none."""
        if active is None:
            return None
        try:
            restored = await self._restored(arena)
        except VersionLost as loss:
            self._require_copies(loss.version)
            if loss.offer is None:
                self.said.append(f"version {loss.version} is lost: {loss.reason}. The checkpoint becomes a new version")
                return None
            self.said.append(f"version {loss.version} is lost: {loss.reason}")
            restored = await self._restored(arena, loss.offer)
        assert restored is not None
        await self._require_parts(restored.version)
        where = "shared memory" if restored.source == "memory" else f"its copy in {restored.home}"
        committed = (await self._active() or active).committed_at
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(committed))
        back = "" if restored.previous is None else f"; a rollback goes to version {restored.previous}"
        self.said.append(f"going on with version {restored.version}, committed {when}, from {where}{back}")
        return restored

    async def _restored(self, arena: Arena, version: int | None = None) -> Restored | None:
        return await restore(self.store, version=version, **self._about(arena))

    def _about(self, arena: Arena) -> dict[str, Any]:
        return {"model": self.wanted.model, "directories": self._places, "arena": arena}

    @property
    def _places(self) -> list[Path]:
        """Where there may be copies of versions, whatever this start was asked for."""
        recorded = Path(self.copies.directory) if self.copies is not None else None
        named = (self.wanted.copies, recorded, self.wanted.kept)
        return list(dict.fromkeys(place for place in named if place is not None))

    def _require_copies(self, version: int) -> None:
        """Raises CliError when a version is on a disk that is not there now: it is not lost."""
        if self.copies is None or version not in self.copies.versions or self.wanted.copies is None:
            return
        if owner(Path(self.copies.directory)) != self._name:
            raise CliError(
                f"version {version} is not in shared memory, and has a copy in {self.copies.directory}, which is not "
                "there: mount it, or put it back; or go on without it: --persist off"
            )

    # records

    async def _active(self) -> ActiveRecord | None:
        found = await self.store.get(self.keys.active)
        return ActiveRecord.from_json(found.value) if found is not None else None

    async def _count_on(self) -> None:
        """Numbers that are on disk were given out, also by a store that was put back from an older copy."""
        disks = [Disk(place) for place in self._places if place.is_dir()]
        highest = max((kept.version for disk in disks for kept in disk.kept()), default=0)
        found = await self.store.get(self.keys.counter)
        if highest > (CounterRecord.from_json(found.value).version if found is not None else 0):
            with contextlib.suppress(Conflict):  # a publisher is at work, and counts as well
                expected = found.mod_revision if found is not None else MISSING
                await self.store.compare_and_swap(self.keys.counter, expected, CounterRecord(highest).to_json())

    async def _forget_killed(self) -> None:
        """Ends the records of instances killed on this host: a swap would wait for them until their lease ends."""
        here = f"{socket.gethostname()}-" if self.shared else ""
        for kv in (await self.store.list(f"{self.keys.instances}{here}"))[0]:
            with contextlib.suppress(RecordError):  # another release's: its lease ends
                if not process_lives(InstanceRecord.from_json(kv.value).pid):
                    await self.store.delete(kv.key)

    async def _retire_gone(self) -> None:
        """No version is to be asked for whose bytes are nowhere."""
        host = this_host()
        own = await own_copies(self.store, self.keys, host)
        listed = (await self.store.list(self.keys.versions))[0]
        revisions = {kv.key: kv.mod_revision for kv in listed}
        for record in readable_versions(listed):
            key, places = self.keys.version(record.version), [(local_slot(p, host, own), p) for p in all_parts(record)]
            if record.state != "ready" or all(path is None or _is_left(path, part) for path, part in places):
                continue  # another host's is that host's to judge
            with contextlib.suppress(Conflict):
                await self.store.compare_and_swap(key, revisions[key], replace(record, state="retired").to_json())

    async def _require_parts(self, version: int) -> None:
        """Raises CliError when the instances would not run something that the version has."""
        parts = await self._parts(version)
        if DRAFT in parts and self.wanted.draft is None:
            raise CliError(
                f"version {version} has a draft model: name one with --speculative-config, as before, or begin anew "
                "with --fresh"
            )
        if any(part.startswith(LORA) for part in parts) and not self.wanted.adapters:
            raise CliError(f"version {version} has adapters: start with --enable-lora, as before, or anew with --fresh")

    async def _missing_draft(self, version: int) -> Sequence[str] | None:
        """The arguments of a publication when a draft model is named for the first time."""
        if self.wanted.draft is None or DRAFT in await self._parts(version):
            return None
        self.said.append(f"version {version} has no draft model: a new version gets {self.wanted.draft}")
        return ["--part", DRAFT, str(self.wanted.draft)]

    async def _parts(self, version: int) -> set[str]:
        found = await self.store.get(self.keys.version(version))
        return {part.name for part in VersionRecord.from_json(found.value).parts} if found is not None else set()


def glance(checkpoint: Path) -> str:
    """A text that tells a checkpoint from others, without reading all of it; "" for one without weights."""
    try:
        return Checkpoint(checkpoint, whole=True).glance()
    except CheckpointError:
        return ""


def _remove_unused(directory: Path, but: str | None = None) -> None:
    """`but`: what the names of files begin with that stay."""
    for path in directory.glob("*"):
        if but is not None and path.name.startswith(but):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif (lock := SlotLock.try_exclusive(path)) is not None:
            path.unlink(missing_ok=True)
            lock.release()


def _is_left(path: Path, part: PartRecord) -> bool:
    """Of a slot that was published with chunks elsewhere, whether those that were here are."""
    return (slot_is_left if part.shares else slot_is_whole)(path, part.manifest_digest)
