"""Layout slots: files in shared memory that hold one version in kernel layout, built once per host and mapped by all.

A slot is a header page, the data, and notes for the processes that map it: the sums of its parts, and scalars. The
builder of a slot holds an exclusive `flock`, and each process that runs on it a shared one. The kernel drops both when
a process dies, so a slot whose builder or users were killed is simply free again. Mappings are kept as long as their
files: a page is faulted in once, not once per version.

Other tensors or another release make another layout, with slots of its own. Those of a layout that no process holds a
slot of go when room is made for a slot of any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import ArenaError
from weightsync.format.fingerprint import TileSums
from weightsync.memory.arena import prefault

HEADER = 4096
NOTES = 256 << 10  # compressed: about 20 bytes a tensor


@dataclass
class Notes:
    """Facts about a version besides its bytes: the sums of its parts, and scalars that vLLM's processing made, by path.

    `built`: a digest of all that processing made.
    """

    sums: TileSums = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    built: str = ""


def _pack(notes: Notes) -> bytes:
    return zlib.compress(json.dumps(asdict(notes)).encode(), 1)


@dataclass
class LayoutSlot:
    """A held slot. `data` is uint8 [nbytes]; `built` says whether it already holds the version asked for."""

    path: Path
    fd: int
    data: torch.Tensor
    built: bool
    _mapping: mmap.mmap

    @property
    def notes(self) -> Notes:
        """As they were when the slot was sealed."""
        header = _read_header(self._mapping[:HEADER])
        begin, size = HEADER + len(self.data), header.get("notes", 0)
        assert isinstance(size, int)
        return Notes(**json.loads(zlib.decompress(self._mapping[begin : begin + size]))) if size else Notes()

    def seal(self, key: str, notes: Notes) -> None:
        """Mark the slot as holding `key`, described by `notes`, and let other instances map it.

        Sums that have no room are left out. Raises ArenaError where the scalars have none.
        """
        written = _pack(notes)
        if len(written) > NOTES:
            written = _pack(replace(notes, sums={}))
        if len(written) > NOTES:
            raise _refused(f"the {len(notes.scalars)} scalars of {key} do not fit into the notes of a slot")
        begin = HEADER + len(self.data)
        self._mapping[begin : begin + len(written)] = written
        _write_header(self._mapping, {"key": key, "complete": True, "notes": len(written)})
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        self.built = True

    def release(self) -> None:
        """Give the slot up; its bytes stay until another version needs the room."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _refused(message: str) -> ArenaError:
    return ArenaError(message, code="layout_pool_error")


class LayoutPool:
    """The layout slots of one layout fingerprint in `directory` (a tmpfs)."""

    def __init__(self, directory: Path, fingerprint: str, nbytes: int) -> None:
        self._directory = directory
        self.fingerprint = fingerprint
        self._prefix = f"layout-{fingerprint}-"
        self._nbytes = nbytes
        self._file_nbytes = HEADER + nbytes + NOTES
        self._maps: dict[int, mmap.mmap] = {}  # by inode: another slot may have the name of one that was removed

    def reserve(self, count: int) -> None:
        """Make `count` slots in all, and fault in all there are: the first swaps are then as fast as later ones.

        Those that do not fit into shared memory are left for the moment they are needed, if it comes.
        """
        with self._lock():
            while len(self._files()) < count:
                try:
                    self._create()
                except ArenaError:
                    break
            paths = self._files()
        for path in paths:
            self._mapped(path, write=not self._busy(path))

    def acquire(self, key: str, timeout_s: float = 120.0) -> LayoutSlot:
        """The slot that holds `key`, shared, or a free one, exclusive, to build it in.

        Waits while another instance builds the same key. Raises ArenaError when shared memory is full.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock():
                slot = self._find(key) or self._claim(key)
            if slot is not None:
                return slot
            if time.monotonic() > deadline:
                raise _refused(f"another instance has been building {key} for {timeout_s:.0f} s; check it")
            time.sleep(0.005)

    def _find(self, key: str) -> LayoutSlot | None:
        for path in self._files():
            if (header := self._peek(path)).get("key") != key or not header.get("complete"):
                continue
            if (fd := self._try_lock(path, fcntl.LOCK_SH)) is not None:
                return self._held(path, fd, built=True)
        return None

    def _claim(self, key: str) -> LayoutSlot | None:
        if self._being_built(key):
            return None
        free = [p for p in self._files() if not self._busy(p)]
        path = min(free, key=lambda p: p.stat().st_mtime) if free else self._create()
        fd = self._try_lock(path, fcntl.LOCK_EX)
        if fd is None:
            return None
        slot = self._held(path, fd, built=False)
        _write_header(slot._mapping, {"key": key, "complete": False})
        os.utime(path)
        return slot

    def _being_built(self, key: str) -> bool:
        return any(self._peek(p) == {"key": key, "complete": False} and self._busy(p) for p in self._files())

    def _busy(self, path: Path) -> bool:
        fd = self._try_lock(path, fcntl.LOCK_EX)
        if fd is None:
            return True
        os.close(fd)
        return False

    def _try_lock(self, path: Path, how: int) -> int | None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _create(self) -> Path:
        self._remove_abandoned()
        number = 1 + max([int(p.name.rsplit("-", 1)[1]) for p in self._files()], default=-1)
        path, new = (self._directory / f"{self._prefix}{name}" for name in (f"{number:03d}", "new"))
        new.unlink(missing_ok=True)  # of a process that was killed here
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._file_nbytes)
            new.rename(path)  # a slot is there as a whole
        except OSError as error:
            new.unlink()
            raise _refused(
                f"no room for {self._nbytes / 1e9:.2f} GB in {self._directory} ({error.strerror}): enlarge the shared "
                "memory mount or retire old versions"
            ) from error
        finally:
            os.close(fd)
        return path

    def _remove_abandoned(self) -> None:
        """Remove the slots of other layouts of which nobody holds one."""
        others: dict[str, list[Path]] = {}
        for path in self._directory.glob("layout-*"):
            prefix = path.name[: path.name.rindex("-") + 1]
            if prefix != self._prefix and path.name != f"{prefix}lock":
                others.setdefault(prefix, []).append(path)
        for prefix, paths in others.items():
            with contextlib.suppress(OSError), self._lock(prefix, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if not any(self._busy(path) for path in paths):
                    for path in paths:
                        path.unlink()

    def _held(self, path: Path, fd: int, *, built: bool) -> LayoutSlot:
        mapping = self._mapped(path, write=not built)
        data = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER, count=self._nbytes)
        return LayoutSlot(path, fd, data, built, mapping)

    def _mapped(self, path: Path, *, write: bool) -> mmap.mmap:
        inode = path.stat().st_ino
        mapping = self._maps.get(inode)
        if mapping is None:
            there = {file.stat().st_ino for file in self._files()}
            self._maps = {inode: mapping for inode, mapping in self._maps.items() if inode in there}
            mapping = self._maps[inode] = self._map(path)
            prefault(mapping, write=write)
        return mapping

    def _map(self, path: Path) -> mmap.mmap:
        """A mapping with a descriptor of its own: one made from the locked descriptor would keep the lock for ever."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, self._file_nbytes)
        finally:
            os.close(fd)

    def _peek(self, path: Path) -> dict[str, object]:
        with path.open("rb") as file:
            return _read_header(file.read(512))

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob(f"{self._prefix}*[0-9]"))

    @contextlib.contextmanager
    def _lock(self, prefix: str = "", how: int = fcntl.LOCK_EX) -> Iterator[None]:
        fd = os.open(self._directory / f"{prefix or self._prefix}lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


def _write_header(mapping: mmap.mmap, header: dict[str, object]) -> None:
    raw = json.dumps(header).encode()
    mapping[:HEADER] = raw + b"\0" * (HEADER - len(raw))


def _read_header(page: bytes) -> dict[str, object]:
    raw = page.split(b"\0", 1)[0]
    return dict(json.loads(raw)) if raw else {}
