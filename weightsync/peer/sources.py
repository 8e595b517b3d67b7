"""The holders that one fetch reads from: found in the store's records, opened, looked after, left out for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from weightsync.errors import ManifestError, PeerRefused, PeerUnreachable, WeightSyncError
from weightsync.peer.bitmap import BadBitmap, Bitmap
from weightsync.peer.chunks import Shape
from weightsync.peer.client import PeerClient
from weightsync.peer.messages import ALL, Key, Opened
from weightsync.peer.plan import Holder, choose
from weightsync.records import CopyRecord
from weightsync.transport import Link, Transport

log = logging.getLogger("hotswap.peer")

REFRESH_S = 0.2
PING_S = 5.0  # keeps the ticket of a holder that has everything
OPEN_AT_ONCE = 6
BUSY_S, LOST_S, STALLED_S, WRONG_S = 0.3, 2.0, 30.0, 60.0  # how long a holder is left out
DISTANCES_S = (0.003, 0.015, 0.06)  # round trips: one rack, one site, one region; farther


@dataclass
class Source:
    """A holder with a ticket there. `have` None: everything."""

    record: CopyRecord
    opened: Opened
    shape: Shape
    link: Link
    have: Bitmap | None
    active: int
    round_trip_s: float = 0.0
    asked_at: float = 0.0
    nbytes: int = 0

    @property
    def host(self) -> str:
        return self.record.host

    def holder(self) -> Holder:
        distance = sum(self.round_trip_s > limit for limit in DISTANCES_S)
        return Holder(self.host, distance, self.have, max(0, self.active - 1))


class Sources:
    """Those of one key. `offered` gives the records of now; `left_out` is kept by the caller from fetch to fetch."""

    def __init__(
        self,
        client: PeerClient,
        transport: Transport,
        key: Key,
        offered: Callable[[], Iterable[CopyRecord]],
        seed: str,
        left_out: dict[str, float],
    ) -> None:
        self._client, self._transport, self.key, self._offered = client, transport, key, offered
        self._seed, self._left_out, self._turn = seed, left_out, 0
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.open: dict[str, Source] = {}
        self.shape: Shape | None = None
        self.problem: WeightSyncError | None = None  # the last one that kept a holder from being read

    @property
    def asking(self) -> bool:
        """Whether a holder has not answered yet."""
        return bool(self._asking)

    def holders(self) -> list[Holder]:
        """What the planner chooses from."""
        return [source.holder() for source in self.open.values()]

    async def keep_fresh(self) -> None:
        """Look after them for ever."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_S)

    def refresh(self) -> None:
        """Begin to open new holders where there is room, and to ask those that are open what they have by now."""
        offered = {record.host: record for record in self._offered()}
        for source in list(self.open.values()):
            if source.host not in offered:  # its lease has ended
                self.leave(source, LOST_S)
        now = time.monotonic()
        able = [Holder(host) for host in offered if self._left_out.get(host, 0.0) < now]
        self._turn += len(self.open) < min(len(able), OPEN_AT_ONCE)
        chosen = choose(able, self._seed, OPEN_AT_ONCE, self._turn)
        for source in self.open.values():
            self._begin(source.host, self._ask(source))
        fresh = [offered[h.host] for h in chosen if h.host not in self.open]
        for record in fresh[: max(0, OPEN_AT_ONCE - len(self.open))]:
            self._begin(record.host, self._open(record))

    def leave(self, source: Source, seconds: float) -> None:
        """Read no more from it for so long; what is in flight fails."""
        self._left_out[source.host] = time.monotonic() + seconds
        if self.open.get(source.host) is source:
            del self.open[source.host]
            task = asyncio.create_task(self._end(source))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Leave all; reads in flight fail. They are told in the background: one of them may not answer."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        sources = list(self.open.values())
        for source in sources:
            self.leave(source, 0.0)
        await asyncio.gather(*(asyncio.to_thread(source.link.close) for source in sources))

    def _begin(self, host: str, work: Coroutine[Any, Any, None]) -> None:
        """One question at a time to each, and none waits for another's answer."""
        if host in self._asking:
            return work.close()
        task = self._asking[host] = asyncio.create_task(work)
        return task.add_done_callback(lambda _: self._asking.pop(host, None))

    async def _open(self, record: CopyRecord) -> None:
        host = record.host
        try:
            opened = await self._client.open(host, record.address, self.key)
            shape = Shape(opened.nbytes, opened.chunk_nbytes, opened.digests)
            have = _bitmap(opened.have, shape.chunks)
            self._require_same(host, shape)
            link = await asyncio.to_thread(self._transport.connect, opened.endpoint)
        except (PeerRefused, PeerUnreachable, ManifestError, BadBitmap, ValueError) as error:
            passing = isinstance(error, PeerRefused) and error.status == 503
            seconds = BUSY_S if passing else WRONG_S if isinstance(error, ManifestError | BadBitmap) else LOST_S
            self._left_out[host] = time.monotonic() + seconds
            self.problem = error if isinstance(error, WeightSyncError) else PeerRefused(host, 200, "bad", str(error))
            if not passing:
                log.info("%s is not read from host %s: %s", self.key.digest, host, error)
            return
        self.shape = self.shape or shape
        self.open[host] = Source(record, opened, shape, link, have, opened.active, asked_at=time.monotonic())

    def _require_same(self, host: str, shape: Shape) -> None:
        """Every byte of a slot follows from its manifest, so two hosts that say different digests: one is wrong."""
        if self.shape is not None and shape != self.shape:
            raise ManifestError(
                f"host {host} says other digests for the chunks of {self.key.digest} than hosts before it: look at "
                "the memory of both, and start all peers with the same --chunk"
            )

    async def _ask(self, source: Source) -> None:
        now = time.monotonic()
        if source.have is None and now - source.asked_at < PING_S:
            return None
        try:
            found, seconds = await self._client.have(source.host, source.record.address, source.opened.ticket)
            source.have = _bitmap(found.have, source.shape.chunks)
        except (PeerRefused, PeerUnreachable, BadBitmap) as error:
            self.problem = error
            return self.leave(source, 0.0 if isinstance(error, PeerRefused) else LOST_S)
        first = source.round_trip_s == 0.0
        source.round_trip_s = seconds if first else min(seconds, source.round_trip_s)
        source.active, source.asked_at = found.active, now
        return None

    async def _end(self, source: Source) -> None:
        await asyncio.to_thread(source.link.close)
        with contextlib.suppress(PeerRefused, PeerUnreachable):
            await self._client.close(source.host, source.record.address, source.opened.ticket, source.nbytes)


def _bitmap(have: str, chunks: int) -> Bitmap | None:
    """Raises BadBitmap."""
    return None if have == ALL else Bitmap.decoded(have, chunks)
