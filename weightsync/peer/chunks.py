"""A slot as chunks: what is read at once, checked on arrival and remembered over a restart.

The manifest of a slot tells whether a chunk is right (`Head.parts`). If it has no digests of cut tensors, the holder
tells the digests of the chunks. The first bytes of a slot make it one, so they are written last; such a digest counts
them as if they were there. A `Bitmap` says which chunks a host has.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import orjson
import xxhash

from weightsync.errors import ManifestError, TransferError
from weightsync.format.manifest import (
    CUTS,
    PREAMBLE,
    Cuts,
    Layout,
    Manifest,
    clear_gaps,
    digest_of,
    is_part,
    part_preamble_of,
    parts_of,
    preamble_of,
    read_header,
)

Parts = list[list[tuple[int, int, str]]]
MIN_CHUNK = 4096
MAX_CHUNKS = 1 << 20


@dataclass(frozen=True)
class Shape:
    """The size of what is read, and of its chunks; all holders of it must say the same.

    `digests` are of the chunks; none where the manifest tells.
    """

    nbytes: int
    chunk_nbytes: int
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError: it comes from another host."""
        if self.nbytes <= 0 or self.chunk_nbytes < MIN_CHUNK or self.chunks > MAX_CHUNKS:
            raise ValueError(f"{self.nbytes:,} bytes in chunks of {self.chunk_nbytes:,}")
        if self.digests and len(self.digests) != self.chunks:
            raise ValueError(f"{len(self.digests)} digests for {self.nbytes:,} bytes")

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // self.chunk_nbytes)

    def agrees(self, other: Shape) -> bool:
        """Whether both may be of one slot; a holder need not say digests."""
        sizes = (self.nbytes, self.chunk_nbytes) == (other.nbytes, other.chunk_nbytes)
        return sizes and (self.digests == other.digests or not (self.digests and other.digests))

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First byte, and the byte after the last."""
        start = chunk * self.chunk_nbytes
        return start, min(start + self.chunk_nbytes, self.nbytes)

    def is_right(self, view: memoryview, chunk: int, head: Head | None) -> bool:
        """Whether the bytes of a chunk are those that were published; for now the header of a slot may lack."""
        if self.digests:
            preamble = head.preamble if head is not None else b""
            return chunk_digest(view, *self.bounds(chunk), preamble) == self.digests[chunk]
        assert head is not None, "nobody has said what the bytes should be"
        return all(digest_of(view[start:end]) == digest for start, end, digest in head.parts[chunk])


def chunk_digest(view: memoryview, start: int, end: int, preamble: bytes = b"") -> str:
    """xxh3_128 in hex; releases the interpreter lock."""
    hasher = xxhash.xxh3_128()
    if start == 0:
        hasher.update(preamble)
        start = len(preamble)
    hasher.update(view[start:end])
    digest: str = hasher.hexdigest()
    return digest


def digests_of(view: memoryview, chunk_nbytes: int, pool: Executor) -> tuple[str, ...]:
    """Of every chunk of what lies in `view`."""
    starts = range(0, len(view), chunk_nbytes)
    return tuple(pool.map(lambda start: chunk_digest(view, start, min(start + chunk_nbytes, len(view))), starts))


@dataclass(frozen=True)
class Head:
    """The manifest of a slot that is to be fetched, checked before a byte of it is read.

    `parts` has, by chunk, first byte, byte after the last, and digest of each tensor, or part of one, that lies in it.
    Without a `shape` the manifest does not tell what the bytes of a chunk must be.
    """

    digest: str
    manifest: Manifest
    raw: bytes
    layout: Layout
    shape: Shape | None
    parts: Parts

    @classmethod
    def parse(cls, raw: bytes, digest: str, nbytes: int | None = None) -> Head:
        """Raises ManifestError: it comes from another host."""
        if (found := digest_of(raw)) != digest:
            raise ManifestError(f"a peer sent a manifest with digest {found} for {digest}: read from another host")
        manifest = Manifest.from_json(raw)
        layout = Layout.of(manifest.schema)
        if nbytes is not None and layout.total_nbytes != nbytes:
            raise ManifestError(f"a peer says that {digest} has {nbytes:,} bytes, it has {layout.total_nbytes:,}")
        for name, entry in manifest.tensors.items():
            if entry.offset != layout.offsets[name] or entry.nbytes != entry.spec.nbytes:
                raise ManifestError(
                    f"tensor {name!r} of {digest} lies elsewhere than its schema says: publish it again"
                )
        shape = shape_of(raw, layout.total_nbytes)
        return cls(digest, manifest, raw, layout, shape, _parts(manifest, shape) if shape is not None else [])

    @property
    def preamble(self) -> bytes:
        """The first bytes of the slot, PREAMBLE of them."""
        return preamble_of(self.raw, self.digest).ljust(PREAMBLE, b"\0")

    def write(self, view: memoryview, *, part: bool = False) -> None:
        """Make the file in `view`, which has the tensors, the slot; the first bytes last. `part`: it has some chunks of
        them, and is no slot, but can be opened as a part of one."""
        clear_gaps(view, self.manifest.schema, self.layout)
        end = PREAMBLE + len(self.raw)
        view[PREAMBLE:end] = self.raw
        view[end : self.layout.header_nbytes] = bytes(self.layout.header_nbytes - end)
        view[:PREAMBLE] = part_preamble_of(self.raw, self.digest) if part else self.preamble

    @classmethod
    def of_part(cls, view: memoryview, digest: str) -> Head | None:
        """Of the file in `view`, if it has a part of the slot `digest`."""
        try:
            if not is_part(view) or read_header(view, "", part=True)[1] != digest:
                return None
            length = struct.unpack_from("<8sII", view)[2]
            return cls.parse(bytes(view[PREAMBLE : PREAMBLE + length]), digest, len(view))
        except ManifestError:
            return None

    def wrong_tensors(self, view: memoryview, pool: Executor) -> Sequence[str]:
        """Names of the tensors in the slot `view` whose bytes are not those that were published."""

        def is_wrong(name: str) -> bool:
            entry = self.manifest.tensors[name]
            return digest_of(view[entry.offset : entry.offset + entry.nbytes]) != entry.digest

        names = list(self.manifest.tensors)
        return [name for name, wrong in zip(names, pool.map(is_wrong, names), strict=True) if wrong]


def _parts(manifest: Manifest, shape: Shape) -> Parts:
    """Raises ManifestError."""
    found: Parts = [[] for _ in range(shape.chunks)]
    for name, parts in parts_of(manifest).items():
        offset = manifest.tensors[name].offset
        for start, end, digest in parts:
            chunk = min((offset + start) // shape.chunk_nbytes, shape.chunks - 1)
            found[chunk].append((offset + start, offset + end, digest))
    return found


def shape_of(raw: bytes, nbytes: int) -> Shape | None:
    """The chunks of a slot of `nbytes` as its raw manifest has them. None: it has no digests of cut tensors.

    Raises ManifestError.
    """
    try:
        text = orjson.loads(raw)["metadata"].get(CUTS)
        return Shape(nbytes, Cuts.from_text(text).chunk_nbytes) if text is not None else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestError(f"not a manifest ({error}): publish the version again") from error


def manifest_of(view: memoryview, digest: str) -> bytes:
    """The raw manifest of the slot in `view`. Raises ManifestError unless it has `digest`."""
    try:
        _, _, length, found = struct.unpack_from("<8sII32s", view)
        raw = bytes(view[PREAMBLE : PREAMBLE + length])
    except struct.error as error:
        raise ManifestError(f"{digest} is not in its slot any more: ask another host") from error
    if found != digest.encode() or digest_of(raw) != digest:
        raise ManifestError(f"{digest} is not in its slot any more: ask another host")
    return raw


def bad_bitmap(problem: str) -> TransferError:
    """A peer sent no list of chunks, or one of a slot of another size; do not read from that peer."""
    message = f"a peer's list of chunks cannot be used: {problem}. Does it run the same release?"
    return TransferError(message, code="bad_bitmap")


class Bitmap:
    """A set of chunk numbers below `chunks`, one bit each, in one integer: whole sets are joined in microseconds.

    Change it from one thread; another may read `bits`, which is replaced and never altered.
    """

    __slots__ = ("bits", "chunks")

    def __init__(self, chunks: int, bits: int = 0) -> None:
        assert bits >> chunks == 0, "chunk out of range"
        self.chunks = chunks
        self.bits = bits

    @classmethod
    def full(cls, chunks: int) -> Bitmap:
        return cls(chunks, (1 << chunks) - 1)

    def add(self, chunk: int) -> None:
        assert 0 <= chunk < self.chunks, "chunk out of range"
        self.bits |= 1 << chunk

    def discard(self, chunk: int) -> None:
        self.bits &= ~(1 << chunk)

    @property
    def complete(self) -> bool:
        return self.bits == (1 << self.chunks) - 1

    def missing(self) -> Iterator[int]:
        """The chunks that are not in the set, in ascending order."""
        return iter(Bitmap(self.chunks, self.bits ^ ((1 << self.chunks) - 1)))

    def encoded(self) -> str:
        """Base64; bit `n % 8` of byte `n // 8` is chunk `n`."""
        return base64.b64encode(self.bits.to_bytes(-(-self.chunks // 8), "little")).decode()

    @classmethod
    def decoded(cls, text: str, chunks: int) -> Bitmap:
        """Raises TransferError, unless `text` is just what `encoded` makes of a set below `chunks`."""
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise bad_bitmap(f"not base64 ({error})") from error
        bits = int.from_bytes(raw, "little")
        if len(raw) != -(-chunks // 8) or bits >> chunks:
            raise bad_bitmap(f"{len(raw)} bytes do not stand for {chunks} chunks")
        return cls(chunks, bits)

    def __contains__(self, chunk: int) -> bool:
        return self.bits >> chunk & 1 == 1

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __iter__(self) -> Iterator[int]:
        return (chunk for chunk, bit in enumerate(reversed(f"{self.bits:b}")) if bit == "1")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bitmap) and (self.chunks, self.bits) == (other.chunks, other.bits)

    def __repr__(self) -> str:
        return f"Bitmap({len(self)} of {self.chunks})"

    __hash__ = None  # type: ignore[assignment]  # it changes
