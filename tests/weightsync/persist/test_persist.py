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
from tests.weightsync.tensors import model, read_back
from weightsync import Publisher, SlotReader, Store, ensure_arena
from weightsync.control.history import past_swaps
from weightsync.control.hosts import local_path
from weightsync.control.records import (
    ActiveRecord,
    CopyRecord,
    DiskRecord,
    Keys,
    ShareRecord,
    SplitRecord,
    VersionRecord,
)
from weightsync.errors import PersistFull, UnknownVersion, VersionLost
from weightsync.memory.parts import Adapter
from weightsync.persist import Restored, __main__, disk, restore
from weightsync.persist.__main__ import Persister
from weightsync.persist.disk import Disk, remove_copies
from weightsync.publish.checkpoint import Checkpoint

STORES = ["sqlite", "etcd"]
KEYS = Keys("demo")
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Commit = Callable[[int], None]


def adapter(value: float) -> Adapter:
    return Adapter({"q.lora_A.weight": np.full((2, 8), value, np.float32)}, CONFIG)


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    return tmp_path / "copies"


@pytest.fixture
def commit(publisher: Publisher) -> Commit:
    """What a coordinator would leave behind after a swap."""

    def write(version: int) -> None:
        before = publisher.active()
        epoch, previous = (before.epoch + 1, before.version) if before else (1, None)
        record = next(v for v in publisher.versions() if v.version == version)
        active = ActiveRecord(version, epoch, previous, f"swap-{epoch}", 0.0, record.fingerprint)
        publisher._store.put(KEYS.active, active.to_json())

    return write


@contextlib.asynccontextmanager
async def persisting(store: Store, kept: Disk) -> AsyncIterator[Persister]:
    """The process's work, in this one."""
    persister, stopped = Persister(store, KEYS, kept), asyncio.Event()
    with kept.lock():
        work = asyncio.create_task(persister.run(stopped))
        try:
            yield persister
        finally:
            stopped.set()
            await work


async def told(store: Store) -> DiskRecord | None:
    found = await store.get(KEYS.disk(""))
    return DiskRecord.from_json(found.value) if found is not None else None


async def until_told(store: Store, wanted: Callable[[DiskRecord], bool]) -> DiskRecord:
    async def found() -> DiskRecord | None:
        record = await told(store)
        return record if record is not None and wanted(record) else None

    return await eventually(found)


async def persist_now(store: Store, kept: Disk) -> bool:
    """What the process does when it is told to end."""
    stopped = asyncio.Event()
    stopped.set()
    with kept.lock():
        return await Persister(store, KEYS, kept).run(stopped)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def power_loss(arena: Path) -> None:
    for slot in arena.iterdir():
        slot.unlink()


def version_of(publisher: Publisher, number: int) -> VersionRecord:
    return next(v for v in publisher.versions() if v.version == number)


def values(record: VersionRecord) -> set[float]:
    return {float(value) for tensor in read_back(record).values() for value in tensor.reshape(-1)}


async def restored(store: Store, directory: Path | None, version: int | None = None) -> Restored | None:
    return await restore(
        store,
        model="demo",
        directories=[directory] if directory is not None else [],
        arena=await ensure_arena(store, host=""),
        version=version,
    )


async def test_each_commit_is_followed_by_a_copy(
    publisher: Publisher, commit: Commit, store: Store, copies: Path
) -> None:
    kept = Disk(copies, keep=2)
    async with persisting(store, kept):
        for number in (1, 2, 3):
            commit(publisher.publish(model(number), activate=False))
            record = await until_told(store, lambda r, number=number: number in r.versions)  # type: ignore[misc]
    assert (record.versions, record.wanted, record.error, record.failures) == ((2, 3), 3, None, 0)
    assert record.nbytes == kept.nbytes
    for number in (2, 3):
        checkpoint = Checkpoint(kept.directory / str(number))
        assert checkpoint.schema.tensors == {n: t for n, t in checkpoint.schema.tensors.items() if n in model()}
        kept.find(version_of(publisher, number)).verify()  # type: ignore[union-attr]
    assert names(kept.directory) == [".lock", "2", "3"]


async def test_what_was_committed_last_is_there_after_a_power_loss(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path
) -> None:
    assert await restored(store, copies) is None  # nothing was ever committed
    for number in (1, 2, 3):
        commit(publisher.publish(model(number), activate=False))
        assert await persist_now(store, Disk(copies))
    before = {number: version_of(publisher, number) for number in (1, 2, 3)}
    active = publisher.active()
    power_loss(arena_directory)
    assert await restored(store, copies) == Restored(3, "disk", 2, (1,))
    assert publisher.active() == active
    for number in (2, 3):
        record = version_of(publisher, number)
        assert record.manifest_digest == before[number].manifest_digest
        assert (record.version, record.fingerprint) == (number, before[number].fingerprint)
        assert values(record) == {number}
    assert version_of(publisher, 1).state == "retired"
    assert await restored(store, copies) == Restored(3, "memory", 2)
    assert publisher.publish(model(4), activate=False) == 4  # numbers go on
    assert values(version_of(publisher, 3)) == {3.0}  # and its slot was not taken for another version
    assert values(version_of(publisher, 4)) == {4.0}


async def test_versions_that_share_traffic_are_kept_and_a_split_ends_with_one_that_is_lost(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path
) -> None:
    for number in (1, 2, 3):
        publisher.publish(model(number), activate=False)
    commit(1)
    alone = publisher.active()
    assert alone is not None
    divided = replace(alone, split=SplitRecord((ShareRecord(3, 10.0, ("b",), version_of(publisher, 3).fingerprint),)))
    await store.put(KEYS.active, divided.to_json())
    assert await persist_now(store, Disk(copies))
    power_loss(arena_directory)
    assert await restored(store, copies) == Restored(1, "disk", None, (2,))
    assert publisher.active() == divided
    assert (values(version_of(publisher, 1)), values(version_of(publisher, 3))) == ({1.0}, {3.0})
    shutil.rmtree(copies / "3")
    power_loss(arena_directory)
    assert await restored(store, copies) == Restored(1, "disk", None, (3,))
    found = publisher.active()
    assert found is not None
    assert (found.version, found.epoch, found.split) == (1, divided.epoch + 1, None)


async def test_memory_is_believed_only_where_every_byte_is_right(
    publisher: Publisher, commit: Commit, store: Store, copies: Path
) -> None:
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies))
    assert await restored(store, None) == Restored(1, "memory")
    slot = Path(version_of(publisher, 1).slot)
    with SlotReader.open(slot) as reader:
        at = reader.entry("model.norm.weight").offset
    flip(slot, at)
    with pytest.raises(VersionLost) as lost:
        await restored(store, None)
    assert (lost.value.version, lost.value.offer, lost.value.code) == (1, None, "version_lost")
    assert await restored(store, copies) == Restored(1, "disk")
    assert values(version_of(publisher, 1)) == {1.0}
    assert version_of(publisher, 1).slot == str(slot), "a slot whose bytes are wrong is room for the right ones"


@pytest.mark.parametrize("damage", ["byte", "manifest", "gone", "record"])
async def test_a_damaged_copy_is_never_served_and_an_older_one_only_by_decision(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path, damage: str
) -> None:
    for number in (1, 2):
        commit(publisher.publish(model(number), activate=False))
        assert await persist_now(store, Disk(copies))
    power_loss(arena_directory)
    newest = copies / "2"
    if damage == "gone":
        shutil.rmtree(newest)
    else:
        files = {"byte": "model.safetensors", "manifest": "manifest.json", "record": "version.json"}
        raw = bytearray((newest / files[damage]).read_bytes())
        raw[-20] ^= 1
        (newest / files[damage]).write_bytes(raw if damage != "record" else raw[:-20])
    with pytest.raises(VersionLost) as lost:
        await restored(store, copies)
    assert (lost.value.version, lost.value.offer) == (2, 1)
    assert publisher.active().version == 2  # type: ignore[union-attr]
    with pytest.raises(UnknownVersion):
        await restored(store, copies, 7)
    assert await restored(store, copies, 1) == Restored(1, "disk", None, (2,))
    active = publisher.active()
    assert active is not None
    assert (active.version, active.epoch, active.previous) == (1, 3, None)
    assert values(version_of(publisher, 1)) == {1.0}
    entry = (await past_swaps(store, KEYS))[0]
    assert (entry.version, entry.previous, entry.outcome, entry.requested_by) == (1, 2, "done", "restore")
    assert publisher.publish(model(3), activate=False) == 3


async def test_parts_and_differences_are_whole_on_disk_and_shared_parts_take_their_bytes_once(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path
) -> None:
    commit(publisher.publish(model(1), parts={"draft": model(5, layers=1)}, activate=False))
    assert await persist_now(store, Disk(copies))
    base = Disk(copies).nbytes
    commit(publisher.publish(adapter(7), part="lora/math", activate=False))
    assert await persist_now(store, Disk(copies))
    assert Disk(copies).nbytes < base * 1.5
    power_loss(arena_directory)
    assert await restored(store, copies) == Restored(2, "disk", 1)
    first, second = version_of(publisher, 1), version_of(publisher, 2)
    assert (first.slot, first.parts[0].slot) == (second.slot, second.parts[0].slot)
    assert values(first) == {1.0}
    found = {}
    for part in second.parts:
        with SlotReader.open(part.slot, manifest_digest=part.manifest_digest) as reader:
            reader.verify_all()
            name = next(iter(reader.manifest.tensors))
            found[part.name] = float(np.frombuffer(bytes(reader.buffer(name)), reader.entry(name).dtype)[0])
    assert found == {"draft": 5.0, "lora/math": 7.0}
    shutil.rmtree(copies / "1")
    assert Disk(copies).find(second) is not None
    Disk(copies).find(second).verify()  # type: ignore[union-attr]


async def test_a_version_over_the_bound_is_complained_of_and_the_old_copy_stays(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path
) -> None:
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies))
    one = Disk(copies).nbytes
    commit(publisher.publish(model(2), activate=False))
    bound = one + os.stat(version_of(publisher, 2).slot).st_size + 1000
    narrow = Disk(copies, max_bytes=one + 100)
    async with persisting(store, narrow) as persister:
        record = await until_told(store, lambda r: r.wanted == 2)
        assert (record.versions, record.failures, persister.failures) == ((1,), 1, 1)
        assert record.error is not None
        assert record.error.code == "persist_full"
        assert "--max-bytes" in record.error.message
    Disk(copies).find(version_of(publisher, 1)).verify()  # type: ignore[union-attr]
    async with persisting(store, Disk(copies, max_bytes=bound)):
        for number in (2, 3, 4):  # two versions fit: the oldest makes room before the next is written
            if number > 2:
                commit(publisher.publish(model(number), activate=False))
            record = await until_told(store, lambda r, number=number: r.versions == (number - 1, number))  # type: ignore[misc]
            assert (record.error, record.nbytes <= bound) == (None, True)


async def test_the_version_to_go_back_to_makes_room_for_no_other(
    publisher: Publisher, commit: Commit, store: Store, copies: Path
) -> None:
    for number in (1, 2):
        commit(publisher.publish(model(number), activate=False))
        assert await persist_now(store, Disk(copies))
    commit(1)
    commit(publisher.publish(model(3), activate=False))
    needed, made = os.stat(version_of(publisher, 3).slot).st_size, Disk(copies).directory / "1" / "version.json"
    before = made.stat()
    assert await persist_now(store, Disk(copies, max_bytes=needed + Disk(copies).nbytes - 1))
    kept = Disk(copies)
    assert [kept.find(version_of(publisher, number)) is not None for number in (1, 2, 3)] == [True, False, True]
    assert (made.stat().st_ino, made.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)  # not made anew


async def test_a_copy_may_take_the_bound_to_the_last_byte(
    publisher: Publisher, commit: Commit, store: Store, copies: Path
) -> None:
    commit(publisher.publish(model(1), activate=False))
    needed = os.stat(version_of(publisher, 1).slot).st_size
    assert not await persist_now(store, Disk(copies, max_bytes=needed - 1))
    assert await persist_now(store, Disk(copies, max_bytes=needed))


async def test_a_full_disk_breaks_nothing(
    publisher: Publisher, commit: Commit, store: Store, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies))
    commit(publisher.publish(model(2), activate=False))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_piece", full)
    assert not await persist_now(store, Disk(copies))
    with pytest.raises(PersistFull, match="free some"):
        Disk(copies).write(
            version_of(publisher, 2), {"": Path(version_of(publisher, 2).slot)}, [version_of(publisher, 1)]
        )
    monkeypatch.undo()
    Disk(copies).find(version_of(publisher, 1)).verify()  # type: ignore[union-attr]
    assert names(copies) == [".lock", "1"]
    assert await persist_now(store, Disk(copies))


async def test_numbers_of_another_history_are_not_taken_for_ours(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path
) -> None:
    """`--fresh` begins at 1 again, beside what the run before has left on disk."""
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies))
    left = copies / "1"
    raw = (left / "version.json").read_bytes()
    digest = version_of(publisher, 1).manifest_digest
    (left / "version.json").write_bytes(raw.replace(digest.encode(), b"0" * 32))
    assert await persist_now(store, Disk(copies))
    power_loss(arena_directory)
    assert await restored(store, copies) == Restored(1, "disk")


async def test_what_a_killed_writer_has_left_is_no_version(
    publisher: Publisher, commit: Commit, store: Store, arena_directory: Path, copies: Path
) -> None:
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies))
    commit(publisher.publish(model(2), activate=False))
    shutil.copytree(copies / "1", copies / ".new-2")
    (copies / ".new-2" / "version.json").unlink()
    assert [kept.version for kept in Disk(copies).kept()] == [1]
    assert await persist_now(store, Disk(copies))
    assert names(copies) == [".lock", "1", "2"]
    power_loss(arena_directory)
    assert await restored(store, copies) == Restored(2, "disk", 1)


async def test_what_is_not_ours_in_the_directory_is_left_alone(
    publisher: Publisher, commit: Commit, store: Store, copies: Path
) -> None:
    """A trainer names its checkpoints after steps, too."""
    for name in ("3", "1000", "2026-backup", ".git-annex", ".old-trainer"):
        (copies / name).mkdir(parents=True)
        (copies / name / "weights.bin").write_bytes(b"x" * 4096)
    theirs = contents(copies)
    for number in (1, 2, 3):
        commit(publisher.publish(model(number), activate=False))
        assert await persist_now(store, Disk(copies, keep=1, max_bytes=100_000)) is (number < 3)
    record = await told(store)
    assert record is not None
    assert record.error is not None
    assert "3 holds something else" in record.error.message
    assert [kept.version for kept in Disk(copies).kept()] == [1, 2]
    remove_copies(copies)
    assert contents(copies) == theirs


async def test_a_copy_that_somebody_has_put_by_is_theirs(
    publisher: Publisher, commit: Commit, store: Store, copies: Path
) -> None:
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies, keep=1))
    shutil.copytree(copies / "1", copies / "the-good-one")
    theirs = contents(copies / "the-good-one")
    commit(publisher.publish(model(2), activate=False))
    assert await persist_now(store, Disk(copies, keep=1))
    remove_copies(copies)
    assert contents(copies / "the-good-one") == theirs


async def test_what_another_host_has_is_left_to_it_and_else_comes_from_the_disk_here(
    publisher: Publisher, commit: Commit, store: Store, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(publisher.publish(model(1), activate=False))
    assert await persist_now(store, Disk(copies))
    record = version_of(publisher, 1)
    elsewhere = replace(record, slot=f"//far{record.slot}")
    await store.put(KEYS.version(1), elsewhere.to_json())
    copy = CopyRecord("far", elsewhere.slot, record.manifest_digest, 1, "ready", "far:1", 0.0)
    await store.put(KEYS.copy(record.manifest_digest, "far"), copy.to_json())
    monkeypatch.setenv("HOTSWAP_HOST", "near")
    arena = await ensure_arena(store, copies.parent / "near", host="near")
    assert await restore(store, model="demo", directories=[copies], arena=arena) == Restored(1, "memory")
    assert version_of(publisher, 1) == elsewhere
    await store.delete(KEYS.copy(record.manifest_digest, "far"))  # its host has died
    assert await restore(store, model="demo", directories=[copies], arena=arena) == Restored(1, "disk")
    assert version_of(publisher, 1).slot.startswith(f"//near{arena.directory}")
    await store.put(KEYS.copy(record.manifest_digest, "far"), copy.to_json())
    slot = local_path(version_of(publisher, 1).slot, "near")
    assert slot is not None
    with SlotReader.open(slot) as reader:
        at = reader.entry("model.norm.weight").offset
    flip(slot, at)  # what another host has does not make this one's bytes right
    assert await restore(store, model="demo", directories=[copies], arena=arena) == Restored(1, "disk")


async def test_a_copy_under_way_lets_go_of_a_slot_that_a_publisher_needs(
    publisher: Publisher, commit: Commit, store: Store, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = asyncio.Event(), asyncio.Event()
    loop, first, real = asyncio.get_running_loop(), [True], disk.write_piece

    def slowly(*args: object, **kwargs: object) -> None:
        if first.pop() if first else False:
            loop.call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "write_piece", slowly)
    commit(publisher.publish(model(1), activate=False))
    async with persisting(store, Disk(copies)) as persister:
        await asyncio.wait_for(writing.wait(), 10)
        monkeypatch.setattr("weightsync.memory.arena.Arena.free_nbytes", lambda self: 0)
        for number in (2, 3):
            commit(publisher.publish(model(number), activate=False))
        await eventually(lambda: persister._needed == {2, 3})
        go_on.set()
        record = await until_told(store, lambda r: 3 in r.versions)
    assert record.versions == (2, 3)


def test_the_process_finishes_the_active_version_before_it_ends(
    publisher: Publisher, commit: Commit, store_url: str, copies: Path
) -> None:
    commit(publisher.publish(model(1), activate=False))
    command = [sys.executable, "-m", "weightsync.persist", "--store", store_url, "--model", "demo"]
    process = subprocess.Popen([*command, "--dir", str(copies)], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if b"version 1 is on disk" in line:
                break
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == __main__.LOWEST
        commit(publisher.publish(model(2), activate=False))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    assert [kept.version for kept in Disk(copies).kept()] == [1, 2]
