"""Who reads what here now. A ticket holds a slot for its reader and ends by itself when it is not used."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from weightsync.arena import SlotLock
from weightsync.errors import HostNameError, ManifestError, PeerRefused, SlotBusy, TransportUnavailable
from weightsync.hosts import check_host
from weightsync.peer.bitmap import BadBitmap
from weightsync.peer.chunks import Shape, digests_of, manifest_of
from weightsync.peer.holdings import Copy, Published
from weightsync.peer.lent import Lent
from weightsync.peer.messages import ALL, Have, Key, Open, Opened
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.shelf import Shelf
from weightsync.transport import Transport

UNUSED_S = 30.0
SWEEP_S = 1.0


@dataclass
class Ticket:
    """`lock` holds a published slot; a copy is held by the peer itself."""

    id: str
    reader: str
    found: Copy | Published
    lock: SlotLock | None
    used_at: float = field(default_factory=time.monotonic)


class Tickets:
    """At most `most` readers at a time. Belongs to the event loop."""

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
        self._lent = Lent()
        self._opening = 0
        self._digesting: dict[Key, asyncio.Lock] = {}

    async def open(self, wish: Open) -> Opened:
        """Raises PeerRefused."""
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
            return await self._admit(wish, found)
        finally:
            self._opening -= 1

    def have(self, ticket_id: str, taken: str) -> Have:
        """`taken` is a bitmap of what the reader has or is reading. Raises PeerRefused."""
        ticket = self._used(ticket_id)
        key, chunks = ticket.found.key, _shape_of(ticket.found).chunks
        try:
            self._lent.add(key, taken, chunks)
        except BadBitmap as error:
            raise self._refusal(400, "bad_request", str(error)) from error
        return Have(_encoded(ticket.found), len(self._open), self._lent.told(key, chunks))

    def manifest(self, ticket_id: str) -> bytes:
        """Of the slot, or of the one that a delta leads to. Raises PeerRefused."""
        try:
            return self._shelf.manifest(self._used(ticket_id).found.key.digest)
        except ManifestError as error:
            raise self._refusal(404, "unknown_copy", str(error)) from error

    def close(self, ticket_id: str, nbytes: int = 0, bytes_per_s: float = 0.0) -> None:
        """`nbytes` were read on it. An unknown one does no harm: it ended by itself."""
        ticket = self._open.pop(ticket_id, None)
        if ticket is None:
            return
        key = ticket.found.key
        if all(other.found.key != key for other in self._open.values()):
            self._lent.forget(key)
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
        """End what nobody has used for a while, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest = time.monotonic() - self._unused_s
            for ticket in [t for t in self._open.values() if t.used_at < oldest]:
                self.close(ticket.id)

    async def digest(self, key: Key) -> None:
        """Have the chunks of a published slot digested, once. Raises PeerRefused."""
        found = self._shelf.published.get(key)
        if found is None or found.shape is not None:
            return
        async with self._digesting.setdefault(key, asyncio.Lock()):
            if found.shape is None:
                lock = self._held(found)
                try:
                    found.shape = await asyncio.to_thread(self._digested, found.mapped.view)
                finally:
                    lock.release()
        self._digesting.pop(key, None)

    async def _admit(self, wish: Open, found: Copy | Published) -> Opened:
        lock = None
        if isinstance(found, Published):
            await self.digest(found.key)
            lock = self._held(found)
        try:
            # In a thread: a library whose process has ended is started anew for it.
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

    def _digested(self, view: memoryview) -> Shape:
        return Shape(len(view), self._chunk_nbytes, digests_of(view, self._chunk_nbytes, self._pool))

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
            lent=self._lent.told(ticket.found.key, shape.chunks),
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


def _encoded(found: Copy | Published) -> str:
    return ALL if found.have is None else found.have.encoded()


def _shape_of(found: Copy | Published) -> Shape:
    assert found.shape is not None, "digested before it is opened"
    return found.shape


def _is_host(name: str) -> bool:
    """Readers get series of their own in the metrics."""
    try:
        return bool(check_host(name))
    except HostNameError:
        return False
