"""Reads one slot, or delta, from several holders at once into a slot of this host, chunk by chunk, each checked.

first    wait until a holder answers: how large it is, the digests of its chunks, the manifest
run      what the planner says, until all chunks are here; a holder that dies, stalls or sends wrong bytes is left out
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weightsync.errors import PeerError, TransferError, TransferFailed, TransferTimedOut, WeightSyncError
from weightsync.peer.client import OPEN_S
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.plan import Assignment, Planner
from weightsync.peer.shelf import Copy
from weightsync.peer.sources import LOST_S, STALLED_S, WRONG_S, Source, Sources
from weightsync.transport import Piece

log = logging.getLogger("hotswap.peer")

LOOK_S = 0.05  # between looks at what holders have
SILENT_S = 3.0  # without a holder that has what is missing


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


class NoHolder(PeerError):
    """Nobody who has what is missing can be read from now."""

    code = "no_holder"

    def __init__(self, digest: str, why: WeightSyncError | None) -> None:
        reason = f"the last one: {why}" if why is not None else "is `hotswap peer` running where it was published?"
        super().__init__(f"no host that has {digest} can be read from; {reason}")


async def first_answer(sources: Sources) -> Source:
    """The first holder that answers. Raises NoHolder."""
    since = time.monotonic()
    while not sources.open:
        if time.monotonic() - since > (SILENT_S if not sources.asking else OPEN_S):
            raise NoHolder(sources.key.digest, sources.problem)
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
        self._threads: set[asyncio.Future[None]] = set()
        self.read_from: set[str] = set()

    async def run(self) -> None:
        """Return when every chunk is here. Raises NoHolder when nothing came for a while."""
        done, reads = self._copy.journal.done, dict[asyncio.Task[None], Assignment]()
        keeping = asyncio.create_task(self._sources.keep_fresh())
        moved_at = time.monotonic()
        try:
            while not done.complete:
                for begun in self._planner.next(self._sources.holders(), done, list(reads.values())):
                    reads[asyncio.create_task(self._read(begun))] = begun
                ended = await self._next(list(reads))
                for task in ended:
                    self._take(reads.pop(task), task)
                if reads:
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > SILENT_S:
                    raise NoHolder(self._copy.key.digest, self._sources.problem)
        finally:
            keeping.cancel()
            for task in reads:
                task.cancel()
            await asyncio.shield(self._settle())

    async def _settle(self) -> None:
        """Close the links, so that reads in flight end, and wait for their threads: they write into the slot."""
        await self._sources.close()
        if self._threads:
            await asyncio.wait(self._threads)

    async def _next(self, reads: list[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        if not reads:
            await asyncio.sleep(LOOK_S)
            return set()
        ended, _ = await asyncio.wait(reads, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        return ended

    async def _read(self, begun: Assignment) -> None:
        """Raises TransferError."""
        source = self._sources.open.get(begun.host)
        start, end = self._copy.shape.bounds(begun.chunk)
        await self._throttle.take(end - start)
        if source is None:
            raise TransferFailed(begun.host, "it was left before the read began")
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(self._pool, self._read_now, source, begun.chunk)
        self._threads.add(thread)
        thread.add_done_callback(self._threads.discard)
        await asyncio.shield(thread)
        source.nbytes += end - start
        self._metrics.received.labels(begun.host).inc(end - start)

    def _read_now(self, source: Source, chunk: int) -> None:
        """In a thread. The first bytes of a slot stay as they are: they come last."""
        start, end = self._copy.shape.bounds(chunk)
        start = max(start, len(self._preamble))
        if start < end:
            into, piece = self._copy.mapped.region, Piece(start, start, end - start)
            source.link.read(into, source.opened.region, [piece], self._pace.read_timeout_s)
        if not self._copy.shape.is_right(self._copy.mapped.view, chunk, self._preamble):
            raise ChunkMismatch(source.host, chunk)

    def _take(self, read: Assignment, task: asyncio.Task[None]) -> None:
        error = task.exception()
        if error is None:
            self.read_from.add(read.host)
            return self._copy.journal.add(read.chunk)
        if not isinstance(error, TransferError):
            raise error
        source = self._sources.open.get(read.host)
        self._metrics.refetched.labels(_reason(error), read.host).inc()
        self._sources.problem = error
        log.warning("chunk %d of %s: %s", read.chunk, self._copy.key.digest, error)
        if source is not None:
            self._sources.leave(source, _seconds_out(error))
        return None


def _seconds_out(error: TransferError) -> float:
    if isinstance(error, ChunkMismatch):
        return WRONG_S
    return STALLED_S if isinstance(error, TransferTimedOut) else LOST_S


def _reason(error: TransferError) -> str:
    if isinstance(error, ChunkMismatch):
        return "digest"
    return "timeout" if isinstance(error, TransferTimedOut) else "failed"
