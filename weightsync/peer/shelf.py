"""The shelf: slots that were published here, and copies of slots that were fetched, each by its manifest's digest.

The peer keeps a copy's slot locked for as long as the copy is here. It locks a published slot only while somebody reads
it, so a publisher finds its slots as free as if there were no peer.

A journal beside each copy says what the fetch has done so far, so that the next process need not fetch it again. Its
first line says what is fetched; each further line is the number, in ASCII, of a chunk that has arrived. A last line
that was cut short counts for nothing. A journal alone is not trusted: chunks of a file without a header are digested
again before they are used.

Ranks of a trainer leave their host's share of a version in the same way (`leave`): a slot that lacks chunks, with a
header that says so, and then a journal beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from weightsync.errors import ManifestError, SlotBusy
from weightsync.format.slices import Slices
from weightsync.memory.arena import MAPPINGS, READ_MAPPINGS, Arena, SlotLock, pool_of
from weightsync.peer.chunks import MAX_CHUNKS, Bitmap, Head, Shape, manifest_of, shape_of
from weightsync.transport import Region, Transport

log = logging.getLogger("hotswap.peer")

PREFIX = "fetch-"  # not "slot", or Arena.slots would take journals for slots
LONGEST_LINE = len(str(MAX_CHUNKS))  # Python takes no number of thousands of digits


class Shelf:
    """The slots of one model on this host. Calls that touch files block; slots may be claimed on several threads."""

    def __init__(self, arena: Arena, model: str, regions: Regions) -> None:
        self.arena, self.model, self.regions = arena, model, regions
        self.copies: dict[str, Copy] = {}
        self.published: dict[str, Published] = {}
        self.dropping: Callable[[str], None] = lambda digest: None  # called before a copy's slot is given back
        self.needs: Callable[[str], Slices | None] = lambda schema: None  # of a slot with that schema; None: everything
        self._left: dict[str, Journal] = {}  # what an earlier process began
        self._claiming = threading.Lock()

    def find(self, digest: str) -> Copy | Published | None:
        copy = self.copies.get(digest)
        return copy if copy is not None and copy.whole else self.published.get(digest) or copy

    def has(self, digest: str) -> bool:
        """Whether all of it is here, or all that is needed here and can be opened."""
        found = self.find(digest)
        return found is not None and (found.have is None or (isinstance(found, Copy) and self.is_met(found)))

    def is_met(self, copy: Copy) -> bool:
        """Whether it can be opened for what is needed here. With all chunks it is to become a slot."""
        return copy.is_open and not copy.journal.done.complete and self.settled(copy).complete

    def settled(self, copy: Copy) -> Bitmap:
        """The chunks that are here, or that nobody on this host needs."""
        head, done = copy.head, copy.journal.done
        needs = self.needs(head.manifest.schema.digest) if head is not None and head.shape is not None else None
        if needs is None:
            return done
        if copy.cut is None or copy.cut[0] is not needs:
            needed = needs.chunks(copy.shape.nbytes, copy.shape.chunk_nbytes)
            copy.cut = needs, Bitmap.full(copy.shape.chunks).bits & ~needed
        return Bitmap(copy.shape.chunks, done.bits | copy.cut[1])

    def adopt(self) -> None:
        """Take over what an earlier peer of this host left: whole copies, and those open for what was needed, as they
        are, the others to be resumed. Shares wait for the record that names them (`take_share`), which may be written
        only now."""
        for journal in Journal.all_in(self.arena.directory, self.model):
            if journal.share:
                continue
            if not self._adopt_open(journal) and not self._adopt_part(journal):
                journal.remove()  # reused or gone

    def _adopt_open(self, journal: Journal) -> bool:
        """Instances of this host may have it mapped, and locked, since the peer before."""
        try:
            lock = SlotLock.shared(journal.slot)
        except SlotBusy:
            return False
        if lock.nbytes >= journal.shape.nbytes:
            mapped = self.regions.of(lock.path, lock.fd, writable=True)
            whole = _is_whole(mapped.view, journal)
            head = None if whole else Head.of_part(mapped.view, journal.digest)
            if whole or (head is not None and head.shape == journal.shape):
                self.copies[journal.digest] = Copy(
                    journal.digest, journal.part, lock.path, lock, mapped, journal.shape, journal, head, whole,
                    is_open=not whole,
                )  # fmt: skip
                return True
        lock.release()
        return False

    def _adopt_part(self, journal: Journal) -> bool:
        lock = SlotLock.try_exclusive(journal.slot)
        if lock is None:
            return False
        try:
            if lock.nbytes < journal.shape.nbytes:
                return False
            self._left[journal.digest] = journal
            return True
        finally:
            lock.release()

    def take_share(self, digest: str) -> bool:
        """Take up the chunks of a slot that ranks of this host have left here (`leave`); False if there are none."""
        left = (j for j in Journal.all_in(self.arena.directory, self.model) if j.digest == digest and j.share)
        return any(self._adopt_open(journal) for journal in left)

    def hand_back(self, digest: str, path: Path) -> None:
        """A slot that a publisher of this host left with gaps, and that is whole now, is as any that it published."""
        copy = self.copies.get(digest)
        if copy is not None and copy.whole and copy.path == path and self.publish(digest, path):
            self.drop(digest)

    def claim(self, digest: str, part: str, shape: Shape, head: Head | None) -> tuple[Copy, int]:
        """A slot to fetch into, and how many of its chunks are there from an earlier attempt. Raises ArenaError.

        Chunks of an earlier attempt are digested, and taken if they are right.
        """
        with self._claiming:
            return self._claim(digest, part, shape, head)

    def _claim(self, digest: str, part: str, shape: Shape, head: Head | None) -> tuple[Copy, int]:
        left = self._left.pop(digest, None)
        if left is not None and left.shape == shape and (lock := SlotLock.try_exclusive(left.slot)) is not None:
            if lock.nbytes == shape.nbytes:
                return self._resume(left, lock, head)
            lock.release()
        if left is not None:
            left.remove()
        in_use = {str(journal.slot) for journal in list(self._left.values())}
        in_use |= {str(copy.path) for copy in list(self.copies.values())}
        lock = self.arena.claim(copies_pool(self.model, part), shape.nbytes, in_use)
        try:
            journal = Journal.begin(lock.path, self.model, part, digest, shape)
            return self._take(journal, lock, head), 0
        except BaseException:
            lock.release()
            raise

    def drop(self, digest: str) -> None:
        """Give a copy's slot back, after its readers were turned away."""
        if digest in self.copies:
            self.dropping(digest)
            copy = self.copies.pop(digest)
            copy.journal.remove()
            copy.lock.release()

    def forget(self, wanted: set[str]) -> None:
        """Give up the fetches of an earlier process that nobody wants any more."""
        for digest in self._left.keys() - wanted:
            if (left := self._left.pop(digest, None)) is not None:  # None: a thread is claiming it
                left.remove()

    def close(self) -> None:
        """Unlock the slots; their contents stay for the next process."""
        for copy in list(self.copies.values()):
            copy.lock.release()
        self.copies.clear()

    def publish(self, digest: str, path: Path) -> bool:
        """Offer a slot that a publisher of this host wrote; False when it is not there (any more)."""
        try:
            lock = SlotLock.shared(path)
        except SlotBusy:
            return False
        try:
            if not lock.nbytes:  # whoever made it was killed before it had pages
                return False
            mapped = self.regions.of(path, lock.fd, writable=False)
            shape = shape_of(manifest_of(mapped.view, digest), len(mapped.view))
        except ManifestError:
            return False
        else:
            self.published[digest] = Published(digest, path, mapped, shape)
            return True
        finally:
            lock.release()

    def manifest(self, digest: str) -> bytes:
        """The raw manifest of a slot that is here, wholly or not. Raises ManifestError."""
        found = self.find(digest)
        if found is None:
            raise ManifestError(f"{digest} is not here; ask another host")
        if isinstance(found, Copy) and found.head is not None:
            return found.head.raw
        return manifest_of(found.mapped.view, digest)

    def _resume(self, left: Journal, lock: SlotLock, head: Head | None) -> tuple[Copy, int]:
        view = self.regions.of(lock.path, lock.fd, writable=True).view
        right = [chunk for chunk in left.done if left.shape.is_right(view, chunk, head)]
        kept = Bitmap(left.shape.chunks)
        for chunk in right:
            kept.add(chunk)
        left.keep(kept)
        return self._take(left, lock, head), len(right)

    def _take(self, journal: Journal, lock: SlotLock, head: Head | None) -> Copy:
        lock.admit_writers()  # no header until all of it is there
        mapped = self.regions.of(lock.path, lock.fd, writable=True)
        copy = Copy(journal.digest, journal.part, lock.path, lock, mapped, journal.shape, journal, head)
        self.copies[journal.digest] = copy
        return copy


def copies_pool(model: str, part: str) -> str:
    """The arena's name for the slots that hold copies and shares of versions."""
    return pool_of(f"copies/{model}/", part)


def lock_of(directory: Path, model: str) -> Path:
    """The file that the one peer of an arena and a model locks, and leaves there."""
    return directory / f"peer-{hashlib.blake2b(model.encode(), digest_size=4).hexdigest()}.lock"


def leave(slot: SlotLock, view: memoryview, head: Head, model: str, part: str, done: Bitmap) -> Journal:
    """Have the peer of this host find the chunks `done` of the slot in `view`; the others may hold anything.

    The journal comes last: who finds it finds all else. Raises OSError.
    """
    assert head.shape is not None, "nobody could tell whether a chunk is right"
    head.write(view, part=True)
    return Journal.begin(slot.path, model, part, head.digest, head.shape, done, share=True)


def _is_whole(view: memoryview, journal: Journal) -> bool:
    with contextlib.suppress(ManifestError):
        manifest_of(view, journal.digest)
        return True
    return False


@dataclass
class Published:
    """A slot that a publisher of this host wrote. Without a `shape` its chunks must be digested first."""

    digest: str
    path: Path
    mapped: Mapped
    shape: Shape | None = None
    grew: asyncio.Event = field(default_factory=asyncio.Event)  # never: it is whole

    @property
    def nbytes(self) -> int:
        return len(self.mapped.view)

    @property
    def have(self) -> Bitmap | None:
        """None: everything."""
        return None


@dataclass
class Copy:
    """A slot that was, or is being, fetched; `whole` once all of it is there and was verified. `grew` is set
    when a chunk arrives, and another event takes its place.

    `head` is known of a slot that this process fetched: its manifest is not in the slot before it is whole, or
    `is_open`: it lacks chunks, and has a header by which the instances here read the others.
    """

    digest: str
    part: str
    path: Path
    lock: SlotLock
    mapped: Mapped
    shape: Shape
    journal: Journal
    head: Head | None = None
    whole: bool = False
    is_open: bool = False
    cut: tuple[Slices, int] | None = None  # the needs that were looked at last, and the chunks that are not among them
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    def came(self, chunk: int) -> None:
        """A chunk is there, and was checked. Raises OSError."""
        self.journal.add(chunk)
        self.grew.set()
        self.grew = asyncio.Event()

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    @property
    def have(self) -> Bitmap | None:
        return None if self.whole else self.journal.done

    @property
    def is_source(self) -> bool:
        """Whether it may have chunks that are nowhere else."""
        return self.journal.share and not self.whole


class _First(msgspec.Struct, frozen=True):
    model: str
    part: str
    digest: str
    nbytes: int
    chunk_nbytes: int
    digests: tuple[str, ...]
    share: bool = False
    delta_of: str = ""  # the release before fetched differences, too


class Journal:
    """The journal of one file that is or was being fetched. Chunks may be added from one thread at a time.

    `share`: ranks of this host wrote the chunks that it began with, and nobody else may have them.
    """

    def __init__(
        self, path: Path, model: str, part: str, digest: str, shape: Shape, done: Bitmap, *, share: bool = False
    ) -> None:
        self.path, self.model, self.part, self.digest, self.shape, self.done = path, model, part, digest, shape, done
        self.share = share

    @classmethod
    def begin(
        cls,
        slot: Path,
        model: str,
        part: str,
        digest: str,
        shape: Shape,
        done: Bitmap | None = None,
        *,
        share: bool = False,
    ) -> Journal:
        """A new one for `slot` with the chunks `done`, in place of any that was there. Raises OSError."""
        journal = cls(_beside(slot), model, part, digest, shape, done or Bitmap(shape.chunks), share=share)
        first = _First(model, part, digest, shape.nbytes, shape.chunk_nbytes, shape.digests, share)
        lines = [msgspec.json.encode(first), *(b"%d" % chunk for chunk in journal.done), b""]
        fresh = journal.path.with_name(f".{journal.path.name}")
        fresh.write_bytes(b"\n".join(lines))
        fresh.replace(journal.path)
        return journal

    @classmethod
    def all_in(cls, directory: Path, model: str) -> Iterator[Journal]:
        """The journals of a model that can be read."""
        for path in sorted(directory.glob(f"{PREFIX}*")):
            journal = cls._read(path)
            if journal is not None and journal.model == model:
                yield journal

    @classmethod
    def _read(cls, path: Path) -> Journal | None:
        try:
            head, *lines = path.read_bytes().split(b"\n")
            first = msgspec.json.decode(head, type=_First)
            shape = Shape(first.nbytes, first.chunk_nbytes, first.digests)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return None
        if first.delta_of:
            return None
        done = Bitmap(shape.chunks)
        for line in lines[:-1]:
            if line.isdigit() and len(line) <= LONGEST_LINE and int(line) < shape.chunks:
                done.add(int(line))
        return cls(path, first.model, first.part, first.digest, shape, done, share=first.share)

    @property
    def slot(self) -> Path:
        """The file it is about."""
        return self.path.with_name(self.path.name.removeprefix(PREFIX))

    def add(self, chunk: int) -> None:
        """Note a chunk that is there, and was checked. Raises OSError."""
        self.done.add(chunk)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d\n" % chunk)
        finally:
            os.close(fd)

    def keep(self, done: Bitmap) -> None:
        """Forget the chunks that are not in `done`. Raises OSError."""
        Journal.begin(self.slot, self.model, self.part, self.digest, self.shape, done, share=self.share)
        self.done = done

    @staticmethod
    def drop(slot: Path) -> None:
        """Remove the one beside `slot`, if there is one."""
        _beside(slot).unlink(missing_ok=True)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _beside(slot: Path) -> Path:
    return slot.with_name(f"{PREFIX}{slot.name}")


@dataclass(frozen=True)
class Mapped:
    """A file of the arena in memory. `view` is uint8 [size of the file]."""

    view: memoryview
    region: Region


class Regions:
    """Mapped and registered slots, kept for as long as their files exist, so that each is registered once.

    One per peer; may be used from several threads.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[tuple[int, int], tuple[Path, bool, Mapped]] = {}
        self._lock = threading.Lock()

    def of(self, path: Path, locked_fd: int, *, writable: bool) -> Mapped:
        """The file that is open as `locked_fd`; slow the first time. A file that is writable here stays so."""
        found = os.fstat(locked_fd)
        inode = (found.st_dev, found.st_ino)
        with self._lock:
            known = self._known.get(inode)
            if known is not None and known[1] >= writable and len(known[2].view) == found.st_size:
                return known[2]
            self._forget_deleted()
            if inode in self._known:
                self._known.pop(inode)[2].region.close()
            mapping = (MAPPINGS if writable else READ_MAPPINGS).get(path, locked_fd, populate=False)
            view = memoryview(mapping)
            mapped = Mapped(view, self._transport.register(view, writable=writable))
            self._known[inode] = (path, writable, mapped)
            return mapped

    def _forget_deleted(self) -> None:
        for inode, (path, _, mapped) in list(self._known.items()):
            try:
                found = path.stat()
                gone = (found.st_dev, found.st_ino) != inode
            except FileNotFoundError:
                gone = True
            if gone:
                mapped.region.close()
                del self._known[inode]
