"""Differences between versions as they travel between hosts: made once where a version was published, passed on."""

from __future__ import annotations

import contextlib
import io
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from weightsync.delta.encode import DeltaWriter, apply_delta, is_worthwhile
from weightsync.delta.format import Base, DeltaHeader, DeltaReader
from weightsync.errors import DigestMismatch, ManifestError
from weightsync.peer.chunks import Head, Shape, digests_of
from weightsync.peer.copies import pieces
from weightsync.peer.holdings import Copy
from weightsync.peer.messages import Key
from weightsync.peer.shelf import Shelf
from weightsync.receiver import SlotReader
from weightsync.records import CopyRecord, PartRecord, VersionRecord
from weightsync.slot import clear_gaps
from weightsync.sources import copy_sums


def base_for(
    part: PartRecord, versions: Iterable[VersionRecord], shelf: Shelf, others: Iterable[CopyRecord]
) -> PartRecord | None:
    """What to make a delta of `part` from: the part of before, if it was published here and other hosts have it."""
    held = {copy.digest for copy in others if copy.state == "ready"}
    earlier = [p for v in versions for p in pieces(v) if p.name == part.name and p.version < part.version]
    able = [p for p in earlier if p.manifest_digest in held and Key(p.manifest_digest) in shelf.published]
    return max(able, key=lambda p: p.version, default=None)


def make(shelf: Shelf, part: PartRecord, base: PartRecord, chunk_nbytes: int, pool: Executor) -> bool:
    """Put the delta of `part` from `base` on the shelf; False where it does not pay, or there is little room.

    Raises ManifestError, SlotBusy (one of them was reused), ArenaError, OSError.
    """
    key = Key(part.manifest_digest, base.manifest_digest)
    with _opened(shelf, part) as new, _opened(shelf, base) as old:
        if new.manifest.schema.tensors != old.manifest.schema.tensors:
            return False
        rows = {name: (entry.spec, entry.digest) for name, entry in new.manifest.tensors.items()}
        header = DeltaHeader(shelf.model, rows, Base(base.version, base.manifest_digest))
        if shelf.arena.free_nbytes() < 3 * new.nbytes:  # twice for the difference, and a publisher needs its next slot
            return False
        if not is_worthwhile(header, new.buffer, old.buffer):
            return False
        with tempfile.TemporaryFile(dir=shelf.arena.directory) as file:
            for piece in DeltaWriter(header, new.buffer, old.buffer):
                file.write(piece)
            copy = _shelved(shelf, key, part.name, file, chunk_nbytes, pool)
    copy.whole = True
    return True


def apply(delta: Copy, base: Path, slot: Copy, head: Head) -> None:
    """Write the slot that `delta` leads to, from `base`, into `slot`; its header comes last.

    Raises DeltaError, DigestMismatch, ManifestError, SlotBusy.
    """
    target = _Target(slot.mapped.view, head)
    stream = io.BufferedReader(_Bytes(delta.mapped.view))
    with SlotReader.open(base, manifest_digest=delta.key.delta_of, populate=False) as old:
        apply_delta(DeltaReader(stream), old, target)
    if target.written != head.manifest.tensors.keys():
        missing = min(head.manifest.tensors.keys() - target.written)
        raise DigestMismatch(missing, head.manifest.tensors[missing].digest, "nothing")
    clear_gaps(slot.mapped.view, head.manifest.schema, head.layout)
    head.write(slot.mapped.view)
    slot.whole = True


class _Target:
    """The draft that a delta is applied to: checked against the manifest that was asked for."""

    def __init__(self, view: memoryview, head: Head) -> None:
        self._view, self._head = view, head
        self.written: set[str] = set()

    def write(self, name: str, tensor: Any) -> str:
        """Raises DigestMismatch."""
        entry = self._head.manifest.tensors.get(name)
        if entry is None or entry.spec != tensor.spec:
            raise DigestMismatch(name, "none" if entry is None else entry.digest, "another tensor's")
        found = copy_sums(self._view[entry.offset : entry.offset + entry.nbytes], tensor, entry.spec).digest
        if found != entry.digest:
            raise DigestMismatch(name, entry.digest, found)
        self.written.add(name)
        return found


class _Bytes(io.RawIOBase):
    """A view as a stream, read without copying it first."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._view[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


@contextlib.contextmanager
def _opened(shelf: Shelf, part: PartRecord) -> Iterator[SlotReader]:
    found = shelf.published.get(Key(part.manifest_digest))
    if found is None:
        raise ManifestError(f"{part.manifest_digest} was retired meanwhile")
    with SlotReader.open(found.path, manifest_digest=part.manifest_digest, populate=False) as reader:
        yield reader


def _shelved(shelf: Shelf, key: Key, part: str, file: Any, chunk_nbytes: int, pool: Executor) -> Copy:
    """The file in a slot of the shelf."""
    nbytes = file.tell()
    file.flush()
    with mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
        shape = Shape(nbytes, chunk_nbytes, digests_of(view, chunk_nbytes, pool))
        copy, _ = shelf.claim(key, part, shape, None)
        copy.mapped.view[:] = view
    return copy
