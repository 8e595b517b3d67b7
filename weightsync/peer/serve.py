"""Serving: this host offers what was published here, and a ticket admits each reader.

A ticket holds a slot for its reader and ends by itself when it is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weightsync.control.hosts import check_host, local_path
from weightsync.control.records import Keys, PartRecord, VersionRecord
from weightsync.errors import (
    HostNameError,
    ManifestError,
    PeerRefused,
    SlotBusy,
    TransferError,
    TransportUnavailable,
    WeightSyncError,
)
from weightsync.memory.arena import SlotLock
from weightsync.peer.chunks import Shape, digests_of, manifest_of
from weightsync.peer.copies import all_parts, copies_elsewhere
from weightsync.peer.deltas import Speeds, base_for, make
from weightsync.peer.messages import ALL, Have, Key, Open, Opened
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.plan import halves
from weightsync.peer.settings import PeerSettings
from weightsync.peer.shelf import Copy, Published, Shelf
from weightsync.store.protocol import Store
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

UNUSED_S = 30.0  # after which a ticket ends by itself
SWEEP_S = 1.0
NEWS_S = 0.5  # how long an answer waits for news


class Offers:
    """Prepares what was published on this host before other hosts are told of it.

    Everything that is not in `preparing` may be announced; `changed` is called when that grows.
    """

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
        self._told: set[Key] = set()  # slots that were logged as impossible to open
        self.preparing: dict[Key, asyncio.Task[None]] = {}

    async def offer(self, version: VersionRecord, versions: list[VersionRecord]) -> None:
        """The slots of `version` that were published here. Raises StoreUnavailable."""
        for part in all_parts(version):
            key, path = Key(part.manifest_digest), local_path(part.slot, self._settings.host)
            if part.shares:
                await self._shared(part, key, path)
                continue
            if path is None or key in self._shelf.published:
                continue
            if await self._published(key, path):
                known = {p.manifest_digest for v in versions for p in all_parts(v)} - {key.digest}
                if others := await copies_elsewhere(self._store, self._keys, known, self._settings.host):
                    base = base_for(part, versions, self._shelf, others)
                    self.preparing[key] = asyncio.create_task(self._prepare(key, part, base))

    async def _shared(self, part: PartRecord, key: Key, path: Path | None) -> None:
        """A slot some chunks of which are on other hosts. Once it is whole where it was published, it is as any."""
        if key in self._shelf.published or (path is None and self._settings.host not in part.shares):
            return
        if path is not None and key in self._shelf.copies:
            self._shelf.hand_back(key, path)
        elif self._shelf.find(key) is None and not await asyncio.to_thread(self._shelf.take_share, key) and path:
            await self._published(key, path)

    def stop(self) -> None:
        """Stop preparing. Work in a thread runs to its end, unannounced."""
        for task in self.preparing.values():
            task.cancel()

    async def _published(self, key: Key, path: Path) -> bool:
        """Whether the slot is there. One that cannot be opened is tried again later and does not hold up others."""
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
        """Make its difference from the version before, if that is worthwhile, and have its chunks known."""
        try:
            if base is not None and self._speeds.is_worth_making(part.nbytes):
                await asyncio.to_thread(self._make, part, base)
                self._shelf.drop_deltas(part.name, key.digest)
            await self._tickets.know(key)
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


@dataclass
class Ticket:
    """`lock` holds a published slot; a copy is held by the peer itself."""

    id: str
    reader: str
    found: Copy | Published
    lock: SlotLock | None
    told: int = 0  # bits of the chunks that the reader was told of
    used_at: float = field(default_factory=time.monotonic)


class Tickets:
    """The readers of slots here: at most `most` at a time. Belongs to the event loop."""

    def __init__(
        self,
        host: str,
        shelf: Shelf,
        transport: Transport,
        metrics: PeerMetrics,
        pool: Executor,
        *,
        chunk_nbytes: int,
        most: int,
        unused_s: float = UNUSED_S,
        told: Callable[[str, float], None] = lambda reader, bytes_per_s: None,
    ) -> None:
        """`told` is called with a reader and how fast it says that it reads."""
        self._host, self._shelf, self._transport, self._metrics, self._pool = host, shelf, transport, metrics, pool
        self._chunk_nbytes, self._most, self._unused_s, self._told = chunk_nbytes, most, unused_s, told
        self._open: dict[str, Ticket] = {}
        self._opening = 0
        self._digesting: dict[Key, asyncio.Lock] = {}

    async def open(self, wish: Open, *, told: bool) -> Opened:
        """`told`: the reader checks chunks by the manifest, if that has what it takes. Raises PeerRefused."""
        if not _is_host(wish.reader):
            raise self._refusal(400, "bad_request", f"{wish.reader[:64]!r} is no name of a host; give it HOTSWAP_HOST")
        found = self._shelf.find(wish.key) if wish.model == self._shelf.model else None
        if found is None:
            raise self._refusal(404, "unknown_copy", f"{wish.digest} is not here; ask another host")
        if self._transport.name not in wish.transports:
            mine = self._transport.name
            raise self._refusal(
                409, "no_common_transport", f"this host serves {mine}: start all peers with --transport {mine}"
            )
        if len(self._open) + self._opening >= self._most:
            raise self._refusal(503, "busy", f"{self._most} readers are here already; ask another host, or later")
        self._opening += 1
        try:
            return await self._admit(wish, found, told=told)
        finally:
            self._opening -= 1

    async def have(self, ticket_id: str, tree: Literal[0, 1] | None = None) -> Have:
        """What can be read by now; with `tree` this waits for news there, at most NEWS_S. Raises PeerRefused."""
        ticket = self._used(ticket_id)
        if tree is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await _news(ticket, halves(_shape_of(ticket.found).chunks)[tree])
        ticket.told = ticket.found.have.bits if ticket.found.have is not None else 0
        return Have(_encoded(ticket.found), len(self._open))

    def manifest(self, ticket_id: str) -> bytes:
        """Of the slot, or of the one that a delta leads to. Raises PeerRefused."""
        try:
            return self._shelf.manifest(self._used(ticket_id).found.key.digest)
        except ManifestError as error:
            raise self._refusal(404, "unknown_copy", str(error)) from error

    def close(self, ticket_id: str, nbytes: int = 0, bytes_per_s: float = 0.0) -> None:
        """The reader has read `nbytes` on it. An unknown ticket is ignored: it has ended by itself."""
        ticket = self._open.pop(ticket_id, None)
        if ticket is None:
            return
        self._told(ticket.reader, bytes_per_s)
        self._metrics.readers.set(len(self._open))
        self._metrics.sent.labels(ticket.reader).inc(nbytes)
        if ticket.lock is not None:
            ticket.lock.release()

    def close_all(self, key: Key | None = None) -> None:
        """End the tickets for `key`, or all."""
        for ticket in list(self._open.values()):
            if key is None or ticket.found.key == key:
                self.close(ticket.id)

    async def sweep(self) -> None:
        """For ever, end the tickets that nobody has used for a while."""
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest = time.monotonic() - self._unused_s
            for ticket in [t for t in self._open.values() if t.used_at < oldest]:
                self.close(ticket.id)

    async def know(self, key: Key) -> None:
        """Have the chunks of a published slot digested, unless its manifest tells of them. Raises PeerRefused."""
        found = self._shelf.published.get(key)
        if found is not None and found.shape is None:
            await self._digest(found)

    async def _digest(self, found: Copy | Published) -> None:
        """Once, while nobody can reuse the slot. Raises PeerRefused."""
        async with self._digesting.setdefault(found.key, asyncio.Lock()):
            if found.shape is None or not found.shape.digests:
                if found.have is not None:
                    raise self._refusal(503, "busy", "it is being fetched; ask again, or another host")
                lock = self._held(found) if isinstance(found, Published) else None
                try:
                    chunk_nbytes = found.shape.chunk_nbytes if found.shape is not None else self._chunk_nbytes
                    found.shape = await asyncio.to_thread(self._digested, found.mapped.view, chunk_nbytes)
                finally:
                    if lock is not None:
                        lock.release()
        self._digesting.pop(found.key, None)

    async def _admit(self, wish: Open, found: Copy | Published, *, told: bool) -> Opened:
        lock = None
        if found.shape is None or not (told or found.shape.digests):
            await self._digest(found)
        if isinstance(found, Published):
            lock = self._held(found)
        try:
            # In a thread: NIXL is started anew for it if its process has ended.
            endpoint, region = await asyncio.to_thread(
                lambda: (self._transport.endpoint, found.mapped.region.descriptor)
            )
            if self._shelf.find(wish.key) is not found:
                raise self._refusal(404, "unknown_copy", f"{wish.digest} has just been dropped here; ask another host")
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, TransportUnavailable):
                raise self._refusal(503, "busy", str(error)) from error
            raise
        ticket = Ticket(secrets.token_urlsafe(16), wish.reader, found, lock)
        self._open[ticket.id] = ticket
        self._metrics.readers.set(len(self._open))
        return self._opened(ticket, endpoint, region)

    def _held(self, found: Published) -> SlotLock:
        """Raises PeerRefused."""
        try:
            lock = SlotLock.shared(found.path)
        except SlotBusy:
            raise self._refusal(503, "busy", "the slot is being looked at for reuse; ask again") from None
        try:
            manifest_of(found.mapped.view, found.key.digest)
            return lock
        except BaseException as error:
            lock.release()
            if isinstance(error, ManifestError):
                raise self._refusal(404, "unknown_copy", str(error)) from error
            raise

    def _digested(self, view: memoryview, chunk_nbytes: int) -> Shape:
        return Shape(len(view), chunk_nbytes, digests_of(view, chunk_nbytes, self._pool))

    def _opened(self, ticket: Ticket, endpoint: bytes, region: bytes) -> Opened:
        shape = _shape_of(ticket.found)
        return Opened(
            nbytes=shape.nbytes,
            chunk_nbytes=shape.chunk_nbytes,
            digests=shape.digests,
            have=_encoded(ticket.found),
            active=len(self._open),
            transport=self._transport.name,
            endpoint=endpoint,
            region=region,
            ticket=ticket.id,
        )

    def _used(self, ticket_id: str) -> Ticket:
        ticket = self._open.get(ticket_id)
        if ticket is None:
            raise self._refusal(404, "unknown_ticket", "the ticket has ended; open the copy again")
        ticket.used_at = time.monotonic()
        return ticket

    def _refusal(self, status: int, code: str, message: str) -> PeerRefused:
        self._metrics.refused.labels(code).inc()
        return PeerRefused(self._host, status, code, message)


async def _news(ticket: Ticket, chunks: int) -> None:
    """Until there is one of `chunks`, bits, of which the reader was not told."""
    while (have := ticket.found.have) is not None and not have.bits & chunks & ~ticket.told:
        await ticket.found.grew.wait()


def _encoded(found: Copy | Published) -> str:
    return ALL if found.have is None else found.have.encoded()


def _shape_of(found: Copy | Published) -> Shape:
    assert found.shape is not None, "known before it is opened"
    return found.shape


def _is_host(name: str) -> bool:
    """Whether it is a host name: each reader gets a series of its own in the metrics."""
    try:
        return bool(check_host(name))
    except HostNameError:
        return False
