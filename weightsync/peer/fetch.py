"""Reads one slot, or delta, from several holders at once into a slot of this host, chunk by chunk, each checked.

first    wait until a holder answers: how large it is, the digests of its chunks, the manifest
run      what the planner says, until all chunks are here; a holder that dies, stalls or sends wrong bytes is left out,
         and one that stalled is tried again when nobody else has what is missing
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weightsync.errors import TransferError, TransferTimedOut
from weightsync.peer.bitmap import Bitmap
from weightsync.peer.ending import to_the_end
from weightsync.peer.holdings import Copy
from weightsync.peer.left_out import LOST_S, WRONG_S
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.plan import Assignment, Planner
from weightsync.peer.source import Source
from weightsync.peer.sources import Sources
from weightsync.transport import Piece

log = logging.getLogger("hotswap.peer")

LOOK_S = 0.05  # between looks at what holders have


class ChunkMismatch(TransferError):
    """A chunk that arrived does not have its digest."""

    code = "chunk_mismatch"

    def __init__(self, host: str, chunk: int) -> None:
        self.host, self.chunk = host, chunk
        super().__init__(f"chunk {chunk} from host {host} has wrong bytes: it is read elsewhere; look at its memory")


@dataclass(frozen=True)
class Pace:
    """How much is read at once, and how long a read may take."""

    per_holder: int = 2
    total: int = 8
    read_timeout_s: float = 30.0
    limit_bytes_per_s: float | None = None


class Throttle:
    """Spreads reads so that they take no more than so many bytes a second."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._free_at = bytes_per_s, 0.0

    async def take(self, nbytes: int) -> None:
        """Return when it is this read's turn."""
        if self._rate is None:
            return
        now = time.monotonic()
        turn = max(now, self._free_at)
        self._free_at = turn + nbytes / self._rate
        await asyncio.sleep(turn - now)


async def first_answer(sources: Sources) -> Source:
    """The first holder that answers. Raises as `Sources.check`."""
    sources.begin()
    while not sources.open:
        sources.check()
        sources.refresh()
        await asyncio.sleep(LOOK_S)
    return next(iter(sources.open.values()))


class Fetch:
    """Of one copy. `run` may be cancelled: nothing is written into the slot after it has ended."""

    def __init__(
        self, copy: Copy, sources: Sources, metrics: PeerMetrics, pool: ThreadPoolExecutor, pace: Pace, seed: str
    ) -> None:
        self._copy, self._sources, self._metrics, self._pool, self._pace = copy, sources, metrics, pool, pace
        self._planner = Planner(copy.shape.chunks, seed, pace.per_holder, pace.total)
        self._throttle = Throttle(pace.limit_bytes_per_s)
        self._preamble = copy.head.preamble if copy.head is not None else b""
        self._reads: dict[asyncio.Task[None], tuple[Assignment, Source]] = {}
        self._threads: set[asyncio.Future[None]] = set()
        self._began_at: float | None = None
        self.read_from: set[str] = set()
        self.nbytes, self.seconds = 0, 0.0  # that were read, from the first read's beginning to the last one's end

    async def run(self) -> None:
        """Return when every chunk is here. Raises as `Sources.check`."""
        done = self._copy.journal.done
        self._sources.begin()
        keeping = asyncio.create_task(self._sources.keep_fresh())
        try:
            while not done.complete:
                self._begin(done)
                for task in await self._ended():
                    self._take(task)
                if keeping.done():
                    keeping.result()
                if self._reads:
                    self._sources.moved()
                self._sources.check()
        finally:
            keeping.cancel()
            for task in self._reads:
                task.cancel()
            await to_the_end(self._settle())

    async def _settle(self) -> None:
        """Close the links, so that reads in flight end, and wait for their threads: they write into the slot."""
        await self._sources.close()
        if self._threads:
            await asyncio.wait(self._threads)

    def _begin(self, done: Bitmap) -> None:
        """What the planner says."""
        taken, flying = done.bits, [read for read, _ in self._reads.values()]
        begun = self._planner.next(self._sources.holders(), done, flying)
        for read in begun:
            source = self._sources.open[read.host]
            source.reads += 1
            self._reads[asyncio.create_task(self._read(read.chunk, source))] = read, source
        for read in flying + begun:
            taken |= 1 << read.chunk
        self._sources.taken = taken

    async def _ended(self) -> set[asyncio.Task[None]]:
        if not self._reads:
            await asyncio.sleep(LOOK_S)
            return set()
        ended, _ = await asyncio.wait(self._reads, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        return ended

    async def _read(self, chunk: int, source: Source) -> None:
        """Raises TransferError."""
        start, end = self._copy.shape.bounds(chunk)
        await self._throttle.take(end - start)
        self._began_at = self._began_at or time.monotonic()
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(self._pool, self._read_now, source, chunk)
        self._threads.add(thread)
        thread.add_done_callback(self._over)
        await asyncio.shield(thread)

    def _over(self, thread: asyncio.Future[None]) -> None:
        self._threads.discard(thread)
        if not thread.cancelled():
            thread.exception()  # of a read that was cancelled nobody else asks it

    def _read_now(self, source: Source, chunk: int) -> None:
        """In a thread. The first bytes of a slot stay as they are: they come last."""
        start, end = self._copy.shape.bounds(chunk)
        start = max(start, len(self._preamble))
        if start < end:
            into, piece = self._copy.mapped.region, Piece(start, start, end - start)
            source.link.read(into, source.opened.region, [piece], self._pace.read_timeout_s)
        if not self._copy.shape.is_right(self._copy.mapped.view, chunk, self._preamble):
            raise ChunkMismatch(source.host, chunk)

    def _take(self, task: asyncio.Task[None]) -> None:
        read, source = self._reads.pop(task)
        source.reads -= 1
        error = task.exception()
        if error is None:
            return self._came(read.chunk, source)
        if not isinstance(error, TransferError):
            raise error
        if self._sources.open.get(read.host) is source:  # else it was left, which ended this read
            self._lost(read, source, error)
        return None

    def _came(self, chunk: int, source: Source) -> None:
        start, end = self._copy.shape.bounds(chunk)
        self._copy.journal.add(chunk)
        self._metrics.received.labels(source.host).inc(end - start)
        self._sources.came(source, end - start)
        self.read_from.add(source.host)
        self.nbytes += end - start
        self.seconds = time.monotonic() - (self._began_at or 0.0)
        self._sources.bytes_per_s = self.nbytes / max(self.seconds, 1e-6)

    def _lost(self, read: Assignment, source: Source, error: TransferError) -> None:
        self._metrics.refetched.labels(_reason(error), read.host).inc()
        self._sources.problem = error
        log.warning("chunk %d of %s: %s", read.chunk, self._copy.key.digest, error)
        if isinstance(error, TransferTimedOut):
            self._sources.stalled(source)
        else:
            self._sources.leave(source, WRONG_S if isinstance(error, ChunkMismatch) else LOST_S)


def _reason(error: TransferError) -> str:
    if isinstance(error, ChunkMismatch):
        return "digest"
    return "timeout" if isinstance(error, TransferTimedOut) else "failed"
