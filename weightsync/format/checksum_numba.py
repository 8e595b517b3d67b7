"""The checksum kernels in the part of Python that numba compiles; imported by fingerprint.py alone.

numba widens every integer expression to 64 bits: the `int32` around each step is what makes the products 16-bit ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int16, int32, int64, njit, uint8  # type: ignore[import-untyped]
from numba.extending import register_jitable  # type: ignore[import-untyped]


def rows(flat: Any, stride: Any, a: Any, b: Any) -> Any:
    total = int32(0)
    for r in range(a.size):
        row = flat[r * stride : r * stride + b.size]
        total_row = int32(0)
        for c in range(b.size):
            total_row = int32(total_row + int32(int32(row[c]) * int32(b[c])))
        total = int32(total + int32(total_row * a[r]))
    return total


def packed(pairs: Any, a: Any, b: Any) -> Any:
    lanes = np.zeros(pairs.shape[2], np.int32)
    total = int32(0)
    for block in range(pairs.shape[0]):
        lanes[:] = 0
        whole = pairs.shape[1] // 4
        for k in range(whole):  # four at a time: one load and store of the lanes for eight products
            p0, p1 = pairs[block, 4 * k], pairs[block, 4 * k + 1]
            p2, p3 = pairs[block, 4 * k + 2], pairs[block, 4 * k + 3]
            m = b[4 * k : 4 * k + 4]
            a0, a1, b0, b1 = int32(m[0, 0]), int32(m[0, 1]), int32(m[1, 0]), int32(m[1, 1])
            c0, c1, d0, d1 = int32(m[2, 0]), int32(m[2, 1]), int32(m[3, 0]), int32(m[3, 1])
            for n in range(pairs.shape[2]):
                w, x, y, z = p0[n], p1[n], p2[n], p3[n]
                lanes[n] = int32(
                    lanes[n]
                    + int32(int32(int32(w << 16) >> 16) * a0)
                    + int32(int32(w >> 16) * a1)
                    + int32(int32(int32(x << 16) >> 16) * b0)
                    + int32(int32(x >> 16) * b1)
                    + int32(int32(int32(y << 16) >> 16) * c0)
                    + int32(int32(y >> 16) * c1)
                    + int32(int32(int32(z << 16) >> 16) * d0)
                    + int32(int32(z >> 16) * d1)
                )
        for k in range(4 * whole, pairs.shape[1]):
            for n in range(pairs.shape[2]):
                x = pairs[block, k, n]
                low, high = int32(int32(x << 16) >> 16), int32(x >> 16)
                lanes[n] = int32(lanes[n] + int32(low * int32(b[k, 0])) + int32(high * int32(b[k, 1])))
        for n in range(pairs.shape[2]):
            total = int32(total + int32(lanes[n] * a[block, n]))
    return total


register_jitable(packed)


def _move(flat: Any, stride: Any, row: Any, target: Any) -> None:
    """A block of rows from `row` on, turned: by fours and 16 columns, so that stores share a line."""
    half, lanes = target.shape
    for k in range(0, half, 16):
        for n in range(0, lanes, 4):
            at = (row + n) * stride + k
            row0, row1 = flat[at : at + 16], flat[at + stride : at + stride + 16]
            row2, row3 = flat[at + 2 * stride : at + 2 * stride + 16], flat[at + 3 * stride : at + 3 * stride + 16]
            tile = target[k : k + 16, n : n + 4]
            for i in range(16):
                tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3] = row0[i], row1[i], row2[i], row3[i]


register_jitable(_move)


def pack(flat: Any, stride: Any, target: Any, a: Any, b: Any) -> Any:
    """Reorders a block, then sums what now lies there."""
    total = int32(0)
    lanes = target.shape[2]
    for block in range(target.shape[0]):
        _move(flat, stride, block * lanes, target[block])
        total = int32(total + packed(target[block : block + 1], a[block : block + 1], b))
    return total


def packed_words(words: Any, a: Any, b: Any) -> Any:
    lanes = np.zeros(words.shape[2], np.int32)
    total = int32(0)
    for block in range(words.shape[0]):
        lanes[:] = 0
        whole = words.shape[1] // 4
        for k in range(whole):
            r0, r1 = words[block, 4 * k], words[block, 4 * k + 1]
            r2, r3 = words[block, 4 * k + 2], words[block, 4 * k + 3]
            m = b[4 * k : 4 * k + 4]
            b0, b1, b2, b3 = int32(m[0]), int32(m[1]), int32(m[2]), int32(m[3])
            for n in range(words.shape[2]):
                w, x, y, z = int32(r0[n]), int32(r1[n]), int32(r2[n]), int32(r3[n])
                lanes[n] = int32(lanes[n] + int32(w * b0) + int32(x * b1) + int32(y * b2) + int32(z * b3))
        for k in range(4 * whole, words.shape[1]):
            row, factor = words[block, k], int32(b[k])
            for n in range(words.shape[2]):
                lanes[n] = int32(lanes[n] + int32(int32(row[n]) * factor))
        for n in range(words.shape[2]):
            total = int32(total + int32(lanes[n] * a[block, n]))
    return total


register_jitable(packed_words)


def pack_words(flat: Any, stride: Any, target: Any, a: Any, b: Any) -> Any:
    """As `pack`, by way of a block of pairs: those are moved at once, and then taken apart."""
    total = int32(0)
    half, lanes = target.shape[1] // 2, target.shape[2]
    pairs = np.empty((half, lanes), np.int32)
    for block in range(target.shape[0]):
        _move(flat, stride, block * lanes, pairs)
        for k in range(half):
            row, low, high = pairs[k], target[block, 2 * k], target[block, 2 * k + 1]
            for n in range(lanes):
                low[n] = int16(row[n])
                high[n] = int16(row[n] >> 16)
        total = int32(total + packed_words(target[block : block + 1], a[block : block + 1], b))
    return total


def compile_kernels() -> dict[str, Callable[..., int]]:
    """By name. Without a directory to keep them in they are compiled in each process."""
    try:
        return _compile(cache=True)
    except RuntimeError:
        return _compile(cache=False)


def _compile(*, cache: bool) -> dict[str, Callable[..., int]]:
    kinds = [int32(kind[::1], int64, int32[::1], int16[::1]) for kind in (int16, uint8)]
    sums = int32(int32[:, :, ::1], int32[:, ::1], int16[:, ::1])
    copies = int32(int32[::1], int64, int32[:, :, ::1], int32[:, ::1], int16[:, ::1])
    word_sums = int32(int16[:, :, ::1], int32[:, ::1], int16[::1])
    word_copies = int32(int32[::1], int64, int16[:, :, ::1], int32[:, ::1], int16[::1])
    return {
        "rows": njit(kinds, nogil=True, cache=cache)(rows),
        "packed": njit([sums], nogil=True, cache=cache)(packed),
        "pack": njit([copies], nogil=True, cache=cache)(pack),
        "packed_words": njit([word_sums], nogil=True, cache=cache)(packed_words),
        "pack_words": njit([word_copies], nogil=True, cache=cache)(pack_words),
    }
