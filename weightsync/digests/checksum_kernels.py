"""The inner loops of the fingerprint: compiled with numba where it is installed, numpy otherwise. Same results.

The products of two int16 words, added as int32, are what `vpmaddwd` does; with AVX-512 a core sums 60-100 GB/s in its
cache, so the sums cost little beside the memory traffic they ride on. numba is one of vLLM's requirements; its import
(0.3 s) and its compiler (1 s, kept on disk where a cache directory is writable) run once, off the critical path if
`warm` is called early.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NUMPY_WORDS = 1 << 16
LITTLE = 8 << 20  # bytes
_lock = threading.Lock()
_compiled: dict[str, Callable[..., int]] = {}
_summed = 0  # bytes, by numpy
_wanted = False  # the compiled ones, by somebody who called `warm`


def rows(flat: Array, stride: int, a: Array, b: Array) -> int:
    """sum of a[r] * b[c] * flat[r * stride + c] mod 2^32, as an int of either sign. flat: int16 or uint8 [...]."""
    return int(_kernels(flat.nbytes)["rows"](flat, stride, a, b))


def packed(pairs: Array, a: Array, b: Array) -> int:
    """The same from int32 [blocks, k, n], each the words (2k, 2k+1) of row n; a: [blocks, n], b: [k, 2]."""
    return int(_kernels(pairs.nbytes)["packed"](pairs, a, b))


def pack(flat: Array, stride: int, target: Array, a: Array, b: Array) -> int:
    """Reorder rows into VNNI order and return the sum of what then lies in `target`, as `packed` does.

    flat: int32 pairs of words, `stride` from row to row; target: int32 [blocks, k, n], k a multiple of 16, n of 4.
    """
    return int(_kernels(target.nbytes)["pack"](flat, stride, target, a, b))


def warm(nbytes: int = sys.maxsize) -> None:
    """Import and compile on a thread, if so many bytes will be summed; who needs a kernel meanwhile waits for it."""
    global _wanted
    if not _compiled and nbytes > LITTLE:
        _wanted = True
        threading.Thread(target=_kernels, args=(nbytes,), name="hotswap-checksums").start()


def _kernels(nbytes: int) -> dict[str, Callable[..., int]]:
    """Those to sum `nbytes` with."""
    global _summed
    if not _compiled and not _wanted and _summed + nbytes <= LITTLE:
        _summed += nbytes
        return NUMPY
    if not _compiled:
        with _lock:
            if not _compiled:
                _compiled.update(_load())
    return _compiled


def numpy_rows(flat: Array, stride: int, a: Array, b: Array) -> int:
    view = np.lib.stride_tricks.as_strided(flat, (a.size, b.size), (stride * flat.itemsize, flat.itemsize))
    step = max(1, NUMPY_WORDS // b.size)
    wide, total = b.astype(np.int32), 0
    for start in range(0, a.size, step):
        piece = view[start : start + step].astype(np.int32) @ wide
        total += int((piece * a[start : start + step]).sum(dtype=np.int32))
    return total


def numpy_packed(pairs: Array, a: Array, b: Array) -> int:
    low, high = b[:, :1].astype(np.int32), b[:, 1:].astype(np.int32)
    total = 0
    for block, multipliers in zip(pairs, a, strict=True):
        sums = (((block << 16) >> 16) * low + (block >> 16) * high).sum(axis=0, dtype=np.int32)
        total += int((sums * multipliers).sum(dtype=np.int32))
    return total


def numpy_pack(flat: Array, stride: int, target: Array, a: Array, b: Array) -> int:
    blocks, half, lanes = target.shape
    strides = (lanes * stride * 4, 4, stride * 4)
    np.copyto(target, np.lib.stride_tricks.as_strided(flat, (blocks, half, lanes), strides))
    return numpy_packed(target, a, b)


NUMPY: dict[str, Callable[..., int]] = {"rows": numpy_rows, "packed": numpy_packed, "pack": numpy_pack}


def _load() -> dict[str, Callable[..., int]]:
    if importlib.util.find_spec("numba") is None:
        return NUMPY
    from weightsync.digests import checksum_numba

    return checksum_numba.compile_kernels()
