"""Mapped and registered slots, kept for as long as their files exist: a slot is registered once, whatever it holds."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from weightsync.arena import MAPPINGS, READ_MAPPINGS
from weightsync.transport import Region, Transport


@dataclass(frozen=True)
class Mapped:
    """A file of the arena in memory. `view` is uint8 [size of the file]."""

    view: memoryview
    region: Region


class Regions:
    """One per peer. May be used from several threads."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[tuple[int, int], tuple[Path, bool, Mapped]] = {}
        self._lock = threading.Lock()

    def of(self, path: Path, locked_fd: int, *, writable: bool) -> Mapped:
        """The file that is open as `locked_fd`; slow the first time. What is writable here stays so."""
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
