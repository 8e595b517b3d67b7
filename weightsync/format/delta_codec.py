"""One block of a tensor against the same block of a base version: found, packed and patched with numpy, off the GIL.

Elements are taken as unsigned words of their size, so every dtype and every NaN payload survives. A changed element is
sent as the difference of the words, folded so that small steps up or down become small numbers; the numbers are cut
into byte planes, and each plane is stored as it is, compressed, or, when it is all zeros, left out.

    SAME    nothing changed
    SPARSE  gaps between changed elements, and their differences
    DENSE   the difference of every element
    FULL    every element, in byte planes
    RAW     every element, as it lies in memory
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from weightsync.errors import delta_error

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

BLOCK: Final = 512 << 10  # bytes: base, target and scratch fit the second-level cache together
SAME, SPARSE, DENSE, FULL, RAW = range(5)
NEEDS_BASE = (SAME, SPARSE, DENSE)
LEVEL = 1
SPARSE_BELOW = 0.25  # of the elements; above it a difference for every element costs no more than gaps
LISTED_AT_ONCE = 16  # one in so many changed: then looking at eight elements at a time gains nothing
SAMPLE = 16 << 10
WORTH = 0.95  # compressed to less than this share, or stored as it is
STORED, ZSTD, ZEROS = range(3)
WORD: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
HEAD = struct.Struct("<BBHIII")  # kind, bytes per gap, 0, changed elements, bytes of gaps, bytes that follow
_STREAM = struct.Struct("<I")  # 2 bits how, 30 bits stored bytes


class _Tools(threading.local):
    """Compressors are not shared by threads."""

    def __init__(self) -> None:
        self.pack = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        self.unpack = zstandard.ZstdDecompressor()
        self.differs = np.empty(BLOCK, np.bool_)


_tools = _Tools()


@dataclass(frozen=True, slots=True)
class BlockHead:
    """The head of a block. `nbytes` follow it."""

    kind: int
    gap_size: int
    changed: int
    gaps_nbytes: int
    nbytes: int

    @classmethod
    def parse(cls, raw: bytes | memoryview, block_nbytes: int, itemsize: int) -> BlockHead:
        """Raises PublishError for what no writer writes; so a reader never allocates more than a few blocks."""
        kind, gap_size, zero, changed, gaps_nbytes, nbytes = HEAD.unpack(raw)
        elements = block_nbytes // itemsize
        sparse = kind == SPARSE
        if kind > RAW or zero or nbytes > block_nbytes + 64:
            raise delta_error(f"a block of kind {kind} claims {nbytes:,} bytes for {block_nbytes:,}")
        if sparse and not (gap_size in (1, 2) and 0 < changed <= elements):
            raise delta_error(f"a block claims {changed:,} changes of {elements:,} elements, {gap_size} bytes a gap")
        most = gap_size * (changed + elements // (255 if gap_size == 1 else 65535) + 1) if sparse else 0
        if gaps_nbytes > most or (gaps_nbytes % gap_size if sparse else gap_size or changed):
            raise delta_error(f"a block claims {gaps_nbytes:,} bytes of gaps")
        if (kind == SAME and nbytes) or (kind == RAW and nbytes != block_nbytes):
            raise delta_error(f"a block of kind {kind} claims {nbytes:,} bytes")
        return cls(kind, gap_size, changed, gaps_nbytes, nbytes)

    @property
    def needs_base(self) -> bool:
        return self.kind in NEEDS_BASE


def encode_block(base: Bytes | None, new: Bytes, itemsize: int) -> tuple[bytes, bytes | memoryview]:
    """Head and body of `new` (uint8 [nbytes]) in the smallest form worth its time; `base`, if any, is as long."""
    best: tuple[bytes, bytes | memoryview] | None = None
    if base is not None:
        places, changed = _changes(base, new, itemsize)
        if changed == 0:
            return HEAD.pack(SAME, 0, 0, 0, 0, 0), b""
        best = _dense(base, new, itemsize) if places is None else _sparse(base, new, places, itemsize)
        if len(best[1]) < len(new) // 2:
            return best
    full = _pack_streams(_split(new.view(WORD[itemsize]), itemsize))
    if best is None or len(full) < len(best[1]):
        best = HEAD.pack(FULL, 0, 0, 0, 0, len(full)), full
    if len(best[1]) >= len(new) * WORTH:
        best = raw_block(new)
    return best


def raw_block(new: Bytes) -> tuple[bytes, memoryview]:
    """Head and body of a block as it lies in memory."""
    return HEAD.pack(RAW, 0, 0, 0, 0, len(new)), new.data


def _changes(base: Bytes, new: Bytes, itemsize: int) -> tuple[npt.NDArray[np.int64] | None, int]:
    """Positions of the changed elements (None when there are too many to list), and how many there are."""
    word = WORD[itemsize]
    elements = len(new) // itemsize
    differs = np.not_equal(base.view(word), new.view(word), out=_tools.differs[:elements])
    changed = int(np.count_nonzero(differs))
    if changed > SPARSE_BELOW * elements:
        return None, changed
    if changed > elements // LISTED_AT_ONCE or elements % 8:
        return np.flatnonzero(differs), changed
    octets = np.flatnonzero(differs.view(np.uint64))  # eight elements a step while most are equal
    inside = np.flatnonzero(differs.reshape(-1, 8)[octets])
    return (octets[inside >> 3] << 3) + (inside & 7), changed


def _dense(base: Bytes, new: Bytes, itemsize: int) -> tuple[bytes, bytes]:
    word = WORD[itemsize]
    body = _pack_streams(_split(_fold(new.view(word) - base.view(word)), itemsize))
    return HEAD.pack(DENSE, 0, 0, 0, 0, len(body)), body


def _sparse(base: Bytes, new: Bytes, places: npt.NDArray[np.int64], itemsize: int) -> tuple[bytes, bytes]:
    word = WORD[itemsize]
    differences = _fold(new.view(word)[places] - base.view(word)[places])
    gap_size = 1 if len(places) * 128 * itemsize > len(new) else 2
    gaps = _pack_gaps(places, gap_size)
    body = _pack_streams([*_split(gaps, gap_size), *_split(differences, itemsize)])
    return HEAD.pack(SPARSE, gap_size, 0, len(places), gaps.nbytes, len(body)), body


def _pack_gaps(places: npt.NDArray[np.int64], gap_size: int) -> Words:
    """Elements skipped before each change; the largest number means as many skipped, and no change yet."""
    most = 255 if gap_size == 1 else 65535
    gaps = np.diff(places, prepend=-1) - 1
    skips, rest = gaps // most, gaps % most
    numbers = np.full(len(gaps) + int(skips.sum()), most, WORD[gap_size])
    numbers[np.cumsum(skips + 1) - 1] = rest
    return numbers


def _unpack_gaps(numbers: Words, changed: int, elements: int) -> npt.NDArray[np.int64]:
    most = np.iinfo(numbers.dtype).max
    ends = np.flatnonzero(numbers != most)
    if len(ends) != changed or ends[-1] != len(numbers) - 1:
        raise delta_error("a block lists another number of changes than it claims")
    places = np.cumsum(numbers, dtype=np.int64)[ends] + np.arange(changed)
    if places[-1] >= elements:
        raise delta_error("a block changes elements outside of itself")
    return places


def _fold(difference: Words) -> Words:
    """0, -1, 1, -2, ... (modulo the word) as 0, 1, 2, 3, ..."""
    itemsize = difference.dtype.itemsize
    sign = (difference.view(SIGNED[itemsize]) >> (8 * itemsize - 1)).view(WORD[itemsize])
    folded: Words = (difference << 1) ^ sign
    return folded


def _unfold(folded: Words) -> Words:
    unfolded: Words = (folded >> 1) ^ (~(folded & 1) + 1)
    return unfolded


def _split(words: Words, itemsize: int) -> list[Bytes]:
    """Byte planes, lowest first."""
    if itemsize == 1:
        return [words.view(np.uint8)]
    table = np.ascontiguousarray(words).view(np.uint8).reshape(-1, itemsize)
    return [np.ascontiguousarray(table[:, plane]) for plane in range(itemsize)]


def _join(planes: Sequence[Bytes], itemsize: int) -> Words:
    if itemsize == 1:
        return planes[0]
    table = np.empty((len(planes[0]), itemsize), np.uint8)
    for plane, column in enumerate(planes):
        table[:, plane] = column
    return table.reshape(-1).view(WORD[itemsize])


def _pack_streams(planes: Sequence[Bytes]) -> bytes:
    """A table of how and how long, then the streams."""
    table, streams = [], []
    for plane in planes:
        how, data = _pack(plane)
        table.append(_STREAM.pack(how << 30 | len(data)))
        streams.append(data)
    return b"".join([*table, *streams])


def _pack(plane: Bytes) -> tuple[int, bytes | memoryview]:
    if not plane.any():
        return ZEROS, b""
    if len(plane) > 2 * SAMPLE and len(_tools.pack.compress(plane[:SAMPLE].data)) > WORTH * SAMPLE:
        return STORED, plane.data
    packed: bytes = _tools.pack.compress(plane.data)
    return (ZSTD, packed) if len(packed) < len(plane) else (STORED, plane.data)


def _unpack(how: int, data: memoryview, nbytes: int) -> Bytes:
    """Raises PublishError. The size that a compressed stream states is compared before anything is allocated."""
    if how == ZEROS and not data:
        return np.zeros(nbytes, np.uint8)
    if how == STORED and len(data) == nbytes:
        return np.frombuffer(data, np.uint8)
    if how != ZSTD:
        raise delta_error(f"a stream of {nbytes:,} bytes has {len(data):,}")
    try:
        if (size := zstandard.frame_content_size(data)) != nbytes:
            raise delta_error(f"a stream unpacks to {size:,}, not {nbytes:,} bytes")
        return np.frombuffer(_tools.unpack.decompress(data, max_output_size=nbytes, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise delta_error(f"a stream cannot be unpacked ({error})") from error


def _unpack_streams(body: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    start = _STREAM.size * len(sizes)
    if len(body) < start:
        raise delta_error("a block is too short for its streams")
    planes = []
    for number, nbytes in enumerate(sizes):
        (entry,) = _STREAM.unpack_from(body, _STREAM.size * number)
        end = start + (entry & (1 << 30) - 1)
        if end > len(body):
            raise delta_error("a stream reaches beyond its block")
        planes.append(_unpack(entry >> 30, body[start:end], nbytes))
        start = end
    if start != len(body):
        raise delta_error("a block has bytes that belong to no stream")
    return planes


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded block: what turns the base's bytes into the target's. `places` is None when every element is meant."""

    kind: int
    places: npt.NDArray[np.int64] | None
    words: Words

    def apply(self, target: Bytes, base: Bytes | None) -> None:
        """Write the block to `target` (uint8 [nbytes]); it may be `base` itself only if it is applied just once."""
        if self.kind in (FULL, RAW):
            target[:] = self.words.view(np.uint8)
            return
        assert base is not None
        if self.kind == DENSE:
            np.add(base.view(self.words.dtype), self.words, out=target.view(self.words.dtype))
            return
        np.copyto(target, base)
        if self.places is not None:
            target.view(self.words.dtype)[self.places] += self.words


NOTHING = Patch(SAME, None, np.empty(0, np.uint8))


def decode_block(head: BlockHead, body: memoryview, block_nbytes: int, itemsize: int) -> Patch:
    """The costly half of applying a block, which needs no base. Raises PublishError."""
    if head.kind == SAME:
        return NOTHING
    if head.kind == RAW:
        return Patch(RAW, None, np.frombuffer(body, np.uint8))
    elements = block_nbytes // itemsize
    if head.kind != SPARSE:
        words = _join(_unpack_streams(body, [elements] * itemsize), itemsize)
        return Patch(head.kind, None, _unfold(words) if head.kind == DENSE else words)
    gap_sizes = [head.gaps_nbytes // head.gap_size] * head.gap_size
    planes = _unpack_streams(body, gap_sizes + [head.changed] * itemsize)
    places = _unpack_gaps(_join(planes[: head.gap_size], head.gap_size), head.changed, elements)
    return Patch(SPARSE, places, _unfold(_join(planes[head.gap_size :], itemsize)))
