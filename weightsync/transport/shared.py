"""The file behind a mapping, so that another process can map the same memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from weightsync.arena import address_of


@dataclass
class Shared:
    """`nbytes` bytes at `offset` of an open file. The file stays open, though it be deleted, until `close`."""

    fd: int
    offset: int
    nbytes: int
    _closed: bool = field(default=False, init=False)

    @classmethod
    def of(cls, view: memoryview, *, writable: bool) -> Shared:
        """Raises ValueError unless the bytes are a shared mapping of a file that this process has open, as Python's
        mmap objects of files are, memfds and deleted ones too."""
        device, inode, offset = _mapped(address_of(view), view.nbytes)
        for entry in os.listdir("/proc/self/fd"):
            try:
                found = os.stat(f"/proc/self/fd/{entry}")
            except OSError:  # closed meanwhile
                continue
            if (found.st_ino, os.major(found.st_dev), os.minor(found.st_dev)) == (inode, *device):
                # A description of its own: nobody's lock is carried into the other process.
                mode = os.O_RDWR if writable else os.O_RDONLY
                return cls(os.open(f"/proc/self/fd/{entry}", mode | os.O_CLOEXEC), offset, view.nbytes)
        raise ValueError("the file that the buffer is a mapping of is not open: keep the mmap object")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)


def _mapped(start: int, nbytes: int) -> tuple[tuple[int, int], int, int]:
    """Device, inode and offset in the file of the bytes at an address. They may lie in several mappings in a row."""
    first: tuple[tuple[int, int], int, int] | None = None
    reached = start
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, flags, offset, device, inode, *_ = line.split()
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if not low <= reached < high:
            continue
        major, minor = (int(number, 16) for number in device.split(":"))
        found = ((major, minor), int(inode), int(offset, 16) + reached - low - (reached - start))
        if flags[3] != "s" or inode == "0" or (first is not None and found != first):
            break
        first, reached = found, high
        if reached >= start + nbytes:
            return found
    raise ValueError("only a shared mapping of a file (in /dev/shm) can be registered with this transport")
