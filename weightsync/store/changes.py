"""Wakes watchers of a SQLite store as soon as any process of the host has committed.

Who commits writes a byte to a file beside the database; the kernel (inotify) tells everyone who watches that file. A
writer killed between the two costs a watcher one fallback period, never an event: events are read from the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os

IN_MODIFY = 0x2
FALLBACK_S = 0.1  # also how soon the end of a lease is noticed
POLL_S = 0.005  # without inotify (its per-user limit reached)
_libc = ctypes.CDLL(None, use_errno=True)


class ChangeSignal:
    """Belongs to one event loop once `wait` was called; `notify` may be called from any thread."""

    def __init__(self, path: str) -> None:
        self._file = os.open(f"{path}-notify", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._inotify = _watch_file(f"{path}-notify")
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not fail the commit that has already happened
            os.pwrite(self._file, b"\n", 0)

    def current(self) -> asyncio.Event:
        """Take this before reading; it is set by the first change after that."""
        if self._loop is None and self._inotify >= 0:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._inotify, self._on_readable)
        return self._changed

    async def wait(self, changed: asyncio.Event) -> None:
        """Return when `changed` is set or it is time to look anyway."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FALLBACK_S if self._inotify >= 0 else POLL_S):
                await changed.wait()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._inotify, 65536)
        self.wake()

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._inotify)
        for fd in (self._file, self._inotify):
            if fd >= 0:
                os.close(fd)
        self._file = self._inotify = -1


def _watch_file(path: str) -> int:
    """An inotify descriptor for writes to `path`, or -1 where there is none to be had."""
    fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd >= 0 and _libc.inotify_add_watch(fd, os.fsencode(path), IN_MODIFY) < 0:
        os.close(fd)
        return -1
    return fd
