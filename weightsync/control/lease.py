"""Leases: one is kept alive in the background, and the holder of one of them leads.

`LeaseKeeper` renews a lease and says when it is lost.

A process that is at work and not at its event loop (a body of 100 MB is written in one call, which holds the GIL) must
not lose its place in the fleet for that. A guard, a small process of its own, then renews the lease instead:

    the loop renews, and tells the guard                      -> the guard does nothing
    it has not for half the lease, and uses processor time    -> the guard renews, for BUSY_S at most
    it has not, and uses none: it is stopped, or waits        -> the lease ends, as it must
    it has ended, or stops renewing                           -> the guard ends

`Term` is the time one coordinator leads. Of any number of candidates, the one that holds the key `leader` under its
lease is the leader. A candidate waits until the key is gone, and creates it. A leader that stops takes it away at once;
one that dies, is frozen or loses the store loses it when its lease ends, and its transactions, which compare the key,
write nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.control.board import Board
from weightsync.control.records import LeaderRecord
from weightsync.errors import Conflict, LeaseLost, StoreError, StoreUnavailable
from weightsync.store import open_store
from weightsync.store.protocol import MISSING, Store
from weightsync.timeouts import timeout

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 lacks it

log = logging.getLogger(__name__)
BUSY_S = 120.0  # without a turn of its event loop a process is taken for hung, whatever it does


class LeaseKeeper:
    """A lease of `ttl_s` seconds, renewed three times as often. `lost` is set when it ended against our will."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store, self.ttl_s = store, ttl_s
        self.lost = asyncio.Event()
        self.id = 0
        self._task: asyncio.Task[None] | None = None
        self._guard: _Guard | None = None

    @classmethod
    async def grant(cls, store: Store, ttl_s: float, guard_url: str = "") -> LeaseKeeper:
        """`guard_url`: of the store, for a guard; "": there is none. Raises StoreUnavailable."""
        keeper = cls(store, ttl_s)
        renewed = time.monotonic()
        keeper.id = await store.grant_lease(ttl_s)
        if guard_url:
            order = {"url": guard_url, "lease": keeper.id, "ttl_s": ttl_s, "pid": os.getpid(), "renewed": renewed}
            keeper._guard = _Guard(order)
        keeper._task = asyncio.create_task(keeper._keep(), name=f"lease {keeper.id}")
        return keeper

    async def _keep(self) -> None:
        try:
            if self._guard is not None:
                await self._guard.start()
            await self._renew()
        finally:
            if self._guard is not None:
                await self._guard.end()

    async def _renew(self) -> None:
        delay = self.ttl_s / 3
        while True:
            await asyncio.sleep(delay * random.uniform(0.8, 1.0))  # noqa: S311 - who began together does not ask together for ever
            renewed = time.monotonic()
            try:
                await self._store.keep_alive(self.id)
                delay = self.ttl_s / 3
            except StoreUnavailable:
                delay = self.ttl_s / 10  # the store may come back before the lease has ended
            except LeaseLost:
                self.lost.set()
                return
            if self._guard is not None:
                self._guard.tell(renewed)

    async def stop(self) -> None:
        """Stop renewing: what hangs on the lease goes when its time to live is over."""
        self.lost.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # to await the task itself would hide a cancellation of the caller

    async def end(self) -> None:
        """Stop renewing and revoke, so that what hangs on the lease goes now."""
        await self.stop()
        with contextlib.suppress(StoreError):
            await self._store.revoke(self.id)


class _Guard:
    """The guard's process, seen from the one it watches: a line for each renewal, the end of its input to end it.
    Times are of the host's monotonic clock: the guard may start, or read a line, long after the renewal."""

    def __init__(self, order: dict[str, object]) -> None:
        self._order = order
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "weightsync.control.lease", stdin=asyncio.subprocess.PIPE
            )
        except OSError as error:
            log.warning("the lease has no guard, and is lost if this process is busy for long: %s", error)
            return
        self._tell(json.dumps(self._order).encode())  # not in its arguments: the URL may hold a password

    def tell(self, renewed: float) -> None:
        self._tell(str(renewed).encode())

    async def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _tell(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line + b"\n")


async def _guard() -> None:
    """The guard: reads its order, then what the process it watches says."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    if not (line := await lines.readline()):
        return
    order = json.loads(line)
    store = open_store(order["url"], create=False)
    ttl_s, pid = float(order["ttl_s"]), int(order["pid"])
    heard = renewed = float(order["renewed"])
    used, watch_s, watching = _processor_time(pid), max(renewed + ttl_s / 2 - time.monotonic(), 0.0), False
    while os.getppid() == pid:
        try:
            async with timeout(watch_s):
                if not (line := await lines.readline()):
                    return
        except TimeoutError:
            now, before, used = time.monotonic(), used, _processor_time(pid)
            due = watching and now - renewed >= ttl_s / 3
            if due and used > before and now - heard < BUSY_S:
                try:
                    await store.keep_alive(order["lease"])
                except StoreUnavailable:
                    continue
                renewed = now
            watch_s, watching = ttl_s / 10, True
        else:
            heard = renewed = float(line)
            used, watch_s, watching = _processor_time(pid), max(renewed + ttl_s / 2 - time.monotonic(), 0.0), False


def _processor_time(pid: int) -> int:
    """Clock ticks that all threads of a process have used; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


LEADER_TTL_S = 3.0


class Term:
    """The time one candidate leads. `lost` is done when its lease ended; `revision` is what its steps compare."""

    def __init__(self, lease: LeaseKeeper, key: str, revision: int) -> None:
        self._lease, self._key, self.revision = lease, key, revision
        self.lost = asyncio.create_task(lease.lost.wait())

    @classmethod
    async def win(cls, store: Store, board: Board, holder: str, ttl_s: float = LEADER_TTL_S) -> Self:
        """Wait for the end of the term before, and win against the other candidates. Raises StoreUnavailable."""
        key = board.keys.leader
        while True:
            while board.revision(key) != MISSING:
                await board.changed()
            lease = await LeaseKeeper.grant(store, ttl_s)
            try:
                record = LeaderRecord(holder, time.time())
                revision = await store.compare_and_swap(key, MISSING, record.to_json(), lease.id)
                while board.seen < revision:
                    await board.changed()
                return cls(lease, key, revision)
            except Conflict:  # another one was faster; its record is the next thing we see
                await lease.end()
                await board.changed()
            except BaseException:
                await lease.end()
                raise

    def lasts(self, board: Board) -> bool:
        """As far as this process knows; a step is checked in its transaction."""
        return not self.lost.done() and board.revision(self._key) == self.revision

    async def end(self) -> None:
        """Let the next one lead now; if the store is away, when the lease ends."""
        self.lost.cancel()
        with contextlib.suppress(StoreError):
            await self._lease.end()


def new_name() -> str:
    """Names a candidate; two in one process differ."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # to the whole process group: what it watches decides when to end
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(LeaseLost, StoreUnavailable):
        asyncio.run(_guard())
