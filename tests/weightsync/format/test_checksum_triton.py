"""Triton's checksum kernel without a GPU: what it computes by Triton's interpreter, and that it compiles for one.

Triton is no requirement on CPUs, because vLLM behaves otherwise where it is there. The kernel runs in a process of its
own: Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lacking import unable
from tests.weightsync.format.test_fingerprint import words
from weightsync.format import fingerprint
from weightsync.format.fingerprint import MASK, column_multipliers, device_rectangle, rectangle, row_multipliers

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


@pytest.fixture(autouse=True)
def triton() -> None:
    if importlib.util.find_spec("triton") is None:
        unable("Triton is not installed, as is right on a CPU")


def run(program: str, cache: Path, *arguments: str, **environ: str) -> list[str]:
    """The lines that it prints."""
    command = [sys.executable, "-c", program, *arguments]
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache), **environ}
    return subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_it_sums_as_the_definition(tmp_path: Path) -> None:
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


def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path, TRITON_INTERPRET="0") == ["True True"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [np.int16, np.uint8])
def test_on_cuda_it_is_what_sums(kind: type) -> None:
    assert fingerprint._triton_kernel(torch.device("cuda", 0)) is not None
    w = words(300, 1001, kind=kind)
    total = device_rectangle(torch.from_numpy(w).cuda(), 3, 8)
    assert total.dtype is torch.int64
    assert int(total) & MASK == rectangle(w, 3, 8)
