"""What this host has to offer: slots that were published here, and copies (slots and deltas) that were fetched.

A copy keeps its slot locked for as long as it is here. A published slot is locked only while somebody reads it, so a
publisher finds its slots as free as if there were no peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from weightsync.arena import Arena, SlotLock
from weightsync.errors import ManifestError, SlotBusy
from weightsync.peer.bitmap import Bitmap
from weightsync.peer.chunks import Head, Shape, manifest_of
from weightsync.peer.holdings import Copy, Published
from weightsync.peer.journal import PREFIX, Journal
from weightsync.peer.messages import Key
from weightsync.peer.regions import Regions

log = logging.getLogger("hotswap.peer")


class Shelf:
    """The slots of one model on this host. What touches files blocks; slots may be claimed on several threads."""

    def __init__(self, arena: Arena, model: str, regions: Regions) -> None:
        self.arena, self.model, self.regions = arena, model, regions
        self.copies: dict[Key, Copy] = {}
        self.published: dict[Key, Published] = {}
        self.dropping: Callable[[Key], None] = lambda key: None  # called before a copy's slot is given back
        self._left: dict[Key, Journal] = {}  # what an earlier process began
        self._claiming = threading.Lock()

    def find(self, key: Key) -> Copy | Published | None:
        copy = self.copies.get(key)
        return copy if copy is not None and copy.whole else self.published.get(key) or copy

    def delta_to(self, key: Key) -> str | None:
        """The digest from which this host has a difference to `key`."""
        whole = [copy.key for copy in list(self.copies.values()) if copy.whole and copy.key.delta_of]
        return next((found.delta_of for found in whole if found.digest == key.digest), None)

    def has(self, key: Key) -> bool:
        """Whether all of it is here."""
        found = self.find(key)
        return found is not None and found.have is None

    def adopt(self) -> None:
        """Take over what an earlier peer of this host left: whole copies as they are, others to be gone on with."""
        for journal in Journal.all_in(self.arena.directory, self.model):
            if not self._adopt_whole(journal) and not self._adopt_part(journal):
                journal.remove()  # reused or gone

    def _adopt_whole(self, journal: Journal) -> bool:
        """Instances of this host may have it mapped, and locked, since the peer before."""
        try:
            lock = SlotLock.shared(journal.slot)
        except SlotBusy:
            return False
        if lock.nbytes >= journal.shape.nbytes:
            mapped = self.regions.of(lock.path, lock.fd, writable=True)
            if _is_whole(mapped.view, journal):
                self.copies[journal.key] = Copy(
                    journal.key, journal.part, lock.path, lock, mapped, journal.shape, journal, whole=True
                )
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
            self._left[journal.key] = journal
            return True
        finally:
            lock.release()

    def claim(self, key: Key, part: str, shape: Shape, head: Head | None) -> tuple[Copy, int]:
        """A slot to fetch into, and how many of its chunks are there from an earlier attempt. Raises ArenaError.

        Chunks of an earlier attempt are digested, and taken if they are right.
        """
        with self._claiming:
            return self._claim(key, part, shape, head)

    def _claim(self, key: Key, part: str, shape: Shape, head: Head | None) -> tuple[Copy, int]:
        left = self._left.pop(key, None)
        if left is not None and left.shape == shape and (lock := SlotLock.try_exclusive(left.slot)) is not None:
            if lock.nbytes == shape.nbytes:
                return self._resume(left, lock, head)
            lock.release()
        if left is not None:
            left.remove()
        reserved = {str(journal.slot) for journal in list(self._left.values())}
        lock = self.arena.claim(
            self._pool(key, part), shape.nbytes, reserved | {str(copy.path) for copy in list(self.copies.values())}
        )
        try:
            journal = Journal.begin(lock.path, self.model, part, key, shape)
            return self._take(journal, lock, head), 0
        except BaseException:
            lock.release()
            raise

    def drop(self, key: Key) -> None:
        """Give a copy's slot back; who reads it is turned away first."""
        if key in self.copies:
            self.dropping(key)
            copy = self.copies.pop(key)
            copy.journal.remove()
            copy.lock.release()

    def drop_deltas(self, part: str, digest: str) -> None:
        """Keep no difference of a part but the newest, to `digest`: the room is the publisher's.

        Those that are not whole stay: a thread may be writing them.
        """
        for copy in list(self.copies.values()):
            if copy.key.delta_of and copy.part == part and copy.key.digest != digest and copy.whole:
                self.drop(copy.key)

    def forget(self, wanted: Iterable[Key]) -> None:
        """Give up what an earlier process began and nobody wants any more."""
        kept = set(wanted)
        for key in list(self._left):
            slot = Key(key.digest)
            unwanted = slot not in kept or (key.delta_of and self.has(slot))
            if unwanted and (left := self._left.pop(key, None)) is not None:  # None: a thread is claiming it
                left.remove()

    def close(self) -> None:
        """Let go of the slots; what is in them stays for the next process."""
        for copy in list(self.copies.values()):
            copy.lock.release()
        self.copies.clear()

    def publish(self, key: Key, path: Path) -> bool:
        """Offer a slot that a publisher of this host wrote; False when it is not there (any more)."""
        try:
            lock = SlotLock.shared(path)
        except SlotBusy:
            return False
        try:
            if not lock.nbytes:  # whoever made it was killed before it had pages
                return False
            mapped = self.regions.of(path, lock.fd, writable=False)
            manifest_of(mapped.view, key.digest)
        except ManifestError:
            return False
        else:
            self.published[key] = Published(key, path, mapped)
            return True
        finally:
            lock.release()

    def manifest(self, digest: str) -> bytes:
        """The raw manifest of a slot that is here, wholly or not. Raises ManifestError."""
        found = self.find(Key(digest))
        if found is None:
            raise ManifestError(f"{digest} is not here; ask another host")
        if isinstance(found, Copy) and found.head is not None:
            return found.head.raw
        return manifest_of(found.mapped.view, digest)

    def _resume(self, left: Journal, lock: SlotLock, head: Head | None) -> tuple[Copy, int]:
        view = self.regions.of(lock.path, lock.fd, writable=True).view
        preamble = head.preamble if head is not None else b""
        right = [chunk for chunk in left.done if left.shape.is_right(view, chunk, preamble)]
        kept = Bitmap(left.shape.chunks)
        for chunk in right:
            kept.add(chunk)
        left.keep(kept)
        return self._take(left, lock, head), len(right)

    def _take(self, journal: Journal, lock: SlotLock, head: Head | None) -> Copy:
        if journal.key.delta_of:
            lock.share()
        else:
            lock.admit_writers()  # no header until all of it is there
        mapped = self.regions.of(lock.path, lock.fd, writable=True)
        copy = Copy(journal.key, journal.part, lock.path, lock, mapped, journal.shape, journal, head)
        self.copies[journal.key] = copy
        return copy

    def _pool(self, key: Key, part: str) -> str:
        """Slots of their own, apart from the publishers'; one size to a pool."""
        return f"{'deltas' if key.delta_of else 'copies'}/{self.model}/{part}"


def _is_whole(view: memoryview, journal: Journal) -> bool:
    if journal.key.delta_of:
        return False  # read again from the journal: a delta's own end says whether it is whole
    with contextlib.suppress(ManifestError):
        manifest_of(view, journal.key.digest)
        return True
    return False


assert not PREFIX.startswith("slot")  # or Arena.slots would take journals for slots
