"""Memory that is registered with a transport once and kept: a mapping of a nameless file, as transports want it."""

from __future__ import annotations

import mmap
import os

import psutil

from weightsync.errors import PublishError
from weightsync.transport import Transport


class Block:
    """`view` is its bytes. `writable`: it is read into. Raises PublishError when there is not so much memory."""

    def __init__(self, transport: Transport, nbytes: int, *, writable: bool) -> None:
        self._mapping = _memory(nbytes)
        self.view = memoryview(self._mapping)
        self.region = transport.register(self._mapping, writable=writable)

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def close(self) -> None:
        """Nobody reads it any more; the memory goes with its last user."""
        self.region.close()
        self.view.release()


def _memory(nbytes: int) -> mmap.mmap:
    """Asked for beforehand: the kernel gives out more than it has, and ends processes when that comes to light."""
    if nbytes > (free := psutil.virtual_memory().available):
        raise PublishError(
            f"a share of the version needs {nbytes:,} bytes of memory, {free:,} are free: put fewer ranks on a host"
        )
    fd = os.memfd_create("hotswap-share")
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
