from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weightsync import Publisher, SlotReader
from weightsync import format as format_package
from weightsync.errors import ChecksumMismatch, PartsMismatch
from weightsync.format import fingerprint
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.fingerprint import (
    CACHED_MULTIPLIERS,
    MASK,
    Running,
    Tile,
    add,
    checksum,
    column_multipliers,
    combine,
    device_rectangle,
    fingerprint_of,
    grid,
    pack_rectangle,
    packed_rectangle,
    rectangle,
    row_multipliers,
)

Words = np.ndarray[Any, Any]


def words(rows: int, cols: int, seed: int = 0, kind: type = np.int16) -> Words:
    info = np.iinfo(kind)
    return np.random.default_rng(seed).integers(info.min, info.max, (rows, cols), dtype=kind, endpoint=True)


def by_definition(w: Words, row: int = 0, col: int = 0) -> int:
    """Python's own integers."""
    a = [int(x) for x in row_multipliers(row, row + w.shape[0])]
    b = [int(x) for x in column_multipliers(col, col + w.shape[1])]
    return sum(a[r] * sum(b[c] * int(w[r, c]) for c in range(w.shape[1])) for r in range(w.shape[0])) & MASK


def packed(w: np.ndarray[Any, Any], block: int, kind: type = np.int32) -> np.ndarray[Any, Any]:
    """Blocks of rows, with pairs of words (int32) or single ones (int16) of the rows side by side."""
    units = np.ascontiguousarray(w).view(kind)
    return np.ascontiguousarray(units.reshape(-1, block, units.shape[1]).transpose(0, 2, 1))


@pytest.fixture(params=["numba", "numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "numba":
        pytest.importorskip("numba")
        monkeypatch.setattr(fingerprint, "LITTLE", 0)
    else:
        monkeypatch.setattr(fingerprint, "_compiled", dict(fingerprint.NUMPY))
    return name


@pytest.mark.parametrize("kind", [np.int16, np.uint8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (33, 31), (2, 300), (0, 4), (4, 0)])
def test_the_definition(kernels: str, shape: tuple[int, int], kind: type) -> None:
    w = words(*shape, kind=kind)
    assert rectangle(w) == by_definition(w)
    assert rectangle(w, 5, 17) == by_definition(w, 5, 17)


def test_extreme_words(kernels: str) -> None:
    for value in (-32768, 32767, -1):
        w = np.full((40, 70), value, np.int16)
        assert rectangle(w) == by_definition(w)


@pytest.mark.parametrize("kind", [np.int32, np.int16])
@pytest.mark.parametrize(("rows", "cols", "block"), [(32, 64, 32), (64, 10, 32), (16, 32, 16), (96, 2, 32)])
def test_packed_words_have_the_same_sum(kernels: str, kind: type, rows: int, cols: int, block: int) -> None:
    w = words(rows, cols)
    assert packed_rectangle(packed(w, block, kind)) == rectangle(w)
    assert packed_rectangle(packed(w, block, kind), 96, 8) == rectangle(w, 96, 8)


def test_multipliers_are_odd_and_fixed() -> None:
    a, b = row_multipliers(0, 4), column_multipliers(0, 4)
    assert (a.tolist(), b.tolist()) == (PINNED_ROWS, PINNED_COLUMNS)
    many = CACHED_MULTIPLIERS + 5
    assert (row_multipliers(0, many) % 2).all(), "a change of any one word is seen"
    assert (column_multipliers(0, many) % 2).all(), "a change of any one word is seen"
    late = slice(CACHED_MULTIPLIERS - 3, CACHED_MULTIPLIERS + 5)
    assert row_multipliers(late.start, late.stop)[:3].tolist() == row_multipliers(late.start, late.start + 3).tolist()


PINNED_ROWS = [1610791477, 42109469, 705381095, -1522681231]
PINNED_COLUMNS = [-23881, 9439, -11931, 24813]


def test_parts_of_any_cut_add_up(kernels: str) -> None:
    w = words(48, 64)
    whole = rectangle(w)
    for _ in range(20):
        r, c = random.randint(0, 48), random.randint(0, 64)
        quarters = [w[:r, :c], w[:r, c:], w[r:, :c], w[r:, c:]]
        offsets = [(0, 0), (0, c), (r, 0), (r, c)]
        assert sum(rectangle(q, *o) for q, o in zip(quarters, offsets, strict=True)) & MASK == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[::-1],
        lambda w: w[:, ::-1],
        lambda w: np.concatenate([w[16:], w[:16]]),
        lambda w: np.concatenate([w[:, 2:], w[:, :2]], axis=1),
        lambda w: w.T,
    ],
    ids=["rows backwards", "columns backwards", "halves exchanged", "columns moved", "transposed"],
)
def test_words_in_other_places_are_seen(change: Callable[[Words], Words]) -> None:
    w = words(32, 32)
    assert rectangle(np.ascontiguousarray(change(w))) != rectangle(w)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (2, 3, 5), (0, 3)])
def test_every_dtype_and_rank(kernels: str, dtype: str, shape: tuple[int, ...]) -> None:
    rows, cols = grid(dtype, shape)
    kind = np.uint8 if ITEMSIZE[dtype] == 1 else np.int16
    w = words(rows, cols, kind=kind)
    assert checksum(w.tobytes(), dtype, shape) == by_definition(w)


def test_bytes_may_come_in_any_pieces() -> None:
    w = words(10, 12)
    raw = memoryview(w.tobytes())
    for step in (2, 10, 24, 26, 100, 1000):
        running = Running("bfloat16", (10, 12))
        for start in range(0, len(raw), step):
            running.update(raw[start : start + step])
        assert running.sum == rectangle(w), step


def test_the_torch_form_is_the_same() -> None:
    torch = pytest.importorskip("torch")
    for kind in (np.int16, np.uint8):
        w = words(37, 50, kind=kind)
        tensor = torch.from_numpy(w)
        assert int(device_rectangle(tensor, 3, 8)) & MASK == rectangle(w, 3, 8)
        assert int(device_rectangle(tensor[::2, 10:20], 3, 8)) & MASK == by_definition(w[::2, 10:20], 3, 8)


@pytest.mark.parametrize(("what", "taken"), [("right", True), ("wrong", False), ("broken", False)])
def test_a_kernel_of_tritons_is_taken_when_it_sums_as_torch_does(
    what: str, taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is compiled on the machine: one that cannot be, or is wrong there, must not fail every staging."""
    import torch

    def kernel(*given: torch.Tensor) -> torch.Tensor:
        if what == "broken":
            raise RuntimeError("no C compiler")
        return fingerprint.torch_rectangle(*given) + (what == "wrong")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    module = SimpleNamespace(rectangle=kernel)
    monkeypatch.setitem(sys.modules, "weightsync.format.checksum_triton", module)
    monkeypatch.setattr(format_package, "checksum_triton", module, raising=False)
    found = fingerprint._triton_kernel.__wrapped__(torch.device("cpu"))
    assert (found is kernel) == taken
    assert ("torch" in caplog.text) != taken


def rows_of(w: Words, row: int = 0, col: int = 0, *, of: tuple[int, int]) -> list[int]:
    return Tile(*of, row, row + w.shape[0], col, col + w.shape[1], rectangle(w, row, col)).to_row()


def test_ranks_together_report_what_was_published() -> None:
    column, row, norm = words(8, 6, 1), words(4, 12, 2), words(1, 6, 3)
    published = fingerprint_of({"column": rectangle(column), "row": rectangle(row), "norm": rectangle(norm)})
    ranks: list[Mapping[str, list[list[int]]]] = [
        {
            "column": [rows_of(column[4 * i : 4 * i + 4], row=4 * i, of=(8, 6))],
            "row": [rows_of(np.ascontiguousarray(row[:, 6 * i : 6 * i + 6]), col=6 * i, of=(4, 12))],
            "norm": [rows_of(norm, of=(1, 6))],
        }
        for i in range(2)
    ]
    assert combine(ranks) == combine(reversed(ranks)) == published
    alone = {"column": [rows_of(column, of=(8, 6))], "row": [rows_of(row, of=(4, 12))], "norm": ranks[0]["norm"]}
    assert combine([alone]) == published
    assert combine([]) == ""


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (4, 4)])
def test_a_tensor_in_two_places_must_be_the_same_in_both(shape: tuple[int, int]) -> None:
    w = words(*shape)
    good = rows_of(w, of=shape)
    bad = [*good[:-1], good[-1] ^ 1]
    assert combine([{"tied": [good, good]}]) == fingerprint_of({"tied": rectangle(w)})
    for ranks in ([[good, bad]], [[good], [bad]], [[good, good], [good, bad]]):
        with pytest.raises(ChecksumMismatch, match="'tied'"):
            combine([{"tied": rows} for rows in ranks])


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (8, 8)])
def test_copies_of_a_slice_must_be_the_same(shape: tuple[int, int]) -> None:
    """A key-value head that two ranks hold each: of a weight some rows or columns, of a bias a piece of its one row."""
    w = words(*shape)
    pieces = [(w[:4], 0, 0), (w[4:], 4, 0)] if shape[0] > 1 else [(w[:, :4], 0, 0), (w[:, 4:], 0, 4)]
    rows = [rows_of(np.ascontiguousarray(piece), row, col, of=shape) for piece, row, col in pieces]
    assert combine([{"k": [rows[0]]}, {"k": [rows[0]]}, {"k": [rows[1]]}]) == fingerprint_of({"k": rectangle(w)})
    for row in rows:
        bad = [*row[:-1], row[-1] ^ 1]
        with pytest.raises(ChecksumMismatch, match="'k'"):
            combine([{"k": [row]} for row in rows] + [{"k": [bad]}])


def test_a_rank_that_has_no_use_for_a_tensor_may_sum_all_of_it() -> None:
    """As ranks of another pipeline stage do, while those of its own have a slice each."""
    w = words(8, 6)
    halves = [rows_of(w[4 * i : 4 * i + 4], row=4 * i, of=(8, 6)) for i in range(2)]
    whole = rows_of(w, of=(8, 6))
    reports = [{"w": [halves[0]]}, {"w": [halves[1]]}, {"w": [whole]}, {"w": [whole]}]
    assert combine(reports) == combine(reversed(reports)) == fingerprint_of({"w": rectangle(w)})
    with pytest.raises(ChecksumMismatch, match="'w'"):
        combine([*reports[:2], {"w": [[*whole[:-1], whole[-1] ^ 1]]}])
    with pytest.raises(PartsMismatch, match="'w'"):
        combine([reports[0], reports[2]])


def test_parts_that_leave_a_gap_or_overlap() -> None:
    def part(row: int, end: int) -> Tile:
        return Tile(8, 2, row, end, 0, 2, 1)

    assert add("w", [part(0, 4), part(4, 8)]) == 2
    for wrong in ([part(0, 4)], [part(0, 4), part(0, 4)], [part(0, 5), part(3, 6)], [part(0, 5), part(3, 8)]):
        with pytest.raises(PartsMismatch, match="'w'"):
            add("w", wrong)


def test_the_name_counts() -> None:
    assert fingerprint_of({"q": 1, "k": 2}) == fingerprint_of({"k": 2, "q": 1}) != fingerprint_of({"q": 2, "k": 1})


def test_a_published_version_carries_its_fingerprint(publisher: Publisher) -> None:
    tensors = {"a": words(300, 1000), "b": words(1, 5)[0], "c": np.array(3.0)}
    publisher.publish(tensors, activate=False)
    (record,) = publisher.versions()
    expected = {name: checksum(t.tobytes(), str(t.dtype), t.shape) for name, t in tensors.items()}
    assert record.fingerprint == fingerprint_of(expected)
    with SlotReader.open(record.slot) as reader:
        assert {name: e.checksum for name, e in reader.manifest.tensors.items()} == expected
        assert reader.manifest.fingerprint == record.fingerprint


def test_slices_give_the_same_fingerprint(publisher: Publisher) -> None:
    w = words(64, 48)
    publisher.publish({"w": w}, activate=False)
    with publisher.begin([("w", "int16", w.shape)]) as draft:
        draft.write_slice("w", w[:, :20], start=0, dim=1)
        draft.write_slice("w", w[:, 20:], start=20, dim=1)
        draft.commit()
    first, second = publisher.versions()
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("kind", [np.int32, np.int16])
@pytest.mark.parametrize(("rows", "cols", "block"), [(32, 64, 32), (96, 32, 32), (16, 96, 16)])
def test_packing_and_summing_in_one_pass(kernels: str, kind: type, rows: int, cols: int, block: int) -> None:
    wide = words(rows, cols + 64)
    w = wide[:, 32 : 32 + cols]  # a row-parallel slice: rows farther apart than they are long
    target = np.zeros_like(packed(w, block, kind))
    assert pack_rectangle(w, target, 7, 32) == rectangle(w, 7, 32)
    assert np.array_equal(target, packed(w, block, kind))


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_rectangle(words(32, 34), np.zeros((1, 17, 32), np.int32))
