"""A fingerprint of weights that can be computed from the published bytes and from what the workers really run.

A tensor is seen as rows of 16-bit words w[r, c]: the last dimension is a row, what comes before it are rows (a scalar
or a 1-D tensor is one row; types of 1 byte give one word per element). Its checksum is

    F = sum over r of A[r] * (sum over c of B[c] * w[r, c])   mod 2^32

with fixed pseudo-random odd multipliers, B of 16 and A of 32 bits. A sum over words is linear: the parts that
tensor-parallel ranks hold add up, fusing and packing change nothing, and every part can be summed wherever it lies. A
word that changes always changes F; words that change places change it unless their multipliers happen to be equal
(two columns: 1 in 2^15; whole rows: 1 in 2^31). It guards against faults, not against an adversary: xxh3 digests of
the published bytes stand beside it in the manifest.

The fingerprint of a version is the xxh3_128 of the lines `name:F`, sorted by name.

The inner loops are compiled with numba. Where it is not installed, rows are summed in numpy, with the same results;
packed words, which only an engine has, are not. The products of two int16 words, added as int32, are what `vpmaddwd`
does; with AVX-512 a core sums 60-100 GB/s in its cache, so the sums cost little beside the memory traffic they ride on.
numba is one of vLLM's requirements; its import (0.3 s) and its compiler (1 s, kept on disk where a cache directory is
writable) run once, off the critical path if `warm` is called early.

`is_finite` looks for NaN and infinities as the bytes are read, by two reductions over words that lie in the cache. In
every IEEE format the words of NaN and infinity are the largest of their sign: from `limit` on where the sign bit is
clear, and from `limit` with the sign bit on where it is set. So the largest signed and the largest unsigned word tell.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from weightsync.errors import TensorError, checksum_mismatch
from weightsync.format.dtypes import ITEMSIZE

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
NUMPY_WORDS = 1 << 16
LITTLE = 8 << 20  # bytes
_lock = threading.Lock()
_compiled: dict[str, Callable[..., int]] = {}
_summed = 0  # bytes, by numpy
_wanted = False  # the compiled ones, by somebody who called `warm`


def rows(flat: Array, stride: int, a: Array, b: Array) -> int:
    """sum of a[r] * b[c] * flat[r * stride + c] mod 2^32, as an int of either sign. flat: int16 or uint8 [...]."""
    global _summed
    if not _compiled and not _wanted and _summed + flat.nbytes <= LITTLE:
        _summed += flat.nbytes
        return numpy_rows(flat, stride, a, b)
    return int(_kernels()["rows"](flat, stride, a, b))


def packed(units: Array, a: Array, b: Array) -> int:
    """The same from blocks of rows, [blocks, k, n]; a: [blocks, n].

    int32: the words (2k, 2k+1) of row n; b: [k, 2]. int16: the word k of row n; b: [k].
    """
    return int(_kernels()["packed" if units.itemsize == 4 else "packed_words"](units, a, b))


def pack(flat: Array, stride: int, target: Array, a: Array, b: Array) -> int:
    """Reorder rows into blocks and return the sum of what then lies in `target`, as `packed` does.

    flat: int32 pairs of words, `stride` from row to row; target: int32 [blocks, k, n] pairs, k a multiple of 16, or
    int16 words, k a multiple of 32; n a multiple of 4.
    """
    return int(_kernels()["pack" if target.itemsize == 4 else "pack_words"](flat, stride, target, a, b))


def warm(nbytes: int = sys.maxsize) -> None:
    """Compile on a thread, if so many bytes will be summed; a caller that needs a kernel meanwhile waits for it.

    The import comes first, on this thread: it adds to numpy's modules, and torch's compiler, which walks through them
    when it begins, ends the engine if they change.
    """
    global _wanted
    if not _compiled and nbytes > LITTLE:
        _wanted = True
        _compiler()
        threading.Thread(target=_kernels, name="hotswap-checksums").start()


def _kernels() -> dict[str, Callable[..., int]]:
    """The compiled ones, by name."""
    if not _compiled:
        with _lock:
            if not _compiled:
                compiler = _compiler()
                _compiled.update(compiler.compile_kernels() if compiler is not None else {"rows": numpy_rows})
    return _compiled


def numpy_rows(flat: Array, stride: int, a: Array, b: Array) -> int:
    view = np.lib.stride_tricks.as_strided(flat, (a.size, b.size), (stride * flat.itemsize, flat.itemsize))
    step = max(1, NUMPY_WORDS // b.size)
    wide, total = b.astype(np.int32), 0
    for start in range(0, a.size, step):
        piece = view[start : start + step].astype(np.int32) @ wide
        total += int((piece * a[start : start + step]).sum(dtype=np.int32))
    return total


def _compiler() -> ModuleType | None:
    """The module of the kernels that numba compiles; None where it is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("weightsync.format.checksum_numba")


MASK = 0xFFFFFFFF
CACHED_MULTIPLIERS = 1 << 20
Words = np.ndarray[Any, Any]
Reports = Iterable[Mapping[str, Sequence[Sequence[int]]]]


@dataclass(frozen=True, slots=True)
class Tile:
    """The sum over a rectangle of a tensor of `rows` x `cols` words: rows [row, row_end), columns [col, col_end)."""

    rows: int
    cols: int
    row: int
    row_end: int
    col: int
    col_end: int
    sum: int

    def to_row(self) -> list[int]:
        """As it travels in a worker's report."""
        return [self.rows, self.cols, self.row, self.row_end, self.col, self.col_end, self.sum]

    @property
    def box(self) -> tuple[int, int, int, int]:
        return self.row, self.row_end, self.col, self.col_end


TileSums = dict[str, list[list[int]]]  # by tensor: the `to_row` of each tile, as a worker reports them


def grid(dtype: str, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and 16-bit words per row of a tensor."""
    words = max(1, ITEMSIZE[dtype] // 2)
    return (math.prod(shape[:-1]), shape[-1] * words) if shape else (1, words)


def word_type(dtype: str) -> type[np.int16] | type[np.uint8]:
    """The type that one word of the tensor is read as."""
    return np.uint8 if ITEMSIZE[dtype] == 1 else np.int16


def checksum(data: memoryview | bytes | bytearray, dtype: str, shape: Sequence[int]) -> int:
    """F of a whole tensor from its contiguous bytes."""
    running = Running(dtype, shape)
    running.update(np.frombuffer(data, np.uint8))
    return running.sum


def rectangle(words: Words, row: int = 0, col: int = 0) -> int:
    """The part of F that `words` (int16 or uint8 [rows, cols], rows contiguous) give, from word (row, col) on."""
    if not words.size:
        return 0
    flat, stride = _flat(words)
    a, b = row_multipliers(row, row + words.shape[0]), column_multipliers(col, col + words.shape[1])
    return rows(flat, stride, a, b) & MASK


def packed_rectangle(units: Words, row: int = 0, col: int = 0) -> int:
    """As `rectangle`, from words in blocks of rows: [blocks, units of a row, rows per block].

    A unit is two words of a row (int32: VNNI order) or one (int16).
    """
    blocks, _, block_rows = units.shape
    if not units.size:
        return 0
    a, b = row_multipliers(row, row + blocks * block_rows), _unit_multipliers(units, col)
    return packed(units, a.reshape(blocks, block_rows), b) & MASK


def pack_rectangle(words: Words, target: Words, row: int = 0, col: int = 0) -> int:
    """Write `words` (int16 [rows, cols]) into `target` in blocks of rows, as `packed_rectangle` reads them.

    Returns the part of F that then lies in `target`. Words of a row: a multiple of 32; rows per block: of 4.
    """
    blocks, wide, lanes = target.shape
    cols = wide * target.itemsize // 2
    if cols % 32 or lanes % 4 or words.shape != (blocks * lanes, cols):
        raise ValueError(f"{words.shape} words cannot be packed into {target.shape}")
    if not words.size:
        return 0
    flat, stride = _flat(words, pairs=True)
    a = row_multipliers(row, row + words.shape[0])
    return pack(flat, stride, target, a.reshape(blocks, lanes), _unit_multipliers(target, col)) & MASK


def _unit_multipliers(units: Words, col: int) -> Words:
    wide = units.shape[1]
    if units.itemsize == 2:
        return column_multipliers(col, col + wide)
    return column_multipliers(col, col + 2 * wide).reshape(wide, 2)


def device_rectangle(words: torch.Tensor, row: int = 0, col: int = 0) -> torch.Tensor:
    """As `rectangle` from a torch tensor (int16 or uint8 [rows, cols], any strides) on any device.

    The sum stays there, as an integer []; `int(sum) & MASK` is the part of F. Nothing is waited for. On CUDA it is one
    launch where Triton is installed (checksum_triton.py).
    """
    a = _ROWS.on(words.device, row, row + words.shape[0])
    b = _COLUMNS.on(words.device, col, col + words.shape[1])
    kernel = _triton_kernel(words.device) if words.is_cuda else None
    return (kernel or torch_rectangle)(words, a, b)


def torch_rectangle(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int32 []: the sum of a[r] * b[c] * words[r, c] by torch's operators."""
    import torch

    b = b.int()
    step = max(1, (32 << 20) // max(1, words.shape[1]))  # the products are 32-bit: bound what they take
    total = torch.zeros((), dtype=torch.int32, device=words.device)
    for start in range(0, words.shape[0], step):
        piece = words[start : start + step].int()
        sums = (piece * b).sum(dim=1, dtype=torch.int32)
        total += (sums * a[start : start + step]).sum(dtype=torch.int32)
    return total


@functools.cache
def _triton_kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """The kernel, once it has summed some words as torch does. Triton compiles on the machine: that may fail."""
    if importlib.util.find_spec("triton") is None:
        return None
    import torch

    words = torch.arange(-3000, 3000, device=device).to(torch.int16).view(40, 150)[:, ::2]
    a, b = _ROWS.on(device, 0, 40), _COLUMNS.on(device, 0, 75)
    try:
        from weightsync.format import checksum_triton

        found, expected = (int(f(words, a, b)) & MASK for f in (checksum_triton.rectangle, torch_rectangle))
    except Exception as error:  # of Triton's, of many kinds
        log.warning("Triton does not sum here (%s): torch does, in several launches", error)
        return None
    if found != expected:
        log.warning("Triton's sum is %08x, and torch's %08x: torch sums", found, expected)
        return None
    return checksum_triton.rectangle


class Running:
    """F of one tensor from its bytes as they come, in order and in pieces of whole words."""

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self.sum = 0
        self._type = word_type(dtype)
        self._cols = max(1, grid(dtype, shape)[1])
        self._at = 0

    def update(self, data: memoryview | Words) -> None:
        """Takes up where the piece before it ended: the rest of a row, whole rows, the beginning of a row."""
        words = np.frombuffer(data, self._type)
        while words.size:
            row, col = divmod(self._at, self._cols)
            whole = 0 if col else words.size // self._cols
            taken = words[: whole * self._cols if whole else self._cols - col]
            self.sum = (self.sum + rectangle(taken.reshape(max(1, whole), -1), row, col)) & MASK
            self._at += taken.size
            words = words[taken.size :]


def fingerprint_of(checksums: Mapping[str, int]) -> str:
    """The fingerprint of a version whose tensors have these checksums."""
    lines = "\n".join(f"{name}:{checksums[name]:08x}" for name in sorted(checksums))
    digest: str = xxhash.xxh3_128_hexdigest(lines.encode())
    return digest


def combine(reports: Reports) -> str:
    """The fingerprint from what all tensor-parallel ranks of an instance report: {name: [Tile.to_row(), ...]} each.

    Raises TensorError when two copies of the same part differ (a replicated tensor on two ranks, a tied weight in its
    two places), or when the parts of a tensor do not cover it exactly once. "" without any report.
    """
    parts: dict[str, list[Tile]] = {}
    for report in reports:
        for name, rows in report.items():
            parts.setdefault(name, []).extend(Tile(*row) for row in rows)
    return fingerprint_of({name: add(name, found) for name, found in parts.items()}) if parts else ""


def add(name: str, parts: Iterable[Tile]) -> int:
    """F of a tensor from its parts; copies of a part count once, and one rank may have summed all of what others have
    parts of. Raises as `combine`."""
    boxes: dict[tuple[int, int, int, int], Tile] = {}
    for part in parts:
        if (other := boxes.setdefault(part.box, part)).sum != part.sum:
            raise checksum_mismatch(name, other.sum, part.sum)
    whole = next((p for p in boxes.values() if p.box == (0, p.rows, 0, p.cols)), None)
    if whole is not None and len(boxes) > 1:
        del boxes[whole.box]
        if (found := add(name, boxes.values())) != whole.sum & MASK:
            raise checksum_mismatch(name, whole.sum, found)
        return found
    unique = list(boxes.values())
    area = sum((p.row_end - p.row) * (p.col_end - p.col) for p in unique)
    if area != unique[0].rows * unique[0].cols or _overlap(unique):
        words = unique[0].rows * unique[0].cols
        message = f"the ranks hold {area:,} words of tensor {name!r}, which has {words:,}: restart the instance"
        raise TensorError(message, code="parts_mismatch", tensor=name)
    return sum(p.sum for p in unique) & MASK


def row_multipliers(start: int, stop: int) -> Words:
    """A[start:stop], odd int32."""
    return _ROWS.get(start, stop)


def column_multipliers(start: int, stop: int) -> Words:
    """B[start:stop], odd int16."""
    return _COLUMNS.get(start, stop)


class _Multipliers:
    """A fixed sequence of odd numbers: splitmix64 of the index. Early ones are kept, later ones made each time."""

    def __init__(self, seed: int, kind: type[np.int16] | type[np.int32]) -> None:
        self._seed, self._kind = seed, kind
        self._kept = np.empty(0, kind)
        self._there: dict[torch.device, torch.Tensor] = {}

    def get(self, start: int, stop: int) -> Words:
        if stop > CACHED_MULTIPLIERS:
            return self._make(start, stop)
        if stop > self._kept.size:
            self._kept = self._make(0, max(stop, 1 << 14))
        return self._kept[start:stop]

    def on(self, device: torch.device, start: int, stop: int) -> torch.Tensor:
        """The same on a device, where early ones are kept, too."""
        import torch

        if stop > CACHED_MULTIPLIERS:
            return torch.from_numpy(self._make(start, stop)).to(device, non_blocking=True)
        if device not in self._there:
            self._there[device] = torch.from_numpy(self._make(0, CACHED_MULTIPLIERS)).to(device)
        return self._there[device][start:stop]

    def _make(self, start: int, stop: int) -> Words:
        z = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        high = (z >> np.uint64(64 - 8 * np.dtype(self._kind).itemsize)).astype(
            np.dtype(self._kind).str.replace("i", "u")
        )
        return (high | high.dtype.type(1)).view(self._kind)


_ROWS, _COLUMNS = _Multipliers(0x486F7473, np.int32), _Multipliers(0x77617021, np.int16)


def _flat(words: Words, *, pairs: bool = False) -> tuple[Words, int]:
    """(1-D words or pairs from the first to the last, how many from row to row).

    By address, so that the kernels compile once for what is read-only and what is not.
    """
    itemsize = words.dtype.itemsize
    stride = words.strides[0] // itemsize if words.shape[0] > 1 else words.shape[1]
    if words.shape[1] > 1 and words.strides[1] != itemsize:
        raise ValueError("the words of a row must lie side by side")
    count, address = (words.shape[0] - 1) * stride + words.shape[1], words.ctypes.data
    if pairs:
        if stride % 2 or address % 4:
            raise ValueError("pairs of words must be aligned to 4 bytes")
        return np.frombuffer((ctypes.c_int32 * (count // 2)).from_address(address), np.int32), stride // 2
    kind = ctypes.c_uint8 if itemsize == 1 else ctypes.c_int16
    return np.frombuffer((kind * count).from_address(address), words.dtype), stride


def _overlap(parts: Sequence[Tile]) -> bool:
    return any(_meet(p, q) for i, p in enumerate(parts) for q in parts[i + 1 :])


def _meet(p: Tile, q: Tile) -> bool:
    return p.row < q.row_end and q.row < p.row_end and p.col < q.col_end and q.col < p.col_end


# dtype -> (unsigned word, the first word that is not finite, the same as a signed word)
_LIMITS: dict[str, tuple[type[np.unsignedinteger[Any]], int, type[np.signedinteger[Any]]]] = {
    "float64": (np.uint64, 0x7FF0 << 48, np.int64),
    "float32": (np.uint32, 0x7F80 << 16, np.int32),
    "bfloat16": (np.uint16, 0x7F80, np.int16),
    "float16": (np.uint16, 0x7C00, np.int16),
    "float8_e5m2": (np.uint8, 0x7C, np.int8),
    "float8_e4m3fn": (np.uint8, 0x7F, np.int8),  # it has no infinity
}


def is_finite(data: memoryview | bytes | bytearray, dtype: str) -> bool:
    """Whether no element of the contiguous bytes is NaN or infinite; True for types that have neither."""
    if dtype not in _LIMITS or not len(data):
        return True
    word, limit, signed = _LIMITS[dtype]
    words = np.frombuffer(data, word)
    sign = 1 << (8 * words.itemsize - 1)
    return bool(words.view(signed).max() < limit) and bool(words.max() < limit | sign)
