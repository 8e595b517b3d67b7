"""Serving: this host offers what was published here, and a ticket admits each reader.

A ticket holds a slot for its reader and ends by itself when it is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weightsync.control.hosts import check_host, local_path
from weightsync.control.records import PartRecord
from weightsync.errors import ManifestError, PeerError, PeerRefused, SlotBusy, TransferError, TransportUnavailable
from weightsync.memory.arena import SlotLock
from weightsync.peer.chunks import Shape, digests_of, manifest_of
from weightsync.peer.messages import ALL, Have, Open, Opened
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.plan import halves
from weightsync.peer.shelf import Copy, Published, Shelf
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

UNUSED_S = 30.0  # after which a ticket ends by itself
SWEEP_S = 1.0
NEWS_S = 0.5  # how long an answer waits for news


class Offers:
    """Puts what was published on this host on the shelf."""

    def __init__(self, host: str, shelf: Shelf) -> None:
        self._host, self._shelf = host, shelf
        self._told: set[str] = set()  # slots that were logged as impossible to open

    async def offer(self, parts: Iterable[PartRecord]) -> None:
        """Those of `parts` that were published here."""
        for part in parts:
            digest, path = part.manifest_digest, local_path(part.slot, self._host)
            if part.shares:
                await self._shared(part, digest, path)
            elif path is not None and digest not in self._shelf.published:
                await self._publish(digest, path)

    async def _shared(self, part: PartRecord, digest: str, path: Path | None) -> None:
        """A slot some chunks of which are on other hosts. Once it is whole where it was published, it is as any."""
        if digest in self._shelf.published or (path is None and self._host not in part.shares):
            return
        if path is not None and digest in self._shelf.copies:
            self._shelf.hand_back(digest, path)
        elif self._shelf.find(digest) is None and not await asyncio.to_thread(self._shelf.take_share, digest) and path:
            await self._publish(digest, path)

    async def _publish(self, digest: str, path: Path) -> None:
        """A slot that cannot be opened is tried again later and does not hold up others."""
        try:
            await asyncio.to_thread(self._shelf.publish, digest, path)
        except (OSError, TransferError) as error:
            if digest not in self._told:
                log.warning("%s is not offered as long as %s cannot be opened: %s", digest, path, error)
                self._told.add(digest)
        else:
            self._told.discard(digest)


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
    ) -> None:
        self._host, self._shelf, self._transport, self._metrics, self._pool = host, shelf, transport, metrics, pool
        self._chunk_nbytes, self._most, self._unused_s = chunk_nbytes, most, unused_s
        self._open: dict[str, Ticket] = {}
        self._opening = 0
        self._digesting: dict[str, asyncio.Lock] = {}

    async def open(self, wish: Open, *, told: bool) -> Opened:
        """`told`: the reader checks chunks by the manifest, if that has what it takes. Raises PeerRefused."""
        if not _is_host(wish.reader):
            raise self._refusal(400, "bad_request", f"{wish.reader[:64]!r} is no name of a host; give it HOTSWAP_HOST")
        there = wish.model == self._shelf.model and not wish.delta_of
        found = self._shelf.find(wish.digest) if there else None
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
        """The chunks readable by now; with `tree` this waits for news there, at most NEWS_S. Raises PeerRefused."""
        ticket = self._used(ticket_id)
        if tree is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await _news(ticket, halves(_shape_of(ticket.found).chunks)[tree])
        ticket.told = ticket.found.have.bits if ticket.found.have is not None else 0
        return Have(_encoded(ticket.found), len(self._open))

    def manifest(self, ticket_id: str) -> bytes:
        """Raises PeerRefused."""
        try:
            return self._shelf.manifest(self._used(ticket_id).found.digest)
        except ManifestError as error:
            raise self._refusal(404, "unknown_copy", str(error)) from error

    def close(self, ticket_id: str, nbytes: int = 0) -> None:
        """The reader has read `nbytes` on it. An unknown ticket is ignored: it has ended by itself."""
        ticket = self._open.pop(ticket_id, None)
        if ticket is None:
            return
        self._metrics.readers.set(len(self._open))
        self._metrics.sent.labels(ticket.reader).inc(nbytes)
        if ticket.lock is not None:
            ticket.lock.release()

    def close_all(self, digest: str | None = None) -> None:
        """End the tickets for a slot, or all."""
        for ticket in list(self._open.values()):
            if digest is None or ticket.found.digest == digest:
                self.close(ticket.id)

    async def sweep(self) -> None:
        """For ever, end the tickets that nobody has used for a while."""
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest = time.monotonic() - self._unused_s
            for ticket in [t for t in self._open.values() if t.used_at < oldest]:
                self.close(ticket.id)

    async def _digest(self, found: Copy | Published) -> None:
        """Once, while nobody can reuse the slot. Raises PeerRefused."""
        async with self._digesting.setdefault(found.digest, asyncio.Lock()):
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
        self._digesting.pop(found.digest, None)

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
            if self._shelf.find(wish.digest) is not found:
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
            manifest_of(found.mapped.view, found.digest)
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
    except PeerError:
        return False
