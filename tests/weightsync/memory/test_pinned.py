"""Maps of slots that a device reads without a copy on the way. CUDA's runtime is a list of calls here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightsync.memory import pinned
from weightsync.memory.arena import READ_MAPPINGS
from weightsync.memory.pinned import READ_ONLY, PinnedMap, PinnedMaps

CUDA, PAGE = torch.device("cuda"), mmap.PAGESIZE
CHUNK, PAGES = 2 * PAGE, 5


class Runtime:
    """Takes what it is asked to pin, or refuses it with `status`."""

    status = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.taken: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == READ_ONLY, "the map is for reading alone"
        self.asked.append((address, nbytes))
        self.taken |= set() if self.status else {address}
        return self.status

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
