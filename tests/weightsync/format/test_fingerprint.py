"""Checksums of words, by every kernel, and the fingerprints made of them; and which words are NaN or infinite."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lacking import unable
from tests.weightsync.codes import refused
from weightsync import Publisher, SlotReader
from weightsync import format as format_package
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
    is_finite,
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
        monkeypatch.setattr(fingerprint, "_compiled", {"rows": fingerprint.numpy_rows})
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
def test_packed_words_have_the_same_sum(kind: type, rows: int, cols: int, block: int) -> None:
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
        with refused("checksum_mismatch", match="'tied'"):
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
        with refused("checksum_mismatch", match="'k'"):
            combine([{"k": [row]} for row in rows] + [{"k": [bad]}])


def test_a_rank_that_has_no_use_for_a_tensor_may_sum_all_of_it() -> None:
    """As ranks of another pipeline stage do, while those of its own have a slice each."""
    w = words(8, 6)
    halves = [rows_of(w[4 * i : 4 * i + 4], row=4 * i, of=(8, 6)) for i in range(2)]
    whole = rows_of(w, of=(8, 6))
    reports = [{"w": [halves[0]]}, {"w": [halves[1]]}, {"w": [whole]}, {"w": [whole]}]
    assert combine(reports) == combine(reversed(reports)) == fingerprint_of({"w": rectangle(w)})
    with refused("checksum_mismatch", match="'w'"):
        combine([*reports[:2], {"w": [[*whole[:-1], whole[-1] ^ 1]]}])
    with refused("parts_mismatch", match="'w'"):
        combine([reports[0], reports[2]])


def test_parts_that_leave_a_gap_or_overlap() -> None:
    def part(row: int, end: int) -> Tile:
        return Tile(8, 2, row, end, 0, 2, 1)

    assert add("w", [part(0, 4), part(4, 8)]) == 2
    for wrong in ([part(0, 4)], [part(0, 4), part(0, 4)], [part(0, 5), part(3, 6)], [part(0, 5), part(3, 8)]):
        with refused("parts_mismatch", match="'w'"):
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
def test_packing_and_summing_in_one_pass(kind: type, rows: int, cols: int, block: int) -> None:
    wide = words(rows, cols + 64)
    w = wide[:, 32 : 32 + cols]  # a row-parallel slice: rows farther apart than they are long
    target = np.zeros_like(packed(w, block, kind))
    assert pack_rectangle(w, target, 7, 32) == rectangle(w, 7, 32)
    assert np.array_equal(target, packed(w, block, kind))


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_rectangle(words(32, 34), np.zeros((1, 17, 32), np.int32))


# Triton's kernel: what it computes, by Triton's interpreter, and that it compiles -------------------------------------

INTERPRET = """
import sys
import numpy as np, torch
from weightsync.format import checksum_triton
given = np.load(sys.argv[1])
for i in range(len(given.files) // 3):
    w, a, b = (torch.from_numpy(given[f"{kind}{i}"]) for kind in "wab")
    apart = w.repeat_interleave(2, dim=1)[:, ::2]  # words that do not lie side by side
    print(*(int(checksum_triton.rectangle(words, a, b)) & 0xFFFFFFFF for words in (w, apart)))
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightsync.format import checksum_triton
names = dict(a="*i32", b="*i16", total="*i64", rows="i32", cols="i32", row_stride="i64", col_stride="i64")
for words in ("*i16", "*u8"):
    sizes = dict(ROWS=checksum_triton.TILE_ROWS, COLS=checksum_triton.TILE_COLS)
    signature = dict(words=words, **names, **dict.fromkeys(sizes, "constexpr"))
    source = ASTSource(checksum_triton._sum_tiles, signature=signature, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print("atom.global" in compiled.asm["ptx"], bool(compiled.asm["cubin"]))
"""


@pytest.fixture
def triton() -> None:
    """Triton decides at its import whether it interprets, so its kernel runs in processes of their own."""
    if importlib.util.find_spec("triton") is None:
        unable("Triton is not installed, as is right on a CPU")


def run(program: str, cache: Path, *arguments: str, **environ: str) -> list[str]:
    """The lines that it prints."""
    command = [sys.executable, "-c", program, *arguments]
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache), **environ}
    return subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_tritons_kernel_sums_as_the_definition(triton: None, tmp_path: Path) -> None:
    """Tiles that are full and not, parts of rows, bytes, nothing at all, and multipliers that are made each time."""
    late = fingerprint.CACHED_MULTIPLIERS
    matrix = words(40, 1100)
    cases = [
        (matrix, 0, 0), (matrix[3:20, 7:-9], 5, 11), (matrix[:, 1::2], 0, 0), (words(1, 5000, 1), 0, 3),
        (words(300, 2, 2), 1, 0), (words(17, 513, 3, np.uint8), late, 2), (words(1, 1, 4), 0, late), (matrix[:0], 0, 0),
        (np.full((33, 600), -32768, np.int16), 0, 0),
    ]  # fmt: skip
    given = {}
    for i, (w, row, col) in enumerate(cases):
        given[f"w{i}"], given[f"a{i}"] = w, row_multipliers(row, row + w.shape[0])
        given[f"b{i}"] = column_multipliers(col, col + w.shape[1])
    np.savez(tmp_path / "given.npz", **given)  # type: ignore[arg-type]
    lines = run(INTERPRET, tmp_path, str(tmp_path / "given.npz"), TRITON_INTERPRET="1")
    expected = [rectangle(np.ascontiguousarray(w), row, col) for w, row, col in cases]
    assert [line.split() for line in lines] == [[str(total)] * 2 for total in expected]


def test_tritons_kernel_compiles_for_a_gpu_that_is_not_there(triton: None, tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path, TRITON_INTERPRET="0") == ["True True"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [np.int16, np.uint8])
def test_on_cuda_tritons_kernel_sums(triton: None, kind: type) -> None:
    assert fingerprint._triton_kernel(torch.device("cuda", 0)) is not None
    w = words(300, 1001, kind=kind)
    total = device_rectangle(torch.from_numpy(w).cuda(), 3, 8)
    assert total.dtype is torch.int64
    assert int(total) & MASK == rectangle(w, 3, 8)


# NaN and infinities ---------------------------------------------------------------------------------------------------

TYPES = ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", TYPES)
def test_every_word_is_judged_as_torch_judges_it(dtype: str) -> None:
    """All words of the narrow types; of the wide ones those around every limit, and many others."""
    kind = getattr(torch, dtype)
    word = WORDS[kind.itemsize]
    if kind.itemsize <= 2:
        words = torch.arange(1 << (8 * kind.itemsize)).to(word)
    else:
        info = torch.iinfo(word)
        edges = [torch.tensor(v, dtype=kind).view(word).item() for v in (torch.inf, -torch.inf, 0.0, -0.0, torch.nan)]
        near = [min(max(edge + step, info.min), info.max) for edge in edges for step in range(-3, 4)]
        words = torch.tensor([*near, info.min, info.max, *range(-100, 100)], dtype=word)
    expected = torch.isfinite(words.view(kind).float() if kind.itemsize == 1 else words.view(kind))
    for one, finite in zip(words, expected.tolist(), strict=True):
        assert is_finite(bits(one.reshape(1)), dtype) == finite, one


@pytest.mark.parametrize("dtype", TYPES)
@given(at=st.integers(0, 999), sign=st.sampled_from([1.0, -1.0]))
def test_one_among_many(dtype: str, at: int, sign: float) -> None:
    values = torch.randn(1000).to(getattr(torch, dtype))
    assert is_finite(bits(values), dtype)
    values[at] = sign * torch.nan
    assert not is_finite(bits(values), dtype)


def test_what_has_neither() -> None:
    assert is_finite(b"\xff" * 64, "int8")
    assert is_finite(b"\xff" * 64, "uint8")
    assert is_finite(b"", "float32")


IMPORTS = """
import sys, threading
seen = []
def hook(event, args):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        seen.append(args[0])
sys.addaudithook(hook)
from weightsync.format import fingerprint
fingerprint.warm()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
assert "numba" in sys.modules
print([name for name in seen if name.split(".")[0] == "numpy"])
"""


def test_warming_up_changes_no_module_of_numpy_on_another_thread() -> None:
    """torch's compiler walks through them when it begins, and an engine that compiles meanwhile would end."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
