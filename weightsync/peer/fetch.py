"""Brings one slot to this host: finds holders, reads the slot, and checks it.

`Bring` does it all for one slot. `Fetch` reads it chunk by chunk, from several holders at once: it does what the
planner says until all chunks are here. A holder that dies, stalls or sends wrong bytes is left out; one that
stalled is tried again when nobody else has what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from weightsync.control.hosts import host_of
from weightsync.control.records import PartRecord
from weightsync.errors import (
    ManifestError,
    PeerRefused,
    PeerUnreachable,
    StoreError,
    TensorError,
    TransferError,
    digest_mismatch,
)
from weightsync.format.manifest import PREAMBLE
from weightsync.peer.chunks import Bitmap, Head, Shape
from weightsync.peer.control import PeerClient
from weightsync.peer.copies import CopyBoard
from weightsync.peer.holders import LOST_S, WRONG_S, Background, LeftOut, Source, Sources, Ways, other_chunks
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.plan import Assignment, Planner, feeders
from weightsync.peer.settings import Pace, PeerSettings
from weightsync.peer.shelf import Copy, Shelf
from weightsync.transport import Piece, Transport

log = logging.getLogger("hotswap.peer")

GOODBYE_S = 2.0  # how long `close` waits for holders to be told
LOOK_S = 0.05  # between looks at what holders have
T = TypeVar("T")


class Bring:
    """Brings one slot at a time. Belongs to the event loop. When a call has ended, so has all that it did to a slot."""

    def __init__(
        self,
        settings: PeerSettings,
        shelf: Shelf,
        client: PeerClient,
        transport: Transport,
        board: CopyBoard,
        hosts: Callable[[PartRecord], Awaitable[list[tuple[str, str]]]],
        metrics: PeerMetrics,
    ) -> None:
        """`hosts`: (rack, host) of those that need the same of a slot as this one. It raises StoreUnavailable."""
        self._settings, self._shelf, self._client, self._transport = settings, shelf, client, transport
        self._board, self._hosts, self._metrics = board, hosts, metrics
        self._pool = ThreadPoolExecutor(settings.pace.total, thread_name_prefix="peer-read")
        self._left_out: dict[str, LeftOut] = {}
        self._background = Background()
        self.waiting: Sources | None = None  # while it depends on holders

    async def slot(self, part: PartRecord, begun: Callable[[], None]) -> None:
        """`begun` is called when there is a slot for it.

        Raises ArenaError, TensorError, ManifestError, PeerError, PeerRefused, PeerUnreachable, OSError.
        """
        digest = part.manifest_digest
        sources = await self._sources(part)
        try:
            with self._waits_for(sources):
                first = await first_answer(sources)
            head = await self._head(digest, first)
            copy = await self._claim(part, head.shape or first.shape, head)
            begun()
            fetch = await self._read(copy, sources)
        finally:
            await sources.close()
        try:
            await to_the_end(asyncio.to_thread(_finish, copy, head, self._pool))
        except TensorError:
            for host in fetch.read_from:
                self._leave(digest, host, WRONG_S)
            self._shelf.drop(digest)
            raise
        self._left_out.pop(digest, None)

    def has_others(self, digest: str) -> bool:
        """Whether a host that is not left out offers it."""
        left_out = self._left_out.get(digest, LeftOut())
        return any(left_out.is_able(record.host, needed=False) for record in self._board.offered(digest))

    def keep_to(self, wanted: set[str]) -> None:
        """Forget which hosts were left out for slots that are not wanted any more."""
        for digest in self._left_out.keys() - wanted:
            del self._left_out[digest]

    async def close(self) -> None:
        """Call after the last fetch: waits until the holders have been told that their tickets are free again."""
        await self._background.end(GOODBYE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _ways(self, part: PartRecord) -> Ways:
        """Up the trees over all hosts that need the same, as of now; none while the store is away."""
        try:
            hosts = await self._hosts(part)
        except StoreError:
            return ()
        me, source = self._settings.host, host_of(part.slot) or ""
        if me in part.shares:
            return ()  # it has what others lack: it feeds those at the top, beside the source
        below = [(rack, host) for rack, host in hosts if host not in part.shares]
        return feeders([*below, (self._settings.rack, me)], source, me)

    async def _sources(self, part: PartRecord) -> Sources:
        digest, ways = part.manifest_digest, await self._ways(part)
        writers = (host_of(part.slot), *part.shares) if part.shares else ()
        left_out = self._left_out.setdefault(digest, LeftOut())
        return Sources(
            self._client, self._transport, digest, lambda: self._board.offered(digest), left_out, self._background,
            seed=self._settings.host, rack=self._settings.rack, ways=ways, writers=writers,
        )  # fmt: skip

    def _leave(self, digest: str, host: str, seconds: float) -> None:
        self._left_out.setdefault(digest, LeftOut()).leave(host, seconds)

    @contextlib.contextmanager
    def _waits_for(self, sources: Sources) -> Iterator[None]:
        self.waiting = sources
        try:
            yield
        finally:
            self.waiting = None

    async def _head(self, digest: str, first: Source) -> Head:
        """The manifest, from the first holder. If it fails, that holder is left out for a while.

        Raises ManifestError, PeerRefused, PeerUnreachable.
        """
        try:
            raw = await self._client.manifest(first.host, first.record.address, first.opened.ticket)
            head = await asyncio.to_thread(Head.parse, raw, digest, first.shape.nbytes)
            if not (head.shape.agrees(first.shape) if head.shape is not None else first.shape.digests):
                raise other_chunks(first.host, digest)
            return head
        except (ManifestError, PeerRefused, PeerUnreachable) as error:
            self._leave(digest, first.host, WRONG_S if isinstance(error, ManifestError) else LOST_S)
            raise

    async def _read(self, copy: Copy, sources: Sources) -> Fetch:
        settled = partial(self._shelf.settled, copy)
        fetch = Fetch(copy, settled, sources, self._metrics, self._pool, self._settings.pace, self._settings.host)
        with self._waits_for(sources):
            await fetch.run()
        return fetch

    async def _claim(self, part: PartRecord, shape: Shape, head: Head) -> Copy:
        copy = self._shelf.copies.get(part.manifest_digest)
        if copy is not None and copy.shape == shape:
            return copy  # begun before, and put off for something more urgent
        self._shelf.drop(part.manifest_digest)
        claiming = asyncio.to_thread(self._shelf.claim, part.manifest_digest, part.name, shape, head)
        claimed, resumed = await to_the_end(claiming)
        self._metrics.resumed.inc(resumed)
        return claimed


def _finish(copy: Copy, head: Head, pool: ThreadPoolExecutor) -> None:
    """Write what makes it a slot, or a part of one if chunks lack. Raises TensorError: if only holders said what the
    chunks should be, the tensors are first compared with the manifest."""
    view = copy.mapped.view
    if not copy.journal.done.complete:
        head.write(view, part=True)
        copy.is_open = True
        return
    if copy.shape.digests and (wrong := head.wrong_tensors(view, pool)):
        raise digest_mismatch(wrong[0], head.manifest.tensors[wrong[0]].digest, "another one")
    head.write(view)
    copy.whole = True


class Throttle:
    """Delays reads so that they stay below a rate."""

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
    """Reads one copy. `run` may be cancelled: after it has ended, nothing is written into the slot."""

    def __init__(
        self,
        copy: Copy,
        settled: Callable[[], Bitmap],
        sources: Sources,
        metrics: PeerMetrics,
        pool: ThreadPoolExecutor,
        pace: Pace,
        seed: str,
    ) -> None:
        """`settled`: the chunks of the copy that are here, or not needed here; which those are may change."""
        self._copy, self._settled = copy, settled
        self._sources, self._metrics, self._pool, self._pace = sources, metrics, pool, pace
        self._planner = Planner(copy.shape.chunks, seed, pace.per_holder, pace.total)
        self._throttle = Throttle(pace.limit_bytes_per_s)
        self._begins = _begins(copy)
        self._reads: dict[asyncio.Task[None], tuple[Assignment, Source]] = {}
        self._threads: set[asyncio.Future[None]] = set()
        self.read_from: set[str] = set()

    async def run(self) -> None:
        """Return when every chunk is settled. Raises as `Sources.check`."""
        self._sources.begin()
        keeping = asyncio.create_task(self._sources.keep_fresh())
        try:
            while not (done := self._settled()).complete:
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
        """Close the links, so that reads in flight end, and wait for their threads, which write into the slot."""
        await self._sources.close()
        if self._threads:
            await asyncio.wait(self._threads)

    def _begin(self, done: Bitmap) -> None:
        """Begin the reads that the planner chooses."""
        taken, flying, fed = done.bits, [read for read, _ in self._reads.values()], self._sources.fed()
        late, lacks = self._sources.is_late(), self._sources.lacks(fed)
        begun = self._planner.next(self._sources.holders(), done, flying, fed, late=late, lacks=lacks)
        for read in begun:
            source = self._sources.open[read.host]
            source.reads += 1
            self._reads[asyncio.create_task(self._read(read.chunk, source))] = read, source
        for read in flying + begun:
            taken |= 1 << read.chunk
        self._sources.taken, self._sources.loose = taken, self._planner.loose(done, fed, late=late, lacks=lacks)
        self._sources.await_news(fed)

    async def _ended(self) -> set[asyncio.Task[None]]:
        """The reads that have ended, or none: after a while, or when a holder has something new."""
        news = asyncio.create_task(self._sources.news.wait())
        waits: set[asyncio.Task[Any]] = {*self._reads, news}
        ended, _ = await asyncio.wait(waits, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        self._sources.news.clear()
        news.cancel()
        return {task for task in ended if task is not news}

    async def _read(self, chunk: int, source: Source) -> None:
        """Raises TransferError."""
        start, end = self._copy.shape.bounds(chunk)
        await self._throttle.take(end - start)
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(self._pool, self._read_now, source, chunk)
        self._threads.add(thread)
        thread.add_done_callback(self._over)
        await asyncio.shield(thread)
        self._sources.chunk_s = time.monotonic() - started

    def _over(self, thread: asyncio.Future[None]) -> None:
        self._threads.discard(thread)
        if not thread.cancelled():
            thread.exception()  # if the read was cancelled, nobody else retrieves it

    def _read_now(self, source: Source, chunk: int) -> None:
        """In a thread. Raises TransferError."""
        start, end = self._copy.shape.bounds(chunk)
        start = max(start, self._begins)
        if start < end:
            into, piece = self._copy.mapped.region, Piece(start, start, end - start)
            source.link.read(into, source.opened.region, [piece], self._pace.read_timeout_s)
        if not self._copy.shape.is_right(self._copy.mapped.view, chunk, self._copy.head):
            raise TransferError(
                f"chunk {chunk} from host {source.host} has wrong bytes: it is read elsewhere; look at its memory",
                code="chunk_mismatch",
            )

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
        self._copy.came(chunk)
        self._metrics.received.labels(source.host).inc(end - start)
        self._sources.came(source, end - start)
        self.read_from.add(source.host)

    def _lost(self, read: Assignment, source: Source, error: TransferError) -> None:
        self._metrics.refetched.labels(_reason(error), read.host).inc()
        self._sources.problem = error
        log.warning("chunk %d of %s: %s", read.chunk, self._copy.digest, error)
        if error.code == "transfer_timed_out":
            self._sources.stalled(source)
        else:
            self._sources.leave(source, WRONG_S if error.code == "chunk_mismatch" else LOST_S)


def _begins(copy: Copy) -> int:
    """The first byte to read of the copy. The bytes that make it a slot are written when all the rest is there."""
    if copy.head is None:
        return 0
    return PREAMBLE if copy.shape.digests else copy.head.layout.header_nbytes


def _reason(error: TransferError) -> str:
    return {"chunk_mismatch": "digest", "transfer_timed_out": "timeout"}.get(error.code, "failed")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the caller is cancelled, `work` finishes first, and then the cancellation is raised."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody is left to be told
        raise cancelled
    return task.result()
