"""Slots that are read in place: their locks, their maps, and what is no slot. A device reads maps without a copy on the
way; CUDA's runtime is a list of calls here."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.weightsync.codes import refused
from tests.weightsync.tensors import flip
from weightsync import Publisher, Schema, SlotReader
from weightsync.control.records import VersionRecord
from weightsync.errors import ManifestError, SlotBusy
from weightsync.format.manifest import TensorSpec
from weightsync.memory import pinned
from weightsync.memory.arena import READ_MAPPINGS, SlotLock
from weightsync.memory.pinned import READ_ONLY, PinnedMap, PinnedMaps


def open_(record: VersionRecord) -> SlotReader:
    return SlotReader.open(record.slot, manifest_digest=record.manifest_digest, version=record.version)


def free(path: str) -> bool:
    lock = SlotLock.try_exclusive(Path(path))
    if lock is not None:
        lock.release()
    return lock is not None


def test_a_version_is_read_in_place(record: VersionRecord) -> None:
    with open_(record) as reader:
        reader.verify_all(reader.manifest.schema)
        view = reader.buffer("model.norm.weight")
        assert view.readonly
        assert np.frombuffer(view, np.float32).tolist() == [1.0] * 8
        with refused("missing_tensor", match="nothing"):
            reader.buffer("nothing")
        view.release()


def test_a_byte_that_flips_is_found_and_named(record: VersionRecord) -> None:
    with open_(record) as reader:
        entry = reader.entry("model.layers.1.mlp.weight")
        flip(record.slot, entry.offset + 77)
        reader.verify("model.layers.0.mlp.weight")
        with refused("digest_mismatch") as found:
            reader.verify_all()
        assert found.value.tensor == "model.layers.1.mlp.weight"
        assert found.value.expected == entry.digest != found.value.got


def test_another_schema_than_the_engine_has(record: VersionRecord) -> None:
    with open_(record) as reader:
        tensors = dict(reader.manifest.schema.tensors) | {"model.norm.weight": TensorSpec("float32", (9,))}
        with refused("shape_mismatch", match=r"model\.norm\.weight"):
            reader.verify_all(Schema(tensors))


def test_the_lock_lasts_as_long_as_anything_maps_the_slot(record: VersionRecord) -> None:
    assert free(record.slot)
    reader = open_(record)
    array = np.frombuffer(reader.buffer("model.norm.weight"), np.float32)
    assert not free(record.slot)
    reader.close()
    reader.close()
    assert not free(record.slot)
    assert array.sum() == 8.0
    del array, reader
    gc.collect()
    assert free(record.slot)


def test_a_reader_that_is_forgotten_lets_go(record: VersionRecord) -> None:
    reader = open_(record)
    assert not free(record.slot)
    del reader
    gc.collect()
    assert free(record.slot)


def test_another_version_than_the_one_asked_for(record: VersionRecord) -> None:
    with pytest.raises(ManifestError, match="holds version 1, not 2"):
        SlotReader.open(record.slot, version=2)
    with pytest.raises(ManifestError, match="retired and reused"):
        SlotReader.open(record.slot, manifest_digest="0" * 32)
    assert free(record.slot)


def test_a_slot_that_a_writer_has_claimed(record: VersionRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.memory.receiver.LOCK_PATIENCE_S", 0.01)
    writer = SlotLock.try_exclusive(Path(record.slot))
    assert writer is not None
    with pytest.raises(SlotBusy, match="choose a version that is ready"):
        open_(record)
    writer.release()
    open_(record).close()


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 8192, b"HOTSWAP\0" + b"\xff" * 8192])
def test_a_file_that_is_not_a_slot(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "slot"
    path.write_bytes(content)
    with pytest.raises(ManifestError):
        SlotReader.open(path)


def test_a_slot_that_is_cut_off_or_gone(record: VersionRecord) -> None:
    os.truncate(record.slot, os.stat(record.slot).st_size - 4096)
    with pytest.raises(ManifestError, match="outside the slot"):
        open_(record)
    Path(record.slot).unlink()
    with pytest.raises(ManifestError, match="the version is gone"):
        open_(record)


def test_readers_share_a_map_that_is_kept_and_their_lock_is_not(record: VersionRecord) -> None:
    with open_(record) as first, open_(record) as second:
        assert first.manifest == second.manifest
        kept = READ_MAPPINGS.get(first.path, first._fd, populate=False)
    assert free(record.slot)
    with open_(record) as again:
        assert READ_MAPPINGS.get(again.path, again._fd, populate=False) is kept
    assert free(record.slot)


def test_a_kept_map_shows_what_is_written_later(publisher: Publisher, record: VersionRecord) -> None:
    with open_(record):
        pass
    fd = os.open(record.slot, os.O_RDWR)
    with SlotReader.open(record.slot) as reader:
        offset = reader.entry("model.norm.weight").offset
        os.pwrite(fd, np.float32(7).tobytes(), offset)
        assert np.frombuffer(reader.buffer("model.norm.weight"), np.float32)[0] == 7.0
    os.close(fd)


def test_a_view_in_a_forked_child_does_not_unlock_the_parents_slot(record: VersionRecord) -> None:
    gc.freeze()  # the child collects what comes from here on, and not all that the tests have imported
    reader = open_(record)
    child = os.fork()
    if child == 0:
        reader.close()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    gc.unfreeze()
    assert not free(record.slot)
    reader.close()
    assert free(record.slot)


# maps that a device reads ---------------------------------------------------------------------------------------------

CUDA, PAGE = torch.device("cuda"), mmap.PAGESIZE
CHUNK, PAGES = 2 * PAGE, 5


class Status:
    """As torch's `cudaError`: a member of an enumeration in C++ has a number, and is true, the one for success too."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


class Runtime:
    """Takes what it is asked to pin, or refuses it with `status`."""

    status = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.taken: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Status:
        assert flags == READ_ONLY, "the map is for reading alone"
        self.asked.append((address, nbytes))
        self.taken |= set() if self.status else {address}
        return Status(self.status)

    def cudaHostUnregister(self, address: int) -> None:
        self.taken.remove(address)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(pinned, "CHUNK_NBYTES", CHUNK)
    return found


@pytest.fixture
def slot(tmp_path: Path, runtime: Runtime) -> Iterator[Path]:
    path = tmp_path / "slot"
    path.write_bytes(np.random.default_rng(1).bytes(PAGES * PAGE))
    yield path
    path.unlink(missing_ok=True)
    READ_MAPPINGS._forget_deleted()  # with this runtime


def map_of(slot: Path) -> mmap.mmap:
    with slot.open("rb") as file:
        return READ_MAPPINGS.get(slot, file.fileno())


def words_of(mapping: mmap.mmap) -> Any:
    """int16 [rows, 8]."""
    return np.frombuffer(mapping, np.int16).reshape(-1, 8)


def test_chunks_are_pinned_as_they_are_first_read(slot: Path, runtime: Runtime) -> None:
    mapping = map_of(slot)
    words, read = words_of(mapping), PinnedMap(mapping, CUDA)
    start = words.ctypes.data
    rows = PAGE // 16
    for first, last, asked in [
        (rows // 2, rows, [(start, CHUNK)]),
        (rows, 3 * rows, [(start, CHUNK), (start + CHUNK, CHUNK)]),
        (0, PAGES * rows, [(start, CHUNK), (start + CHUNK, CHUNK), (start + 2 * CHUNK, PAGE)]),
    ]:
        target = torch.zeros(last - first, 8, dtype=torch.bfloat16)
        assert read.copy(target, words[first:last])
        assert np.array_equal(target.view(torch.int16).numpy(), words[first:last])
        assert runtime.asked == asked


def test_steps_launch_between_two_chunks(slot: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes no launch while it pins a chunk."""
    took, left = [0.25, 0.0, 0.5], list[float]()
    clock = iter([now for seconds in took for now in (0.0, seconds)])
    monkeypatch.setattr(pinned, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=left.append))
    mapping = map_of(slot)
    words = words_of(mapping)
    assert PinnedMap(mapping, CUDA).copy(torch.zeros(len(words), 8, dtype=torch.int16), words)
    assert left == took


def test_a_copy_does_not_reach_over_what_one_call_has_pinned(
    slot: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, copied = map_of(slot), list[int]()
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, **how: Any) -> torch.Tensor:
        copied.append(source.nbytes)
        return copy(target, source, **how)

    words = words_of(mapping)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    assert PinnedMap(mapping, CUDA).copy(torch.zeros(len(words) - 1, 8, dtype=torch.int16), words[1:])
    assert copied == [CHUNK - 16, CHUNK, PAGE]


def test_what_is_not_one_piece_of_the_map_is_left_to_others(slot: Path, runtime: Runtime) -> None:
    mapping = map_of(slot)
    words, read = words_of(mapping), PinnedMap(mapping, CUDA)
    narrow = torch.zeros(4, 4, dtype=torch.int16)
    assert not read.copy(narrow, words[:4, :4]), "columns"
    assert not read.copy(torch.zeros(4, 16, dtype=torch.int16)[:, ::2], words[:4]), "every other word of the target"
    assert not read.copy(narrow, np.zeros((4, 4), np.int16)), "other memory"
    assert not read.copy(narrow[:0], words[:0, :4]), "nothing"
    assert not runtime.asked


def test_a_refusal_is_final_and_leaves_no_error(slot: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = list[bool]()
    monkeypatch.setattr(pinned, "forget_error", lambda: forgotten.append(True))
    runtime.status = 2
    mapping = map_of(slot)
    words, read = words_of(mapping), PinnedMap(mapping, CUDA)
    target = torch.zeros(words.shape, dtype=torch.int16)
    assert not any(read.copy(target, words) for _ in range(2))
    assert (len(runtime.asked), forgotten) == (1, [True])
    read.release()


def test_a_map_is_unpinned_before_it_is_forgotten(slot: Path, tmp_path: Path, runtime: Runtime) -> None:
    maps, mapping = PinnedMaps(CUDA), map_of(slot)
    words = words_of(mapping)
    assert maps.of(mapping) is maps.of(map_of(slot))
    assert maps.of(mapping).copy(torch.zeros(words.shape, dtype=torch.int16), words)
    assert len(runtime.taken) == len(runtime.asked) == 3
    slot.unlink()
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    map_of(other)
    assert not runtime.taken
    assert not maps._maps


def test_a_slot_that_grew_is_mapped_and_pinned_anew(slot: Path, runtime: Runtime) -> None:
    maps, before = PinnedMaps(CUDA), map_of(slot)
    maps.of(before).copy(torch.zeros(8, 8, dtype=torch.int16), words_of(before)[:8])
    os.truncate(slot, 2 * PAGES * PAGE)
    after = map_of(slot)
    assert not runtime.taken
    assert maps.of(after).copy(torch.zeros(8, 8, dtype=torch.int16), words_of(after)[-8:])
