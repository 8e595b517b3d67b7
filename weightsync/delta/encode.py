"""Lossless compressed differences between versions: encode one from two sets of tensors, apply one into a slot.

    for piece in DeltaWriter(header, new, old): send(piece)
    apply_delta(DeltaReader(stream), base_slot, draft)

Both ends stream: what they hold at a time is a few blocks a thread, never the model twice. Each block takes the
smallest form that is worth its time (codec.py), down to its plain bytes, so a delta of everything costs no more
than the full version; `is_worthwhile` says beforehand whether a base helps at all.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash

from weightsync.delta.codec import BLOCK, HEAD, Bytes, Patch, decode_block, encode_block, raw_block
from weightsync.delta.format import Base, DeltaHeader, DeltaReader, RawBlock, blocks_of, end_of
from weightsync.errors import DeltaBaseMismatch, DeltaError, DigestMismatch
from weightsync.manifest import Schema
from weightsync.receiver import SlotReader
from weightsync.sources import FilledTensor

Buffers = Callable[[str], "memoryview | Bytes"]  # the bytes of a tensor, by name
A = TypeVar("A")
B = TypeVar("B")
GROUP = 8  # blocks a task: what handing one to a thread costs is then little beside it
SAMPLES = 16
PAYS_BELOW = 0.9  # of what the full version takes

__all__ = ["Base", "DeltaHeader", "DeltaReader", "DeltaWriter", "apply_delta", "is_worthwhile"]


@dataclass
class DeltaStats:
    """What a writer wrote: bytes, elements changed in SPARSE blocks, blocks of each kind (of `delta_codec`)."""

    nbytes: int = 0
    changed: int = 0
    kinds: Counter[int] = field(default_factory=Counter)


class DeltaWriter:
    """Iterate over it for the bytes of a delta from `base` to `target`, as often as is needed; both must hold still.

    `target` and `base` give the bytes of a tensor by name. Without `header.base` every block is in full, and with
    `compress` off as it lies in memory, which a link of 10 Gbit/s or more carries faster than a core compresses.
    """

    def __init__(
        self,
        header: DeltaHeader,
        target: Buffers,
        base: Buffers | None = None,
        *,
        compress: bool = True,
        threads: int | None = None,
    ) -> None:
        if (header.base is None) != (base is None):
            raise ValueError("a header that names a base, and the base's bytes, go together")
        self.header, self.stats = header, DeltaStats()
        self._target, self._base, self._compress = target, base, compress
        self._threads = threads or min(4, os.cpu_count() or 1)

    def __iter__(self) -> Iterator[bytes]:
        self.stats = DeltaStats()
        hasher = xxhash.xxh3_128()
        for piece in self._pieces():
            hasher.update(piece)
            self.stats.nbytes += len(piece)
            yield piece
        end = end_of(hasher.hexdigest())
        self.stats.nbytes += len(end)
        yield end

    def _pieces(self) -> Iterator[bytes]:
        yield self.header.pack()
        for encoded in _in_order(self._encode, _grouped(blocks_of(self.header)), self._threads):
            for head, _ in encoded:
                kind, _, _, changed, _, _ = HEAD.unpack(head)
                self.stats.kinds[kind] += 1
                self.stats.changed += changed
            yield b"".join([part for block in encoded for part in block])

    def _encode(self, group: list[tuple[str, int, int, int]]) -> list[tuple[bytes, bytes | memoryview]]:
        return [self._encode_one(*block) for block in group]

    def _encode_one(self, name: str, start: int, nbytes: int, itemsize: int) -> tuple[bytes, bytes | memoryview]:
        new = _slice(self._target(name), start, nbytes)
        if self._base is None:
            return encode_block(None, new, itemsize) if self._compress else raw_block(new)
        return encode_block(_slice(self._base(name), start, nbytes), new, itemsize)


def is_worthwhile(header: DeltaHeader, target: Buffers, base: Buffers) -> bool:
    """Whether a delta would be clearly smaller than the full version: a look at a few blocks all over the model."""
    blocks = list(blocks_of(header))
    sample = blocks[:: max(1, len(blocks) // SAMPLES)]
    delta = full = 0
    for name, start, nbytes, itemsize in sample:
        new = _slice(target(name), start, nbytes)
        delta += len(encode_block(_slice(base(name), start, nbytes), new, itemsize)[1])
        full += len(encode_block(None, new, itemsize)[1])
    return delta < PAYS_BELOW * full


class Draftlike(Protocol):
    """The part of a `Draft` that is needed here."""

    def write(self, name: str, tensor: Any) -> str: ...


def apply_delta(reader: DeltaReader, base: SlotReader | None, draft: Draftlike, *, threads: int | None = None) -> None:
    """Write the version that `reader` describes into `draft`, checked to the last byte; commit the draft afterwards.

    Doing it again gives the same bytes. Raises DeltaError, DeltaBaseMismatch, DigestMismatch (the base's bytes are not
    what they were, or the delta's are not), and what `draft.write` raises; the draft must then be aborted.
    """
    header = reader.header
    if header.base is not None:
        require_base(header, base)
    patches = _patches(reader, threads or min(4, os.cpu_count() or 1))
    for name, (spec, digest) in sorted(header.tensors.items()):
        source = None if header.base is None or base is None else base.buffer(name)
        found = draft.write(name, FilledTensor(spec, _filler(patches, source), BLOCK))
        if found != digest:
            raise DigestMismatch(name, digest, found)
    if next(patches, None) is not None:  # also has the end of the file checked
        raise DeltaError("it has more blocks than tensors")


def require_base(header: DeltaHeader, base: SlotReader | None) -> None:
    """Raises DeltaBaseMismatch unless `base` is the version the delta was made against."""
    assert header.base is not None
    wanted = header.base
    if base is None or base.manifest_digest != wanted.manifest_digest:
        raise DeltaBaseMismatch(wanted.version, wanted.manifest_digest, base.manifest_digest if base else None)
    schema: Schema = base.manifest.schema
    if schema.tensors != header.schema.tensors:
        raise DeltaError("its tensors are not those of its base")


def _patches(reader: DeltaReader, threads: int) -> Iterator[tuple[RawBlock, Patch]]:
    for decoded in _in_order(_decode, _grouped(reader.blocks()), threads):
        yield from decoded


def _decode(group: list[RawBlock]) -> list[tuple[RawBlock, Patch]]:
    return [(raw, decode_block(raw.head, raw.body, raw.nbytes, raw.itemsize)) for raw in group]


def _filler(patches: Iterator[tuple[RawBlock, Patch]], base: memoryview | None) -> Callable[[memoryview, int], None]:
    def fill(target: memoryview, start: int) -> None:
        _, patch = next(patches)
        source = None if base is None else _slice(base, start, len(target))
        patch.apply(np.frombuffer(target, np.uint8), source)

    return fill


def _slice(buffer: memoryview | Bytes, start: int, nbytes: int) -> Bytes:
    return np.frombuffer(buffer, np.uint8, nbytes, start)


def _grouped(items: Iterable[A]) -> Iterator[list[A]]:
    iterator = iter(items)
    while group := list(islice(iterator, GROUP)):
        yield group


def _in_order(work: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """`work` over `items` on threads; results in order, a few ahead of whoever takes them."""
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        running: deque[Future[B]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
