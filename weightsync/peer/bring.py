"""Brings one slot here: finds holders, takes its difference from a slot that is here or all of it, and checks it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weightsync.errors import DigestMismatch, ManifestError, PeerRefused, PeerUnreachable, WeightSyncError
from weightsync.manifest import PREAMBLE
from weightsync.peer import deltas
from weightsync.peer.announce import CopyBoard
from weightsync.peer.chunks import Head, Shape
from weightsync.peer.client import PeerClient
from weightsync.peer.ending import Background, to_the_end
from weightsync.peer.fetch import Fetch, first_answer
from weightsync.peer.holdings import Copy
from weightsync.peer.left_out import LOST_S, WRONG_S, LeftOut
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.settings import PeerSettings
from weightsync.peer.shelf import Shelf
from weightsync.peer.source import Source
from weightsync.peer.sources import Sources
from weightsync.peer.speeds import Speeds
from weightsync.records import PartRecord
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

GOODBYE_S = 2.0


class Bring:
    """One slot at a time. Belongs to the event loop; what it does to a slot has ended when a call to it has."""

    def __init__(
        self,
        settings: PeerSettings,
        shelf: Shelf,
        client: PeerClient,
        transport: Transport,
        board: CopyBoard,
        metrics: PeerMetrics,
        speeds: Speeds,
    ) -> None:
        self._settings, self._shelf, self._client, self._transport = settings, shelf, client, transport
        self._board, self._metrics, self._speeds = board, metrics, speeds
        self._pool = ThreadPoolExecutor(settings.pace.total, thread_name_prefix="peer-read")
        self._left_out: dict[Key, LeftOut] = {}
        self._background = Background()
        self.waiting: Sources | None = None  # while it depends on holders

    async def slot(self, key: Key, part: PartRecord, begun: Callable[[], None]) -> str:
        """Returns how it came, "full" or "delta"; `begun` is called when there is a slot for it.

        Raises ArenaError, DigestMismatch, ManifestError, NoHolder, PeerRefused, PeerUnreachable, OSError.
        """
        sources = self._sources(key, patient=True)
        try:
            with self._waits_for(sources):
                first = await first_answer(sources)
            head = await self._head(key, first)
            copy = await self._claim(key, part, first.shape, head)
            begun()
            if not len(copy.journal.done) and await self._came_as_delta(key, part, copy, sources):
                return "delta"
            fetch = await self._read(copy, sources)
        finally:
            await sources.close()
        try:
            await to_the_end(asyncio.to_thread(_finish, copy, head, self._pool))
        except DigestMismatch:
            for host in fetch.read_from:
                self._leave(key, host, WRONG_S)
            self._shelf.drop(key)
            raise
        self._left_out.pop(key, None)
        return "full"

    def has_others(self, key: Key) -> bool:
        """Whether some host that is not left out offers it."""
        left_out = self._left_out.get(key, LeftOut())
        return any(left_out.is_able(record.host, needed=False) for record in self._board.offered(key))

    def keep_to(self, wanted: set[Key]) -> None:
        """Forget who is left out for what is not wanted."""
        for key in [key for key in self._left_out if Key(key.digest) not in wanted]:
            del self._left_out[key]

    async def close(self) -> None:
        """When nothing is being brought any more. Holders are told: they have places for few readers."""
        await self._background.end(GOODBYE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sources(self, key: Key, *, patient: bool) -> Sources:
        left_out = self._left_out.setdefault(key, LeftOut())
        return Sources(
            self._client, self._transport, key, lambda: self._board.offered(key), left_out, self._background,
            seed=self._settings.host, rack=self._settings.rack, patient=patient,
        )  # fmt: skip

    def _leave(self, key: Key, host: str, seconds: float) -> None:
        self._left_out.setdefault(key, LeftOut()).leave(host, seconds)

    @contextlib.contextmanager
    def _waits_for(self, sources: Sources) -> Iterator[None]:
        self.waiting = sources
        try:
            yield
        finally:
            self.waiting = None

    async def _head(self, key: Key, first: Source) -> Head:
        """Raises ManifestError, PeerRefused, PeerUnreachable; then `first` is not asked again at once."""
        try:
            raw = await self._client.manifest(first.host, first.record.address, first.opened.ticket)
            return Head.parse(raw, key.digest, first.shape.nbytes)
        except (ManifestError, PeerRefused, PeerUnreachable) as error:
            self._leave(key, first.host, WRONG_S if isinstance(error, ManifestError) else LOST_S)
            raise

    async def _read(self, copy: Copy, sources: Sources) -> Fetch:
        fetch = Fetch(copy, sources, self._metrics, self._pool, self._settings.pace, self._settings.host)
        with self._waits_for(sources):
            await fetch.run()
        self._speeds.fetched(fetch.read_from, fetch.nbytes, fetch.seconds)
        return fetch

    async def _came_as_delta(self, key: Key, part: PartRecord, slot: Copy, full: Sources) -> bool:
        """Try the difference from a slot that is here, if somebody offers it and it pays; False: fetch all of it."""
        offers = {record.delta_of for record in self._board.offered(key) if record.delta_of}
        base = next((b for digest in offers if (b := self._shelf.find(Key(digest))) and b.have is None), None)
        if base is None or self._speeds.deltas == "never":
            return False
        wish = Key(key.digest, base.key.digest)
        sources = self._sources(wish, patient=False)
        try:
            with self._waits_for(sources):
                first = await first_answer(sources)
            offering = [record.host for record in self._board.offered(wish)]
            if not self._speeds.is_worth_reading(first.shape.nbytes, slot.nbytes, offering):
                return False
            await full.close()  # its tickets are for others meanwhile
            delta = await self._claim(wish, part, first.shape, None)
            await self._read(delta, sources)
            await to_the_end(asyncio.to_thread(self._apply, delta, base.path, slot))
        except (WeightSyncError, OSError) as error:
            log.warning("%s does not come as a delta, but in full: %s", key.digest, error)
            self._shelf.drop(wish)
            return False
        finally:
            await sources.close()
        return True

    def _apply(self, delta: Copy, base: Path, slot: Copy) -> None:
        started = time.monotonic()
        assert slot.head is not None, "claimed with its manifest"
        deltas.apply(delta, base, slot, slot.head)
        delta.whole = True
        self._speeds.apply.learn(slot.nbytes, time.monotonic() - started)

    async def _claim(self, key: Key, part: PartRecord, shape: Shape, head: Head | None) -> Copy:
        copy = self._shelf.copies.get(key)
        if copy is not None and copy.shape == shape:
            return copy  # begun before, and put off for something more urgent
        self._shelf.drop(key)
        claimed, resumed = await to_the_end(asyncio.to_thread(self._shelf.claim, key, part.name, shape, head))
        self._metrics.resumed.inc(resumed)
        return claimed


def _finish(copy: Copy, head: Head, pool: ThreadPoolExecutor) -> None:
    """Check all that was read against the manifest, then write what makes it a slot. Raises DigestMismatch."""
    view = copy.mapped.view
    if bytes(view[PREAMBLE : PREAMBLE + len(head.raw)]) != head.raw:
        raise DigestMismatch("(manifest)", head.digest, "another one")
    if wrong := head.wrong_tensors(view, pool):
        raise DigestMismatch(wrong[0], head.manifest.tensors[wrong[0]].digest, "another one")
    view[:PREAMBLE] = head.preamble
    copy.whole = True
