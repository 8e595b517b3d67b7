"""`python -m weightsync.persist`: copies each committed version to disk (see the package).

The `Persister` follows the commits of one model and keeps on disk the active version and the one a rollback goes to,
and those editions of adapters that are not replaced soon.

A copy is written after the commit, from the slot, by a thread of a process that everybody else goes before. Instances
and publishers do not wait for it: it holds the slot by a reader's lock, and lets go when a publisher needs the room for
a version that is neither active nor the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weightsync.control.arenas import ensure_arena
from weightsync.control.board import Board
from weightsync.control.editions import prefix_of
from weightsync.control.hosts import this_host
from weightsync.control.records import ActiveRecord, DiskRecord, ErrorInfo, Keys, VersionRecord, shared_versions
from weightsync.errors import PersistError, StoreUnavailable, WatchCompacted, WeightSyncError
from weightsync.peer.copies import all_parts, local_slot, own_copies
from weightsync.persist.disk import Disk
from weightsync.running import STORE_ENV
from weightsync.store import open_store
from weightsync.store.protocol import Store

log = logging.getLogger("hotswap.persist")
RETRY_STORE_S = 0.5
AGAIN_S = 30.0  # after a failure, unless a commit comes before
EDITION_S = 10.0  # the age at which an edition is copied: many are replaced before
LOWEST = 19  # of the scheduler; the kernel derives the lowest priority for input and output from it


class Superseded(Exception):
    """The version is of no use any more, or the process is told to end: the copy under way is given up."""


class Persister:
    """Belongs to one event loop; `disk` is locked by the caller."""

    def __init__(self, store: Store, keys: Keys, disk: Disk, host: str = "") -> None:
        self.store, self.keys, self.disk, self.host = store, keys, disk, host
        self.failures = 0
        self._failed: dict[int, tuple[int, float]] = {}  # version: epoch at which it failed, and when
        self._needed: set[int] = set()
        self._give_up = False
        self._editions: set[str] | None = None  # manifest digests, once there is nothing to do for them
        self._seen: tuple[ActiveRecord | None, list[VersionRecord]] | None = None
        self._told: DiskRecord | None = None
        self._error: ErrorInfo | None = None

    async def run(self, stopped: asyncio.Event) -> bool:
        """Until `stopped`, and then until what is needed is on disk; whether the active version is.

        Outages of the store pass.
        """
        stop = asyncio.create_task(stopped.wait())
        try:
            while not stop.done():
                try:
                    async with self._followed() as board:
                        while not stop.done():
                            await self._step(board, stopped)
                            young = await self._keep_editions(board, EDITION_S)
                            await board.changed(EDITION_S if young else AGAIN_S if self._failed else None, stop)
                except (StoreUnavailable, WatchCompacted) as error:
                    log.warning("the store is away, and commits cannot be seen: %s", error)
                    await asyncio.wait({stop}, timeout=RETRY_STORE_S)
            return await self._finish()
        finally:
            stop.cancel()

    def _followed(self) -> contextlib.AbstractAsyncContextManager[Board]:
        return Board.follow(self.store, self.keys, *self.keys.concerns, (prefix_of(self.keys), ""))

    def abandon(self) -> None:
        """Give up the copy under way."""
        self._give_up = True

    async def _finish(self) -> bool:
        """Copy what is needed now, of which the board may not have heard yet; whether what is active is there."""
        tried: set[int] = set()
        try:
            async with self._followed() as board:
                while missing := [r for r in _needed(board) if r.version not in tried and self.disk.find(r) is None]:
                    tried.add(missing[0].version)
                    await self._copy(board, missing[0])
                await self._keep_editions(board, 0.0)
                await self._tell(board)
                active = _active(board)
                return active is None or self.disk.find(active) is not None
        except (StoreUnavailable, WatchCompacted) as error:
            log.error("the store is away, and what is active cannot be seen: %s", error)
            return False

    async def _step(self, board: Board, stopped: asyncio.Event) -> None:
        """Write what is missing, unless it is known from the last time that nothing is."""
        needed = _needed(board)
        if (board.active, needed) == self._seen and not self._failed:
            return
        self._failed = {v: at for v, at in self._failed.items() if any(v == record.version for record in needed)}
        while not stopped.is_set() and (wanted := self._next(board)) is not None:
            await self._copy(board, wanted)
        await self._tell(board)
        self._seen = (board.active, _needed(board))

    def _next(self, board: Board) -> VersionRecord | None:
        """The active version, then the one before; not one that has just failed."""
        for record in _needed(board):
            at = self._failed.get(record.version)
            epoch = board.active.epoch if board.active is not None else 0
            may = at is None or at[0] != epoch or time.monotonic() - at[1] >= AGAIN_S
            if may and self.disk.find(record) is None:
                return record
        return None

    async def _copy(self, board: Board, record: VersionRecord) -> bool:
        """Write one version while the board goes on following; whether it is on disk now."""
        slots = await self._slots(record)
        needed = _needed(board)
        protected = [r for r in needed if r.version != record.version]
        if not any(self.disk.find(r) for r in protected) and (kept := self.disk.kept()):
            protected.append(kept[-1].record)  # until this one is there, something whole stays
        started = time.perf_counter()
        room = (await ensure_arena(self.store, host=self.host)).free_nbytes
        self._needed = {r.version for r in needed}

        def go_on() -> None:
            if self._give_up or (record.version not in self._needed and room() < record.nbytes):
                raise Superseded(record.version)

        work = asyncio.create_task(asyncio.to_thread(self.disk.write, record, slots, protected, go_on))
        try:
            while not work.done():
                await board.changed(None, work)
                self._needed = {r.version for r in _needed(board)}
            await work
        except (StoreUnavailable, WatchCompacted):
            await asyncio.wait({work})  # the copy needs no store
            raise
        except Superseded:
            log.warning("version %d was superseded before it was on disk", record.version)
            return False
        except (WeightSyncError, OSError) as error:
            self._complain(board, record, error)
            return False
        except asyncio.CancelledError:
            self._give_up = True
            await asyncio.wait({work})
            raise
        self._failed.pop(record.version, None)
        self._error = None
        seconds = time.perf_counter() - started
        log.info("version %d is on disk: %d bytes in %.1f s", record.version, record.nbytes, seconds)
        return True

    async def _keep_editions(self, board: Board, age_s: float) -> bool:
        """Have those of that age on disk, and no others; whether younger ones are to come."""
        known = {edition.manifest_digest: edition for edition in board.editions}
        if known.keys() == self._editions:
            return False
        await asyncio.to_thread(self.disk.keep_editions, known.keys())
        done, young = set(self.disk.editions()), False
        own = await own_copies(self.store, self.keys, self.host) if known.keys() - done else {}
        for digest, edition in known.items():
            slot = local_slot(edition.as_part, self.host, own)
            if digest in done or slot is None or self._give_up:
                continue
            if time.time() - edition.created_at < age_s:
                young = True
                continue
            try:
                await asyncio.to_thread(self.disk.write_edition, digest, slot)
            except (WeightSyncError, OSError) as error:
                log.error("%s cannot be copied to %s: %s", edition.full_name, self.disk.directory, error)
        self._editions = None if young else set(known)
        return young

    def _complain(self, board: Board, record: VersionRecord, error: Exception) -> None:
        self.failures += 1
        epoch = board.active.epoch if board.active is not None else 0
        self._failed[record.version] = (epoch, time.monotonic())
        if not isinstance(error, WeightSyncError):
            error = PersistError(f"version {record.version} cannot be written to {self.disk.directory}: {error}")
        self._error = ErrorInfo.of(error)
        log.error("%s", error)

    async def _slots(self, record: VersionRecord) -> Mapping[str, Path]:
        own = await own_copies(self.store, self.keys, self.host)
        found = {piece.name: local_slot(piece, self.host, own) for piece in all_parts(record)}
        return {name: path for name, path in found.items() if path is not None}

    async def _tell(self, board: Board) -> None:
        """Say in the store what is here, if that has changed."""
        versions = tuple(sorted(kept.version for kept in self.disk.kept()))
        wanted = board.active.version if board.active is not None else None
        where = str(self.disk.directory)
        record = DiskRecord(
            self.host, where, versions, self.disk.nbytes, time.time(), wanted, self._error, self.failures
        )
        if self._told is None or replace(record, since=self._told.since) != self._told:
            await self.store.put(self.keys.disk(self.host), record.to_json())
            self._told = record


def yield_to_all() -> None:
    """Let every other process of this host go first, on its cores and its disks."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)


def _active(board: Board) -> VersionRecord | None:
    return board.version(board.active.version) if board.active is not None else None


def _needed(board: Board) -> list[VersionRecord]:
    """The active version, the one before and those of a split, as far as they are held."""
    active = board.active
    wanted = [active.version, active.previous, *shared_versions(active.split)] if active is not None else []
    found = [board.version(version) for version in wanted if version is not None]
    return [record for record in found if record is not None and record.state == "ready"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    yield_to_all()
    try:
        disk = Disk(options.dir, keep=options.keep, max_bytes=options.max_bytes)
        with disk.lock():
            return 0 if asyncio.run(_serve(options.store, options.model, disk)) else 1
    except WeightSyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _serve(url: str, model: str, disk: Disk) -> bool:
    """Until a signal; whether the active version is on disk then."""
    store = open_store(url, create=False)
    stopped = asyncio.Event()
    try:
        persister = Persister(store, Keys(model), disk, this_host())

        def on_signal() -> None:
            if stopped.is_set():
                persister.abandon()
            stopped.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        return await persister.run(stopped)
    finally:
        with contextlib.suppress(WeightSyncError):
            await store.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightsync.persist", description="Copy committed versions to disk."
    )
    parser.add_argument("--store", default=os.environ.get(STORE_ENV), required=STORE_ENV not in os.environ)
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--dir", type=Path, required=True, help="where the copies go")
    parser.add_argument("--keep", type=_positive, default=2, help="versions on disk (default: 2)")
    parser.add_argument("--max-bytes", type=_positive, help="bytes on disk; twice what a version takes, or more")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
