"""Copies on disk behind each commit, and what a restart makes of them: on both stores, from memory or from disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import eventually
from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, read_back
from weightsync import Publisher, SlotReader, Store, ensure_arena
from weightsync.control.history import past_swaps
from weightsync.control.hosts import local_path
from weightsync.control.parts import Adapter
from weightsync.control.records import (
    ActiveRecord,
    CopyRecord,
    DiskRecord,
    Keys,
    ShareRecord,
    SplitRecord,
    VersionRecord,
)
from weightsync.errors import VersionLost
from weightsync.memory.arena import Arena
from weightsync.persist import Restored, __main__, disk, restore, restore_editions
from weightsync.persist.__main__ import Persister
from weightsync.persist.disk import Disk, remove_copies
from weightsync.publish.checkpoint import Checkpoint

STORES = ["sqlite", "etcd"]
KEYS = Keys("demo")
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


class Host:
    """A publisher, what a coordinator leaves behind after its swaps, and copies of that on disk."""

    def __init__(self, publisher: Publisher, store: Store, arena: Path, copies: Path) -> None:
        self.publisher, self.store, self.arena, self.copies = publisher, store, arena, copies

    def commit(self, version: int) -> None:
        before = self.publisher.active()
        epoch, previous = (before.epoch + 1, before.version) if before else (1, None)
        active = ActiveRecord(version, epoch, previous, f"swap-{epoch}", 0.0, self.version(version).fingerprint)
        self.publisher._store.put(KEYS.active, active.to_json())

    def publish(self, number: int) -> None:
        """The next version, committed: all its values are its number."""
        self.commit(self.publisher.publish(model(number), activate=False))

    async def keep(self, *numbers: int) -> None:
        """Publish each, and have the process make a copy of it."""
        for number in numbers:
            self.publish(number)
            assert await self.persist()

    async def persist(self, **bounds: int) -> bool:
        """The last steps of the process when it is told to end."""
        stopped, kept = asyncio.Event(), self.disk(**bounds)
        stopped.set()
        with kept.lock():
            return await Persister(self.store, KEYS, kept).run(stopped)

    @contextlib.asynccontextmanager
    async def persisting(self, **bounds: int) -> AsyncIterator[Persister]:
        """The process's work, in this one."""
        kept, stopped = self.disk(**bounds), asyncio.Event()
        persister = Persister(self.store, KEYS, kept)
        with kept.lock():
            work = asyncio.create_task(persister.run(stopped))
            try:
                yield persister
            finally:
                stopped.set()
                await work

    def disk(self, **bounds: int) -> Disk:
        return Disk(self.copies, **bounds)

    async def told(self, wanted: Callable[[DiskRecord], bool]) -> DiskRecord:
        """The record of the process in the store, once it is as wanted."""

        async def found() -> DiskRecord | None:
            kv = await self.store.get(KEYS.disk(""))
            record = DiskRecord.from_json(kv.value) if kv is not None else None
            return record if record is not None and wanted(record) else None

        return await eventually(found)

    def power_loss(self) -> None:
        for slot in self.arena.iterdir():
            slot.unlink()

    async def restored(
        self, version: int | None = None, *, disk: bool = True, arena: Arena | None = None
    ) -> Restored | None:
        arena = arena or await ensure_arena(self.store, host="")
        directories = [self.copies] if disk else []
        return await restore(self.store, model="demo", directories=directories, arena=arena, version=version)

    async def restored_editions(self) -> tuple[str, ...]:
        arena = await ensure_arena(self.store, host="")
        return await restore_editions(self.store, model="demo", directories=[self.copies], arena=arena)

    def version(self, number: int) -> VersionRecord:
        return next(v for v in self.publisher.versions() if v.version == number)

    def values(self, number: int) -> set[float]:
        return {float(value) for tensor in read_back(self.version(number)).values() for value in tensor.reshape(-1)}

    def verify_copy(self, number: int) -> None:
        copy = self.disk().find(self.version(number))
        assert copy is not None
        copy.verify()


@pytest.fixture
def host(publisher: Publisher, store: Store, arena_directory: Path, tmp_path: Path) -> Host:
    return Host(publisher, store, arena_directory, tmp_path / "copies")


def flip(slot: Path) -> None:
    """Change a byte of a tensor."""
    with SlotReader.open(slot) as reader:
        at = reader.entry("model.norm.weight").offset
    with slot.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_each_commit_is_followed_by_a_copy(host: Host) -> None:
    kept = host.disk(keep=2)
    async with host.persisting(keep=2):
        for number in (1, 2, 3):
            host.publish(number)
            record = await host.told(lambda r, number=number: number in r.versions)  # type: ignore[misc]
    assert (record.versions, record.wanted, record.error, record.failures) == ((2, 3), 3, None, 0)
    assert record.nbytes == kept.nbytes
    for number in (2, 3):
        checkpoint = Checkpoint(kept.directory / str(number))
        assert checkpoint.schema.tensors == {n: t for n, t in checkpoint.schema.tensors.items() if n in model()}
        host.verify_copy(number)
    assert names(kept.directory) == [".lock", "2", "3"]


async def test_what_was_committed_last_is_there_after_a_power_loss(host: Host) -> None:
    assert await host.restored() is None  # nothing was ever committed
    await host.keep(1, 2)
    host.publish(3)
    await host.store.put(KEYS.version(3), replace(host.version(3), signature="an envelope").to_json())
    assert await host.persist()
    before = {number: host.version(number) for number in (1, 2, 3)}
    active = host.publisher.active()
    host.power_loss()
    await host.store.delete(KEYS.version(3))  # this record comes from the disk, too
    assert await host.restored() == Restored(3, "disk", 2, (1,))
    assert host.publisher.active() == active
    for number in (2, 3):
        record = host.version(number)
        assert record.manifest_digest == before[number].manifest_digest
        assert (record.fingerprint, record.signature) == (before[number].fingerprint, before[number].signature)
        assert host.values(number) == {number}
    assert host.version(1).state == "retired"
    assert await host.restored() == Restored(3, "memory", 2)
    assert host.publisher.publish(model(4), activate=False) == 4  # numbers go on
    assert host.values(3) == {3.0}  # and its slot was not taken for another version
    assert host.values(4) == {4.0}


async def test_versions_that_share_traffic_are_kept_and_a_split_ends_with_one_that_is_lost(host: Host) -> None:
    for number in (1, 2, 3):
        host.publisher.publish(model(number), activate=False)
    host.commit(1)
    alone = host.publisher.active()
    assert alone is not None
    divided = replace(alone, split=SplitRecord((ShareRecord(3, 10.0, ("b",), host.version(3).fingerprint),)))
    await host.store.put(KEYS.active, divided.to_json())
    assert await host.persist()
    host.power_loss()
    assert await host.restored() == Restored(1, "disk", None, (2,))
    assert host.publisher.active() == divided
    assert (host.values(1), host.values(3)) == ({1.0}, {3.0})
    shutil.rmtree(host.copies / "3")
    host.power_loss()
    assert await host.restored() == Restored(1, "disk", None, (3,))
    found = host.publisher.active()
    assert found is not None
    assert (found.version, found.epoch, found.split) == (1, divided.epoch + 1, None)


async def test_memory_is_believed_only_where_every_byte_is_right(host: Host) -> None:
    await host.keep(1)
    assert await host.restored(disk=False) == Restored(1, "memory")
    slot = Path(host.version(1).slot)
    flip(slot)
    with pytest.raises(VersionLost) as lost:
        await host.restored(disk=False)
    assert (lost.value.version, lost.value.offer, lost.value.code) == (1, None, "version_lost")
    assert await host.restored() == Restored(1, "disk")
    assert host.values(1) == {1.0}
    assert host.version(1).slot == str(slot), "a slot whose bytes are wrong is room for the right ones"


@pytest.mark.parametrize("damage", ["byte", "manifest", "gone", "record"])
async def test_a_damaged_copy_is_never_served_and_an_older_one_only_by_decision(host: Host, damage: str) -> None:
    await host.keep(1, 2)
    host.power_loss()
    newest = host.copies / "2"
    if damage == "gone":
        shutil.rmtree(newest)
    else:
        files = {"byte": "model.safetensors", "manifest": "manifest.json", "record": "version.json"}
        raw = bytearray((newest / files[damage]).read_bytes())
        raw[-20] ^= 1
        (newest / files[damage]).write_bytes(raw if damage != "record" else raw[:-20])
    with pytest.raises(VersionLost) as lost:
        await host.restored()
    assert (lost.value.version, lost.value.offer) == (2, 1)
    assert host.publisher.active().version == 2  # type: ignore[union-attr]
    with refused("unknown_version"):
        await host.restored(7)
    assert await host.restored(1) == Restored(1, "disk", None, (2,))
    active = host.publisher.active()
    assert active is not None
    assert (active.version, active.epoch, active.previous) == (1, 3, None)
    assert host.values(1) == {1.0}
    entry = (await past_swaps(host.store, KEYS))[0]
    assert (entry.version, entry.previous, entry.outcome, entry.requested_by) == (1, 2, "done", "restore")
    assert host.publisher.publish(model(3), activate=False) == 3


async def test_parts_and_differences_are_whole_on_disk_and_shared_parts_take_their_bytes_once(host: Host) -> None:
    host.commit(host.publisher.publish(model(1), parts={"draft": model(5, layers=1)}, activate=False))
    assert await host.persist()
    base = host.disk().nbytes
    adapter = Adapter({"q.lora_A.weight": np.full((2, 8), 7.0, np.float32)}, CONFIG)
    inner = Adapter({"q.lora_A.weight": np.full((2, 8), 8.0, np.float32)}, CONFIG)
    adapters = {"lora/math": adapter, "lora/math/adapter_model.safetensors": inner, "lora/org/math@v2": inner}
    host.commit(host.publisher.publish(None, parts=adapters, activate=False))
    assert await host.persist()
    assert host.disk().nbytes < base * 1.5
    host.power_loss()
    assert await host.restored() == Restored(2, "disk", 1)
    first, second = host.version(1), host.version(2)
    assert (first.slot, first.parts[0].slot) == (second.slot, second.parts[0].slot)
    assert host.values(1) == {1.0}
    found = {}
    for part in second.parts:
        with SlotReader.open(part.slot, manifest_digest=part.manifest_digest) as reader:
            reader.verify_all()
            name = next(iter(reader.manifest.tensors))
            found[part.name] = float(np.frombuffer(bytes(reader.buffer(name)), reader.entry(name).dtype)[0])
    assert found == {"draft": 5.0, **dict(zip(adapters, (7.0, 8.0, 8.0), strict=True))}
    shutil.rmtree(host.copies / "1")
    host.verify_copy(2)


async def test_a_version_over_the_bound_is_complained_of_and_the_old_copy_stays(host: Host) -> None:
    await host.keep(1)
    one = host.disk().nbytes
    host.publish(2)
    bound = one + os.stat(host.version(2).slot).st_size + 1000
    async with host.persisting(max_bytes=one + 100) as persister:
        record = await host.told(lambda r: r.wanted == 2)
        assert (record.versions, record.failures, persister.failures) == ((1,), 1, 1)
        assert record.error is not None
        assert record.error.code == "persist_full"
        assert "--max-bytes" in record.error.message
    host.verify_copy(1)
    async with host.persisting(max_bytes=bound):
        for number in (2, 3, 4):  # two versions fit: the oldest makes room before the next is written
            if number > 2:
                host.publish(number)
            record = await host.told(lambda r, number=number: r.versions == (number - 1, number))  # type: ignore[misc]
            assert (record.error, record.nbytes <= bound) == (None, True)


async def test_the_version_to_go_back_to_makes_room_for_no_other(host: Host) -> None:
    await host.keep(1, 2)
    host.commit(1)
    host.publish(3)
    needed, made = os.stat(host.version(3).slot).st_size, host.disk().directory / "1" / "version.json"
    before = made.stat()
    assert await host.persist(max_bytes=needed + host.disk().nbytes - 1)
    kept = host.disk()
    assert [kept.find(host.version(number)) is not None for number in (1, 2, 3)] == [True, False, True]
    assert (made.stat().st_ino, made.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)  # not made anew


async def test_a_copy_may_take_the_bound_to_the_last_byte(host: Host) -> None:
    host.publish(1)
    needed = os.stat(host.version(1).slot).st_size
    assert not await host.persist(max_bytes=needed - 1)
    assert await host.persist(max_bytes=needed)


async def test_a_full_disk_breaks_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    await host.keep(1)
    host.publish(2)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_piece", full)
    assert not await host.persist()
    with refused("persist_full", match="free some"):
        host.disk().write(host.version(2), {"": Path(host.version(2).slot)}, [host.version(1)])
    monkeypatch.undo()
    host.verify_copy(1)
    assert names(host.copies) == [".lock", "1"]
    assert await host.persist()


async def test_numbers_of_another_history_are_not_taken_for_ours(host: Host) -> None:
    """`--fresh` begins at 1 again, beside what the run before has left on disk."""
    await host.keep(1)
    left = host.copies / "1"
    raw = (left / "version.json").read_bytes()
    digest = host.version(1).manifest_digest
    (left / "version.json").write_bytes(raw.replace(digest.encode(), b"0" * 32))
    assert await host.persist()
    host.power_loss()
    assert await host.restored() == Restored(1, "disk")


async def test_what_a_killed_writer_has_left_is_no_version(host: Host) -> None:
    await host.keep(1)
    host.publish(2)
    shutil.copytree(host.copies / "1", host.copies / ".new-2")
    (host.copies / ".new-2" / "version.json").unlink()
    assert [kept.version for kept in host.disk().kept()] == [1]
    assert await host.persist()
    assert names(host.copies) == [".lock", "1", "2"]
    host.power_loss()
    assert await host.restored() == Restored(2, "disk", 1)


async def test_what_is_not_ours_in_the_directory_is_left_alone(host: Host) -> None:
    """A trainer names its checkpoints after steps, too."""
    for name in ("3", "1000", "2026-backup", ".git-annex", ".old-trainer"):
        (host.copies / name).mkdir(parents=True)
        (host.copies / name / "weights.bin").write_bytes(b"x" * 4096)
    theirs = contents(host.copies)
    for number in (1, 2, 3):
        host.publish(number)
        assert await host.persist(keep=1, max_bytes=100_000) is (number < 3)
    record = await host.told(lambda r: r.error is not None)
    assert record.error is not None
    assert "3 holds something else" in record.error.message
    assert [kept.version for kept in host.disk().kept()] == [1, 2]
    remove_copies(host.copies)
    assert contents(host.copies) == theirs


async def test_a_copy_that_somebody_has_put_by_is_theirs(host: Host) -> None:
    host.publish(1)
    assert await host.persist(keep=1)
    shutil.copytree(host.copies / "1", host.copies / "the-good-one")
    theirs = contents(host.copies / "the-good-one")
    host.publish(2)
    assert await host.persist(keep=1)
    remove_copies(host.copies)
    assert contents(host.copies / "the-good-one") == theirs


async def test_what_another_host_has_is_left_to_it_and_else_comes_from_the_disk_here(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.keep(1)
    record = host.version(1)
    elsewhere = replace(record, slot=f"//far{record.slot}")
    await host.store.put(KEYS.version(1), elsewhere.to_json())
    copy = CopyRecord("far", elsewhere.slot, record.manifest_digest, 1, "ready", "far:1", 0.0)
    await host.store.put(KEYS.copy(record.manifest_digest, "far"), copy.to_json())
    monkeypatch.setenv("HOTSWAP_HOST", "near")
    arena = await ensure_arena(host.store, host.copies.parent / "near", host="near")
    assert await host.restored(arena=arena) == Restored(1, "memory")
    assert host.version(1) == elsewhere
    await host.store.delete(KEYS.copy(record.manifest_digest, "far"))  # its host has died
    assert await host.restored(arena=arena) == Restored(1, "disk")
    assert host.version(1).slot.startswith(f"//near{arena.directory}")
    await host.store.put(KEYS.copy(record.manifest_digest, "far"), copy.to_json())
    slot = local_path(host.version(1).slot, "near")
    assert slot is not None
    flip(slot)  # what another host has does not make this one's bytes right
    assert await host.restored(arena=arena) == Restored(1, "disk")


async def test_a_copy_under_way_lets_go_of_a_slot_that_a_publisher_needs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = asyncio.Event(), asyncio.Event()
    loop, first, real = asyncio.get_running_loop(), [True], disk.write_piece

    def slowly(*args: object, **kwargs: object) -> None:
        if first.pop() if first else False:
            loop.call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "write_piece", slowly)
    host.publish(1)
    async with host.persisting() as persister:
        await asyncio.wait_for(writing.wait(), 60)
        monkeypatch.setattr("weightsync.memory.arena.Arena.free_nbytes", lambda self: 0)
        for number in (2, 3):
            host.publish(number)
        await eventually(lambda: persister._needed == {2, 3})
        go_on.set()
        record = await host.told(lambda r: 3 in r.versions)
    assert record.versions == (2, 3)


def test_the_process_finishes_the_active_version_before_it_ends(host: Host, store_url: str) -> None:
    host.publish(1)
    command = [sys.executable, "-m", "weightsync.persist", "--store", store_url, "--model", "demo"]
    process = subprocess.Popen([*command, "--dir", str(host.copies)], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if b"version 1 is on disk" in line:
                break
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == __main__.LOWEST
        host.publish(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
    assert [kept.version for kept in host.disk().kept()] == [1, 2]


# editions of adapters ------------------------------------------------------------------------------------------------


def edition(host: Host, name: str, value: float, **terms: int) -> int:
    adapter = Adapter({"a.lora_A.weight": np.full((2, 4), value, np.float32)}, CONFIG)
    return host.publisher.publish_edition(name, adapter, **terms)


def held(host: Host) -> dict[str, float]:
    """The value of each edition that the store knows, as it is in memory."""
    found = {}
    for record in host.publisher.editions():
        with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as reader:
            reader.verify_all()
            found[record.full_name] = float(np.frombuffer(reader.buffer("a.lora_A.weight"), np.float32)[0])
    return found


async def test_editions_come_back_from_disk_after_a_power_loss(host: Host) -> None:
    host.publish(1)
    numbers = [edition(host, "math", 1.0), edition(host, "math", 2.0), edition(host, "org/prose", 3.0)]
    assert await host.persist()
    before = held(host)
    host.power_loss()
    assert await host.restored_editions() == ()
    assert held(host) == before == dict(zip([f"math@{numbers[0]}", f"math@{numbers[1]}", f"org/prose@{numbers[2]}"],
                                            [1.0, 2.0, 3.0], strict=True))  # fmt: skip
    assert edition(host, "math", 4.0) > numbers[-1]
    assert held(host).items() >= before.items(), "the slots of those that came back are in use"


async def test_what_is_withdrawn_leaves_the_disk(host: Host) -> None:
    host.publish(1)
    for value in (1.0, 2.0, 3.0):
        edition(host, "math", value, keep=2)
        assert await host.persist()
    assert host.disk().editions().keys() == {record.manifest_digest for record in host.publisher.editions()}
    host.publisher.withdraw_edition("math")
    assert await host.persist()
    assert host.disk().editions() == {}
    remove_copies(host.copies)
    assert list(host.copies.iterdir()) == []


async def test_an_edition_is_copied_once_it_has_stayed_a_while(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are replaced before; at the end nothing is left out."""
    host.publish(1)
    async with host.persisting():
        first = edition(host, "math", 1.0)
        host.publish(2)
        await host.told(lambda record: record.versions == (1, first + 1))
        assert host.disk().editions() == {}
        monkeypatch.setattr(__main__, "EDITION_S", 0.05)
        second = edition(host, "math", 2.0)
        await eventually(lambda: len(host.disk().editions()) == 2)
    assert held(host).keys() == {f"math@{first}", f"math@{second}"}


async def test_editions_that_are_nowhere_or_damaged_are_named_and_gone(host: Host) -> None:
    host.publish(1)
    names = [f"math@{edition(host, 'math', 1.0)}"]
    assert await host.persist()
    (home,) = host.disk().editions().values()
    with (home / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    names.append(f"math@{edition(host, 'math', 2.0)}")
    host.power_loss()
    assert await host.restored_editions() == tuple(names)
    assert held(host) == {}


async def test_a_bound_on_the_disk_holds_with_editions(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.publish(1)
    assert await host.persist()
    room = host.disk().nbytes
    edition(host, "math", 1.0)
    assert await host.persist(max_bytes=room)
    assert (host.disk().editions(), host.disk().nbytes) == ({}, room)
    assert "cannot be copied" in caplog.text
