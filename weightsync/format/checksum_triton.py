"""The sum over a rectangle of words (fingerprint.py) as one launch of a Triton kernel.

Each program sums a tile and adds it to the total. Sums mod 2^32 do not depend on the order, so it is always the same.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped]
import triton.language as tl  # type: ignore[import-not-found, import-untyped]

TILE_ROWS, TILE_COLS = 16, 512


@triton.jit(do_not_specialize=["rows", "cols"])  # type: ignore[untyped-decorator]
def _sum_tiles(  # type: ignore[no-untyped-def]
    words,
    a,
    b,
    total,
    rows,
    cols,
    row_stride,
    col_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    across = tl.cdiv(cols, COLS)
    tile = tl.program_id(0)
    r = (tile // across) * ROWS + tl.arange(0, ROWS)
    c = (tile % across) * COLS + tl.arange(0, COLS)
    at = r[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * col_stride
    w = tl.load(words + at, mask=(r[:, None] < rows) & (c[None, :] < cols), other=0).to(tl.int32)
    by_column = tl.load(b + c, mask=c < cols, other=0).to(tl.int32)
    by_row = tl.load(a + r, mask=r < rows, other=0)
    sums = tl.sum(w * by_column[None, :], axis=1).to(tl.int64) & 0xFFFFFFFF  # the products wrap at 32 bits
    tl.atomic_add(total, tl.sum(sums * by_row.to(tl.int64), axis=0) & 0xFFFFFFFF, sem="relaxed")


def rectangle(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int64 []: the sum of a[r] * b[c] * words[r, c], equal to it mod 2^32.

    words: int16 or uint8, any strides; a: int32; b: int16. Nothing is waited for.
    """
    rows, cols = words.shape
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    tiles = triton.cdiv(rows, TILE_ROWS) * triton.cdiv(cols, TILE_COLS)
    if tiles:
        _sum_tiles[(tiles,)](words, a, b, total, rows, cols, *words.stride(), ROWS=TILE_ROWS, COLS=TILE_COLS)
    return total
