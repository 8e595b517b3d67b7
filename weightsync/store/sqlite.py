"""The store of one host: a SQLite file (sqlite_db.py). Calls run one after the other on a thread of their own.

A process that commits writes a byte to a file beside the database, and the kernel (inotify) tells every watcher of that
file. A writer that is killed between the two costs a watcher one fallback period and never an event: watchers read
events from the database. Once in that period one look at the newest revision stands for all watchers of a process, so
that what nothing happens to costs next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from weightsync.errors import StoreError, StoreUnavailable
from weightsync.store.protocol import Event, KeyValue
from weightsync.store.sqlite_db import Database

T = TypeVar("T")
_OF_ONE_STORE = re.compile(r"(?P<path>.*)\?id=(?P<id>[0-9a-f]{32})")
IN_MODIFY = 0x2
FALLBACK_S = 0.1  # also how soon the end of a lease is noticed
POLL_S = 0.005  # without inotify (its per-user limit reached)
_libc = ctypes.CDLL(None, use_errno=True)


def parse(url: str) -> tuple[str, str | None]:
    """The file of a `sqlite://` URL, and the store that it must be, if the URL says which."""
    path = url.removeprefix("sqlite://")
    found = _OF_ONE_STORE.fullmatch(path)
    return (found["path"], found["id"]) if found else (path, None)


class SqliteStore:
    """`Store` on a file. Belongs to one event loop; open one per loop and process."""

    def __init__(self, path: str, *, create: bool = True, store_id: str | None = None) -> None:
        """With a `store_id` only that store is opened, and none is made. Raises StoreUnavailable."""
        self._db = Database(path, create=create, store_id=store_id)
        try:
            self._signal = ChangeSignal(path)
        except OSError as error:
            self._db.close()
            raise StoreUnavailable(path, str(error), "Choose a directory this user may write to") from error
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._closed = False
        self._watching = 0  # watchers that wait for a change
        self._looking: asyncio.Task[None] | None = None  # while there are any

    @property
    def url(self) -> str:
        return f"sqlite://{self._db.path}"

    @property
    def url_of_this(self) -> str:
        """The URL under which this very store is opened, and no other that may come to be in its place."""
        return f"{self.url}?id={self.store_id}"

    @property
    def store_id(self) -> str:
        """The id that tells this store from any other."""
        assert self._db.store_id is not None, "it was opened"
        return self._db.store_id

    async def get(self, key: str) -> KeyValue | None:
        return await self._call(lambda: self._db.get(key))

    async def list(self, prefix: str, *, first: str = "") -> tuple[list[KeyValue], int]:
        return await self._call(lambda: self._db.list(prefix, first))

    async def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return await self.txn({}, {key: value}, {key: lease} if lease is not None else None)

    async def delete(self, key: str) -> bool:
        return (await self._write(lambda: self._db.txn({}, {key: None})))[1]

    async def compare_and_swap(
        self, key: str, expected_mod_revision: int, value: bytes, lease: int | None = None
    ) -> int:
        return await self.txn({key: expected_mod_revision}, {key: value}, {key: lease} if lease is not None else None)

    async def txn(
        self,
        compares: Mapping[str, int],
        puts: Mapping[str, bytes | None],
        leases: Mapping[str, int] | None = None,
    ) -> int:
        return (await self._write(lambda: self._db.txn(compares, puts, leases)))[0]

    async def grant_lease(self, ttl_s: float) -> int:
        return await self._call(lambda: self._db.grant_lease(ttl_s))

    async def keep_alive(self, lease: int) -> None:
        await self._call(lambda: self._db.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._write(lambda: (0, self._db.revoke(lease)))

    async def watch(
        self, prefix: str, start_revision: int | None = None, *, first: str = ""
    ) -> AsyncGenerator[Event, None]:
        start = start_revision if start_revision is not None else await self._call(self._db.revision) + 1
        while not self._closed:
            changed = self._signal.current()
            events, start = await self._call(lambda: self._db.events(prefix, start, first))  # noqa: B023 - awaited here
            for event in events:
                yield event
            if not events:
                await self._wait(changed, start - 1)

    async def _wait(self, changed: asyncio.Event, seen: int) -> None:
        """Until `changed` is set; `seen` is the newest revision that this watcher knows."""
        if changed.is_set():
            return
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look(seen))
        self._watching += 1
        try:
            await changed.wait()
        finally:
            self._watching -= 1

    async def _look(self, seen: int) -> None:
        """Wakes all watchers when there is a revision after `seen`; and when the store fails, which they then find."""
        try:
            while self._watching and not self._closed:
                await asyncio.sleep(self._signal.fallback_s)
                revision = await self._call(self._db.revision)
                if revision != seen:
                    seen = revision
                    self._signal.wake()
        except StoreError:
            self._signal.wake()
        finally:
            self._looking = None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._signal.wake()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._db.close)
        self._signal.close()
        self._executor.shutdown(wait=False)

    async def _write(self, work: Callable[[], tuple[int, bool]]) -> tuple[int, bool]:
        def run() -> tuple[int, bool]:
            result = work()
            if result[1]:
                self._signal.notify()
            return result

        return await self._call(run)

    async def _call(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable(self._db.path, "this client was closed", "Open the store again")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class ChangeSignal:
    """Belongs to one event loop once `current` was called; `notify` may be called from any thread."""

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

    @property
    def fallback_s(self) -> float:
        """After this time one has to look anyway."""
        return FALLBACK_S if self._inotify >= 0 else POLL_S

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
