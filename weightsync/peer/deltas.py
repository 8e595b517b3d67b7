"""Differences between versions as they travel between hosts, and whether one is worth making or reading.

The host where a version was published makes the difference once; the others pass it on.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsync.control.records import CopyRecord, PartRecord, VersionRecord
from weightsync.errors import DigestMismatch, ManifestError
from weightsync.format.delta import Base, DeltaHeader, DeltaReader, DeltaWriter, apply_delta, is_worthwhile
from weightsync.memory.receiver import SlotReader
from weightsync.peer.chunks import Head, Shape, digests_of
from weightsync.peer.copies import all_parts
from weightsync.peer.messages import Key
from weightsync.peer.settings import Deltas
from weightsync.peer.shelf import Copy, Shelf
from weightsync.publish.writer import copy_sums

MOST_READERS = 64  # whose rates are remembered


def base_for(
    part: PartRecord, versions: Iterable[VersionRecord], shelf: Shelf, others: Iterable[CopyRecord]
) -> PartRecord | None:
    """The part to make a delta of `part` from: the newest earlier one that was published here and other hosts have."""
    held = {copy.digest for copy in others if copy.state == "ready"}
    earlier = [p for v in versions for p in all_parts(v) if p.name == part.name and p.version < part.version]
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


@dataclass
class Speed:
    """Bytes per second, of late: what is learnt of many bytes weighs more than what is learnt of few."""

    nbytes: float = 0.0
    seconds: float = 0.0

    def learn(self, nbytes: float, seconds: float) -> None:
        """Learning as many bytes as are known halves the weight of what is known."""
        if nbytes <= 0 or seconds <= 0:
            return
        kept = 0.5 ** min(1.0, nbytes / self.nbytes) if self.nbytes else 0.0
        self.nbytes, self.seconds = self.nbytes * kept + nbytes, self.seconds * kept + seconds

    @property
    def per_s(self) -> float | None:
        """None: nothing is known."""
        return self.nbytes / self.seconds if self.seconds else None


@dataclass
class Speeds:
    """The speed at which this host reads, makes and applies differences, and whether one is worth it.

    Until something was made or applied here, `apply` and `make` count as the constants, in bytes of the version per
    second: those of a slow core, so that the first difference that is tried pays by a clear margin.
    """

    GUESSED_APPLY, GUESSED_MAKE = 0.5e9, 0.3e9

    deltas: Deltas = "auto"
    apply: Speed = field(default_factory=Speed)
    make: Speed = field(default_factory=Speed)
    _holders: dict[str, Speed] = field(default_factory=dict)
    _readers: dict[str, float] = field(default_factory=dict)

    def fetched(self, hosts: Iterable[str], nbytes: float, seconds: float) -> None:
        """A fetch read from all of `hosts` at once: its rate counts for each of them."""
        for host in hosts:
            self._holders.setdefault(host, Speed()).learn(nbytes, seconds)

    def told(self, reader: str, bytes_per_s: float) -> None:
        """Another host reported how fast it reads."""
        if 0 < bytes_per_s < float("inf"):
            self._readers.pop(reader, None)
            self._readers[reader] = bytes_per_s
            while len(self._readers) > MOST_READERS:
                del self._readers[next(iter(self._readers))]

    def link(self, hosts: Iterable[str]) -> float | None:
        """The bytes per second to expect from `hosts`; None if no fetch from any of them is known."""
        known = [rate for host in hosts if host in self._holders and (rate := self._holders[host].per_s)]
        return max(known, default=None)

    def is_worth_reading(self, delta_nbytes: int, nbytes: int, hosts: Iterable[str]) -> bool:
        """Whether a difference is here, and applied, sooner than the whole slot of `nbytes`."""
        if delta_nbytes >= nbytes or self.deltas == "never":
            return False
        if self.deltas == "always":
            return True
        rate = self.link(hosts)
        return (
            rate is not None and delta_nbytes / rate + nbytes / (self.apply.per_s or self.GUESSED_APPLY) < nbytes / rate
        )

    def is_worth_making(self, nbytes: int) -> bool:
        """Whether the readers so far would have the version sooner, although they wait until the difference is made."""
        if self.deltas != "auto":
            return self.deltas == "always"
        if not self._readers:
            return False
        making = nbytes / (self.make.per_s or self.GUESSED_MAKE) + nbytes / (self.apply.per_s or self.GUESSED_APPLY)
        return making < nbytes / statistics.median(self._readers.values())
