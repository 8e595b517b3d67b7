"""What was published on this host, made ready for other hosts before they are told of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from weightsync.errors import TransferError, WeightSyncError
from weightsync.hosts import local_path
from weightsync.peer.announce import copies_elsewhere
from weightsync.peer.copies import pieces
from weightsync.peer.deltas import base_for, make
from weightsync.peer.messages import Key
from weightsync.peer.settings import PeerSettings
from weightsync.peer.shelf import Shelf
from weightsync.peer.speeds import Speeds
from weightsync.peer.tickets import Tickets
from weightsync.records import Keys, PartRecord, VersionRecord
from weightsync.store.protocol import Store

log = logging.getLogger("hotswap.peer")


class Offers:
    """`changed` is called when something more may be announced: all that is not in `preparing`."""

    def __init__(
        self,
        settings: PeerSettings,
        store: Store,
        shelf: Shelf,
        tickets: Tickets,
        speeds: Speeds,
        pool: Executor,
        changed: Callable[[], None],
    ) -> None:
        self._settings, self._store, self._keys, self._shelf = settings, store, Keys(settings.model), shelf
        self._tickets, self._speeds, self._pool, self._changed = tickets, speeds, pool, changed
        self._told: set[Key] = set()  # those that the log says cannot be opened
        self.preparing: dict[Key, asyncio.Task[None]] = {}

    async def offer(self, version: VersionRecord, versions: list[VersionRecord]) -> None:
        """The slots of `version` that were published here. Raises StoreUnavailable."""
        for part in pieces(version):
            key, path = Key(part.manifest_digest), local_path(part.slot, self._settings.host)
            if path is None or key in self._shelf.published:
                continue
            if await self._published(key, path):
                known = {p.manifest_digest for v in versions for p in pieces(v)} - {key.digest}
                if others := await copies_elsewhere(self._store, self._keys, known, self._settings.host):
                    base = base_for(part, versions, self._shelf, others)
                    self.preparing[key] = asyncio.create_task(self._prepare(key, part, base))

    def stop(self) -> None:
        """What a thread is busy with goes on, and nobody is told."""
        for task in self.preparing.values():
            task.cancel()

    async def _published(self, key: Key, path: Path) -> bool:
        """Whether it is there. What cannot be opened now is looked at again, and holds up nothing else."""
        try:
            there = await asyncio.to_thread(self._shelf.publish, key, path)
        except (OSError, TransferError) as error:
            if key not in self._told:
                log.warning("%s is not offered as long as %s cannot be opened: %s", key.digest, path, error)
                self._told.add(key)
            return False
        self._told.discard(key)
        return there

    async def _prepare(self, key: Key, part: PartRecord, base: PartRecord | None) -> None:
        """Its difference from the version of before, if that is worthwhile, and the digests of its chunks."""
        try:
            if base is not None and self._speeds.is_worth_making(part.nbytes):
                await asyncio.to_thread(self._make, part, base)
                self._shelf.drop_deltas(part.name, key.digest)
            await self._tickets.digest(key)
        except (WeightSyncError, OSError) as error:  # reused meanwhile, or no room
            log.info("%s is offered in full only: %s", key.digest, error)
        except Exception:  # a fault of ours, which must not keep the version from others
            log.exception("%s is offered in full only", key.digest)
        finally:
            del self.preparing[key]
            self._changed()

    def _make(self, part: PartRecord, base: PartRecord) -> None:
        started = time.monotonic()
        if make(self._shelf, part, base, self._settings.chunk_nbytes, self._pool):
            self._speeds.make.learn(part.nbytes, time.monotonic() - started)
