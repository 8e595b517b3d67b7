"""Shared-memory slots: files in a tmpfs that hold one version each, persistent, pre-faulted and reused.

Reference counts are `flock`s, which the kernel drops when a process dies: a reader holds LOCK_SH for as long as the
slot is mapped in it; a writer claims with LOCK_EX and then writes under LOCK_SH. So a slot that gives LOCK_EX, and that
no record names, is free. Pages are allocated once with `posix_fallocate`, so a full file system is an error here and
never a bus error in somebody's training step.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from weightsync.errors import ArenaError, SlotBusy, arena_full
from weightsync.format.manifest import PREAMBLE

DEFAULT_ROOT = Path("/dev/shm")  # noqa: S108 - shared memory is the point; the directory below it is private
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; not in the mmap module
PREFAULT_CHUNK = 64 << 20
TOUCHING = max(1, min(8, (os.cpu_count() or 1) // 2))  # threads: one brings in 3 GB in a second, eight 14
PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def default_directory(store_url: str, host: str = "") -> Path:
    """Where the slots of a store go unless told otherwise: HOTSWAP_ARENA, or a directory of its own in /dev/shm."""
    configured = os.environ.get("HOTSWAP_ARENA")
    name = hashlib.blake2b(store_url.encode(), digest_size=6).hexdigest()
    return Path(configured) if configured else DEFAULT_ROOT / f"hotswap-{name}{f'-{host}' if host else ''}"


class Arena:
    """The slots in one directory, which is made (0700) if it is not there. Raises ArenaError."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._make()

    def _make(self) -> None:
        """Make the directory, also where a cleaner or a logout has taken it. Raises ArenaError."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
        except OSError as error:
            raise ArenaError(
                f"arena {self.directory}: {error.strerror}; choose a directory on a tmpfs that this user may write to",
                code="arena_unavailable",
            ) from error
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ArenaError(
                f"arena {self.directory} may be written by others; `chmod 700` it or choose another directory",
                code="arena_unavailable",
            )

    def slots(self, model: str) -> list[Path]:
        """The slot files of a model, in order."""
        return [self.directory / name for name in self._named(f"slot-{_tag(model)}-")]

    def _named(self, prefix: str) -> list[str]:
        """The files whose names begin so, in order; without a path of each, as there may be thousands."""
        try:
            return sorted(name for name in os.listdir(self.directory) if name.startswith(prefix))
        except FileNotFoundError:
            return []

    def claim(self, model: str, nbytes: int, in_use: set[str]) -> SlotLock:
        """A slot of at least `nbytes` that nobody uses, locked exclusively; made if there is none. Raises ArenaError,
        ArenaError."""
        self._make()
        for path in self.slots(model):
            if str(path) in in_use or (lock := SlotLock.try_exclusive(path)) is None:
                continue
            if lock.nbytes == nbytes:
                return lock
            path.unlink()  # of another shape of the model; whoever still maps it keeps its pages
            lock.release()
        return self._create(model, nbytes)

    def idle(self, model: str, kept: Collection[str], in_use: set[str]) -> list[SlotLock]:
        """The slots of the model's other parts than those `kept`, that nobody uses, locked exclusively."""
        tags = {_tag(pool_of(model, part)) for part in kept}
        there = self._named(f"slot-{_tag(model)}.")
        free = [name for name in there if name.split("-")[1] not in tags and f"{self.directory}/{name}" not in in_use]
        return [lock for name in free if (lock := SlotLock.try_exclusive(self.directory / name)) is not None]

    def _create(self, model: str, nbytes: int) -> SlotLock:
        for path in self._names(model):
            try:
                lock = SlotLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                continue
            except OSError as error:
                raise ArenaError(
                    f"cannot make {path}: {error.strerror}; choose an arena this user may write to",
                    code="arena_unavailable",
                ) from error
            fcntl.flock(lock.fd, fcntl.LOCK_EX)
            if not lock.in_place:  # somebody saw it before it was locked, still without its size, and removed it
                lock.release()
                continue
            try:
                os.posix_fallocate(lock.fd, 0, nbytes)
            except OSError as error:
                path.unlink()
                lock.release()
                if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                    raise arena_full(str(self.directory), nbytes, self.free_nbytes()) from error
                raise ArenaError(f"cannot make {path}: {error.strerror}", code="arena_unavailable") from error
            return lock
        raise AssertionError("unreachable: the names do not end")

    def _names(self, model: str) -> Iterator[Path]:
        number = 0
        while True:
            yield self.directory / f"slot-{_tag(model)}-{number:03d}"
            number += 1

    def free_nbytes(self) -> int:
        self._make()
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize


class SlotLock:
    """A lock on a slot file, on a file description of its own, so that it ends with this object or this process."""

    _live: ClassVar[weakref.WeakSet[SlotLock]] = weakref.WeakSet()

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        SlotLock._live.add(self)

    @classmethod
    def try_exclusive(cls, path: Path) -> SlotLock | None:
        """The lock, or None when somebody holds the slot or it is gone."""
        return cls._try(path, fcntl.LOCK_EX)

    @classmethod
    def shared(cls, path: Path) -> SlotLock:
        """Raises SlotBusy when a writer is claiming the slot, or it is gone."""
        lock = cls._try(path, fcntl.LOCK_SH)
        if lock is None:
            raise SlotBusy(f"slot {path} is being claimed for another version, or is gone; begin again")
        return lock

    @classmethod
    def _try(cls, path: Path, how: int) -> SlotLock | None:
        try:
            lock = cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        if not lock.in_place:  # removed between the two, and its path may be another slot's by now
            lock.release()
            return None
        return lock

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to the file that is locked. Only a holder of LOCK_EX removes a slot."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def is_sparse(self) -> bool:
        """Whether it takes more memory when more is written."""
        return is_sparse(os.fstat(self.fd))

    def admit_writers(self) -> None:
        """From exclusive to shared, so that the other ranks can hold the slot too while they write.

        The former version's header goes first: a reader that comes now must not take the slot for that version.
        """
        os.pwrite(self.fd, bytes(PREAMBLE), 0)
        self.share()

    def share(self) -> None:
        """From exclusive to shared, with what is in the slot."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def release(self) -> None:
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # also for a child that was forked and has not closed its copy yet
            self.forget()

    def forget(self) -> None:
        """Close without unlocking: what a child does with the locks of its parent."""
        os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.release()


def is_sparse(found: os.stat_result) -> bool:
    """Whether a file has pages that were not allocated yet. Those of an arena's slots all are."""
    return found.st_blocks * 512 < found.st_size


def _drop_in_child() -> None:
    """A forked data-loader worker must not keep a dead trainer's slot locked."""
    for lock in SlotLock._live:
        if lock.fd >= 0:
            lock.forget()


os.register_at_fork(after_in_child=_drop_in_child)


class Mappings:
    """Maps of slots, kept for the life of the process, so that a page is faulted in once, not per version."""

    def __init__(self, *, write: bool) -> None:
        self._write = write
        self._maps: dict[tuple[int, int], tuple[Path, mmap.mmap]] = {}
        self._faulted: set[tuple[int, int]] = set()
        self._last: dict[int, Callable[[], None]] = {}  # by map
        self._lock = threading.Lock()

    def get(self, path: Path, locked_fd: int, *, populate: bool = True) -> mmap.mmap:
        """The map of the file that is open as `locked_fd`; `populate` faults its pages in, once. Those of a file that
        has no room for all of them yet are left to what writes there."""
        found = os.fstat(locked_fd)
        key = (found.st_dev, found.st_ino)
        with self._lock:
            if key not in self._maps or len(self._maps[key][1]) != found.st_size:
                self._forget_deleted()
                self._forget(key)
                self._maps[key] = (path, self._map(locked_fd, found.st_size))
                self._faulted.discard(key)
            mapping = self._maps[key][1]
            if populate and key not in self._faulted and not is_sparse(found):
                prefault(mapping, write=self._write, threads=TOUCHING if self._write else 1)  # readers serve meanwhile
                self._faulted.add(key)
        return mapping

    def at_end(self, mapping: mmap.mmap, work: Callable[[], None]) -> None:
        """Have `work` called before this map is forgotten."""
        with self._lock:
            self._last[id(mapping)] = work

    def _map(self, locked_fd: int, size: int) -> mmap.mmap:
        """Through a description of its own: a map keeps the one it was made from open, and the lock with it."""
        fd = os.open(f"/proc/self/fd/{locked_fd}", (os.O_RDWR if self._write else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if self._write else 0))
        finally:
            os.close(fd)

    def _forget_deleted(self) -> None:
        for key, (path, _) in list(self._maps.items()):
            try:
                found = path.stat()
            except FileNotFoundError:
                found = None
            if found is None or (found.st_dev, found.st_ino) != key:
                self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        _, mapping = self._maps.pop(key, (None, None))
        self._last.pop(id(mapping), lambda: None)()
        self._faulted.discard(key)


MAPPINGS = Mappings(write=True)
READ_MAPPINGS = Mappings(write=False)


def prefault(mapping: mmap.mmap | memoryview, *, write: bool, threads: int = 1) -> None:
    """Fault in every page now, off the interpreter lock, instead of one by one in the copy that follows."""
    view = memoryview(mapping)
    begin = address_of(view)
    end, advice = begin + len(view), MADV_POPULATE_WRITE if write else MADV_POPULATE_READ

    def bring_in(start: int) -> None:
        size = min(PREFAULT_CHUNK, end - start)
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) != 0:
            _touch(view[max(start - begin, 0) : start - begin + size], write=write)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(bring_in, range(begin - begin % PAGE, end, PREFAULT_CHUNK)):  # the kernel takes whole pages
            pass
    view.release()


def address_of(view: memoryview) -> int:
    """Where a view lies, read-only ones too, which ctypes does not take."""
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _touch(view: memoryview, *, write: bool) -> None:
    """For kernels before 5.14: one byte of every page; written back as it was, so that a written page stays."""
    for offset in range(0, len(view), PAGE):
        byte = view[offset]
        if write:
            view[offset] = byte


def pool_of(model: str, part: str) -> str:
    """The name by which a part's slots are claimed: those of one pool have one size."""
    return f"{model}\0{part}" if part else model


def _tag(pool: str) -> str:
    """Models of one store have slots of their own, and so has each part, behind the tag of its model; the names
    themselves may hold characters a file name cannot."""
    return ".".join(hashlib.blake2b(name.encode(), digest_size=4).hexdigest() for name in pool.split("\0"))
