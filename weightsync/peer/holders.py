"""The holders that one fetch reads from: found in the store's records, opened, looked after, left out for a while.

Sources     all holders of one slot, and when to open, ask or leave one of them
Source      one holder that is open, with a ticket there
Opener      opens a holder and says goodbye to it, so that no ticket or connection outlives its use
LeftOut     hosts that are not read from for a while, because they failed
Patience    when to leave a holder that has had nothing new for a while, so that another can be tried
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weightsync.control.records import CopyRecord
from weightsync.errors import ManifestError, PeerError, PeerRefused, PeerUnreachable, TransferError, WeightSyncError
from weightsync.peer.chunks import Bitmap, Shape
from weightsync.peer.control import OPEN_S, PeerClient
from weightsync.peer.messages import ALL, Opened
from weightsync.peer.plan import NOBODY, Holder, choose, halves
from weightsync.transport import Link, Transport

log = logging.getLogger("hotswap.peer")

REFRESH_S = 0.2
NEWS_S = 0.01  # between answers of a feeder that waited for something new
OPEN_AT_ONCE = 6
OPENING_S = 3.0  # a holder that has not answered for so long does not count against OPEN_AT_ONCE
IDLE_S = 1.0  # a holder that had nothing new is not opened again before
PATIENCE_S, SLOWER = 1.0, 4.0  # a feeder may have nothing new so long, or for that many times what a chunk takes
SILENT_S = 3.0  # how long there may be nobody to read from
DISTANCES_S = (0.003, 0.015, 0.06)  # round trips: one rack, one site, one region; farther
BUSY_S, LOST_S, STALLED_S, WRONG_S = 2.0, 2.0, 30.0, 60.0  # how long a holder is left out
FIRST_TRY_S = 1.0  # after a stall, when nobody else has what is missing; then twice as long each time
MOST_DOUBLINGS = 16  # beyond STALLED_S by far; a fetch may go on for days
SHARE_S = 8.0  # how long nothing may come while a host is away that has chunks nobody else is known to have
LOOKS, MOST_LOOKS = 5, 20  # times in a row that a holder has nothing before it is left


Ways = Sequence[Sequence[str]]
TREES: tuple[Literal[0, 1], ...] = (0, 1)


def no_holder(digest: str, why: WeightSyncError | None) -> PeerError:
    """No host that has the missing chunks can be read from now."""
    reason = f"the last one: {why}" if why is not None else "is `hotswap peer` running where it was published?"
    return PeerError(f"no host that has {digest} can be read from; {reason}", code="no_holder")


def share_lost(digest: str, gone: str, writers: Sequence[str]) -> PeerError:
    """Chunks that hosts wrote of a version are offered by nobody any more."""
    who = f"host {gone}, which wrote some, is gone" if gone else f"{', '.join(writers)} wrote them, and lost some"
    message = f"nobody has all chunks of {digest}: {who}. Start its peer again, or publish another version"
    return PeerError(message, code="share_lost")


class Sources:
    """The holders of one slot, for the host `seed`. `offered` returns the records of now.

    The caller keeps `left_out` and `background` from fetch to fetch. `ways` lead up the trees (`plan.feeders`): hosts
    on them are opened first, and others while chunks are `loose`: before all, the `writers`, several hosts that wrote
    the slot together and have some chunks each. A fetch waits for as long as the store knows of a holder.
    """

    def __init__(
        self,
        client: PeerClient,
        transport: Transport,
        digest: str,
        offered: Callable[[], Iterable[CopyRecord]],
        left_out: LeftOut,
        background: Background,
        *,
        seed: str,
        rack: str = "",
        ways: Ways = (),
        writers: Sequence[str] = (),
    ) -> None:
        self._writers = list(writers)
        self._client, self._opener = client, Opener(client, transport, digest, background)
        self.digest, self._offered = digest, offered
        self._seed, self._rack, self._left_out = seed, rack, left_out
        self._turn, self._patience, self._feeders = 0, Patience(), Feeders(ways)
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, float] = {}  # since when; those are in `_asking` too
        self._seen_at = self._moved_at = self._began_at = time.monotonic()
        self.has_moved = False
        self._disagreed = False  # another holder said other digests
        self.taken = 0  # bits of the chunks that are here or being read
        self.loose = -1  # bits of those to read from anybody
        self.chunk_s = 0.0  # how long the last one took
        self.news = asyncio.Event()  # a holder has more than before
        self.open: dict[str, Source] = {}
        self.problem: WeightSyncError | None = None  # the last one that kept a holder from being read

    def holders(self) -> list[Holder]:
        """The open holders, as the planner sees them."""
        return [source.holder(self._rack) for source in self.open.values()]

    async def keep_fresh(self) -> None:
        """Refresh them for ever."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_S)

    def refresh(self) -> None:
        """Begin to open new holders where there is room, and to ask those that are open what they have by now."""
        offered = {record.host: record for record in self._offered()}
        for source in list(self.open.values()):
            if source.host in offered:
                self._begin(source.host, self._ask(source))
            else:  # its lease has ended
                self.leave(source, LOST_S)
        needed, busy = self._needs_another(), self.open.keys() | self._asking.keys()
        feeders = self._feeders.wanted(self._may_feed)
        if self.loose:
            feeders += tuple(host for host in self._writers if host != self._seed and self._may_feed(host))
        for host in {host for host in feeders if host in offered and host not in busy}:
            self._begin_to_open(offered[host])
        if not self.loose:
            return self._leave_idle(feeders)
        able = [r for h, r in offered.items() if h not in busy and self._left_out.is_able(h, needed=needed)]
        spared = self._feeders.spared(time.monotonic())
        if able := [record for record in able if record.host not in (*feeders, spared)]:
            self._open_some(able)
        return None

    def fed(self) -> tuple[str, ...]:
        """The hosts that feed even chunks and odd ones now, "" for none."""
        return self._feeders.now(self._may_feed, time.monotonic(), self.chunk_s)

    def is_late(self) -> bool:
        """Whether another host has all of it that read it as this one does."""
        first = {self._feeders.source, *self._writers}
        return any(record.state == "ready" and record.host not in first for record in self._offered())

    def lacks(self, fed: Sequence[str]) -> int:
        """Bits of the chunks to read from anybody because the host at the top, which feeds here, lacks them."""
        top = self.open.get(self._feeders.source)
        if top is None or top.have is None:
            return 0
        both = zip(halves(top.shape.chunks), fed, strict=True)
        return sum(half & ~top.have.bits for half, feeder in both if feeder == top.host)

    def await_news(self, fed: Sequence[str]) -> None:
        """Ask each feeder that has nothing left for more, and have it wait with its answer until it has."""
        for tree, host in zip(TREES, fed, strict=True):
            source = self.open.get(host)
            if source is not None and source.have is not None and not source.have.bits & self._of_tree(source, tree):
                self._begin(host, self._ask(source, tree))

    def _of_tree(self, source: Source, tree: int) -> int:
        """Bits of the chunks that are missing here."""
        return halves(source.shape.chunks)[tree] & ~self.taken

    def _may_feed(self, host: str) -> bool:
        """Not one that failed, nor one that has not announced a copy after a while."""
        is_late = time.monotonic() - self._began_at > PATIENCE_S
        there = host in self.open or not is_late or any(record.host == host for record in self._offered())
        return there and self._left_out.is_able(host, needed=False)

    def _leave_idle(self, feeders: Sequence[str]) -> None:
        """Those that are not needed: their places are for others."""
        for source in list(self.open.values()):
            if source.host not in feeders and not source.reads:
                self._end(source)

    def begin(self) -> None:
        """The time before does not count as silence."""
        self._seen_at = self._moved_at = self._began_at = time.monotonic()

    def moved(self) -> None:
        """Something is being read."""
        self._moved_at, self.has_moved = time.monotonic(), True

    def came(self, source: Source, nbytes: int) -> None:
        """A chunk, from `source`. One that was left meanwhile, for wrong bytes say, is not taken back for it."""
        source.nbytes += nbytes
        if self._is_open(source):
            self._left_out.came(source.host)
        self._patience.came()

    def held_up(self) -> PeerError | None:
        """Why nothing has been read for a while; None: something has."""
        silent = time.monotonic() - self._moved_at
        return no_holder(self.digest, self.problem) if silent > (OPEN_S if self._opening else SILENT_S) else None

    def check(self) -> None:
        """Raises PeerError when the store has known of no holder for a while.

        Also when holders disagree on the digests of the chunks and nothing has been read for a while: another fetch may
        begin with one of the others. Raises PeerError when nothing has come for a while, and one of the `writers` is
        gone.
        """
        if any(True for _ in self._offered()):
            self._seen_at = time.monotonic()
        if self._writers and time.monotonic() - self._moved_at > SHARE_S:
            self._check_writers()
        gone = time.monotonic() - max(self._seen_at, self._moved_at) > SILENT_S
        problem = self.held_up()
        if gone or (problem is not None and self._disagreed):
            raise problem or no_holder(self.digest, self.problem)

    def _check_writers(self) -> None:
        """Raises PeerError when one is gone, or all are open, and what is missing is nowhere."""
        found = {record.host: record.state for record in self._offered()}
        others = [host for host in self._writers if host != self._seed]
        gone = next((host for host in others if host not in found), "")
        if (gone or self.open.keys() >= set(others)) and "ready" not in found.values() and self._needs_another():
            raise share_lost(self.digest, gone, self._writers)

    def leave(self, source: Source, seconds: float) -> None:
        """Do not read from it for `seconds`; reads in flight fail."""
        self._left_out.leave(source.host, seconds)
        self._end(source)

    def stalled(self, source: Source) -> None:
        """As `leave`, but it is tried again sooner if nobody else has what is missing."""
        self._left_out.stalled(source.host)
        self._end(source)

    async def close(self) -> None:
        """Leave all holders; reads in flight fail. Goodbyes are said in the background: a holder may not answer."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        sources = list(self.open.values())
        for source in sources:
            self._end(source)
        await asyncio.gather(*(asyncio.to_thread(source.link.close) for source in sources))

    def _needs_another(self) -> bool:
        """Whether no open holder has anything that is neither here nor on its way."""
        shape = self._opener.shape
        if shape is None or not self.open:
            return True
        wanted = Bitmap.full(shape.chunks).bits & ~self.taken
        offers = any(source.have is None or source.have.bits & wanted for source in self.open.values())
        return wanted != 0 and not offers

    def _open_some(self, able: list[CopyRecord]) -> None:
        since = time.monotonic() - OPENING_S
        room = OPEN_AT_ONCE - len(self.open) - sum(begun > since for begun in self._opening.values())
        if room <= 0 and (idle := self._patience.exhausted([s.host for s in self.open.values() if s.reads])):
            self.leave(self.open[idle], IDLE_S)
            room = 1
        if room <= 0:
            return
        self._turn += 1
        records = {record.host: record for record in able}
        for holder in choose([known_holder(r, self._rack) for r in able], self._seed, room, self._turn):
            self._begin_to_open(records[holder.host])

    def _begin_to_open(self, record: CopyRecord) -> None:
        self._opening[record.host] = time.monotonic()
        self._begin(record.host, self._open(record))

    def _begin(self, host: str, work: Coroutine[Any, Any, None]) -> None:
        """Ask each holder one question at a time, without waiting for the others' answers."""
        if host in self._asking:
            return work.close()
        task = self._asking[host] = asyncio.create_task(work)
        return task.add_done_callback(lambda task: self._answered(host, task))

    def _answered(self, host: str, task: asyncio.Task[None]) -> None:
        self._asking.pop(host, None)
        self._opening.pop(host, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("host %s could not be asked", host, exc_info=error)
            self._left_out.leave(host, WRONG_S)

    async def _open(self, record: CopyRecord) -> None:
        host = record.host
        try:
            self.open[host] = await self._opener.open(record)
            self.news.set()
        except (PeerRefused, TransferError, ManifestError, ValueError) as error:
            passing = isinstance(error, PeerRefused) and error.status == 503
            wrong = getattr(error, "code", "") in ("manifest_error", "bad_bitmap")
            feeds = host in self._feeders.wanted(self._may_feed)  # the next question is soon
            seconds = (0.0 if feeds else BUSY_S) if passing else WRONG_S if wrong else LOST_S
            self._left_out.leave(host, seconds)
            self.problem = error if isinstance(error, WeightSyncError) else PeerRefused(host, 200, "bad", str(error))
            self._disagreed |= isinstance(error, ManifestError)
            if not passing:
                log.info("%s is not read from host %s: %s", self.digest, host, error)

    async def _ask(self, source: Source, tree: Literal[0, 1] | None = None) -> None:
        """Ask `source` which chunks it has; with `tree` once it has more there, and not oftener than every NEWS_S."""
        chunks, address, ticket = source.shape.chunks, source.record.address, source.opened.ticket
        if tree is not None:
            await asyncio.sleep(source.told_at + NEWS_S - time.monotonic())
        try:
            found, seconds = await self._client.have(source.host, address, ticket, chunks, tree)
            source.have = bitmap_of(found.have, chunks)
        except (PeerRefused, TransferError) as error:
            if not self._is_open(source):
                return None  # it was left meanwhile, for as long as its fault says
            self.problem = error
            ended = isinstance(error, PeerRefused) and error.status == 404
            return self.leave(source, 0.0 if ended else LOST_S)
        source.active, source.told_at = found.active, time.monotonic()
        if tree is None:
            source.round_trip_s = min(seconds, source.round_trip_s or seconds)
        offers = source.have is None or bool(source.have.bits & ~self.taken)
        self._feeders.saw(source.host, source.told_at, offers=offers)
        if offers:
            self.news.set()
        return self._patience.saw(source.host, offers=offers) if self._is_open(source) else None

    def _is_open(self, source: Source) -> bool:
        return self.open.get(source.host) is source

    def _end(self, source: Source) -> None:
        if self._is_open(source):
            del self.open[source.host]
            self._patience.forget(source.host)
            self._opener.leave(source)


class Background:
    """Messages to other peers that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        async def told() -> None:
            with contextlib.suppress(PeerRefused, PeerUnreachable):
                await work

        task = asyncio.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, timeout_s: float) -> None:
        """Wait until every message is sent; give up those that are not after `timeout_s`."""
        tasks = set(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


@dataclass(eq=False)
class Source:
    """An open holder, with a ticket there. `have` None: everything."""

    record: CopyRecord
    opened: Opened
    shape: Shape
    link: Link
    have: Bitmap | None
    active: int
    round_trip_s: float = 0.0
    nbytes: int = 0
    reads: int = 0  # under way
    told_at: float = 0.0  # when it last said what it has

    @property
    def host(self) -> str:
        return self.record.host

    def holder(self, rack: str) -> Holder:
        """As the planner of a reader in `rack` sees it."""
        far = distance(self.record, rack, self.round_trip_s)
        return Holder(self.host, far, self.have, max(0, self.active - 1))


def known_holder(record: CopyRecord, rack: str) -> Holder:
    """A holder that is not open: its record tells whether it has everything, or nothing for certain."""
    return Holder(record.host, distance(record, rack), None if record.state == "ready" else Bitmap(1))


def distance(record: CopyRecord, rack: str, round_trip_s: float = 0.0) -> int:
    """0 in the same rack; by the round trip where racks are not known, and never 0 where they are known to differ."""
    if rack and record.rack:
        return 0 if rack == record.rack else max(1, _class(round_trip_s))
    return _class(round_trip_s)


def bitmap_of(have: str, chunks: int) -> Bitmap | None:
    """None: everything. Raises TransferError."""
    return None if have == ALL else Bitmap.decoded(have, chunks)


def _class(round_trip_s: float) -> int:
    return sum(round_trip_s > limit for limit in DISTANCES_S)


def other_chunks(host: str, digest: str) -> ManifestError:
    """Two hosts report different digests for the chunks of a slot. Its manifest determines every byte: one is wrong."""
    return ManifestError(
        f"host {host} says other digests for the chunks of {digest} than hosts before it: look at the memory of both, "
        "and start all peers with the same --chunk"
    )


class Opener:
    """Opens holders of one slot. `shape` is what the first one said of the chunks; the others must say the same."""

    def __init__(self, client: PeerClient, transport: Transport, digest: str, background: Background) -> None:
        self._client, self._transport, self._digest, self._background = client, transport, digest, background
        self.shape: Shape | None = None

    async def open(self, record: CopyRecord) -> Source:
        """Raises PeerRefused, PeerUnreachable, ManifestError, TransferError, ValueError."""
        opened = await self._asked(record)
        try:
            source = await self._connected(record, opened)
        except BaseException:  # or the ticket would keep others out until it ends by itself
            self._background.begin(self._client.close(record.host, record.address, opened.ticket, 0))
            raise
        self.shape = source.shape
        return source

    def leave(self, source: Source) -> None:
        """Say goodbye in the background: the holder may not answer."""
        self._background.begin(self._say_goodbye(source))

    async def _asked(self, record: CopyRecord) -> Opened:
        """If cancelled, give back the ticket that may still arrive."""
        asking = asyncio.create_task(self._client.open(record.host, record.address, self._digest))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._background.begin(self._give_back(record, asking))
            raise

    async def _give_back(self, record: CopyRecord, asking: asyncio.Task[Opened]) -> None:
        await self._client.close(record.host, record.address, (await asking).ticket, 0)

    async def _connected(self, record: CopyRecord, opened: Opened) -> Source:
        shape = Shape(opened.nbytes, opened.chunk_nbytes, opened.digests)
        have = bitmap_of(opened.have, shape.chunks)
        link = await self._linked(opened.endpoint)
        if self.shape is not None and not shape.agrees(self.shape):
            link.close()
            raise other_chunks(record.host, self._digest)
        return Source(record, opened, shape, link, have, opened.active)

    async def _linked(self, endpoint: bytes) -> Link:
        connecting = asyncio.get_running_loop().run_in_executor(None, self._transport.connect, endpoint)
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(lambda late: None if late.exception() else late.result().close())
            raise

    async def _say_goodbye(self, source: Source) -> None:
        await asyncio.to_thread(source.link.close)
        address, ticket = source.record.address, source.opened.ticket
        await self._client.close(source.host, address, ticket, source.nbytes)


@dataclass
class _Out:
    until: float
    again_at: float
    stalls: int = 0


class LeftOut:
    """The hosts left out for one slot, kept from fetch to fetch."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Out] = {}

    def leave(self, host: str, seconds: float) -> None:
        """Leave it out for `seconds`, whatever is missing. Never shortens an earlier leave."""
        until, known = time.monotonic() + seconds, self._hosts.get(host) or _Out(0.0, 0.0)
        self._hosts[host] = _Out(max(until, known.until), max(until, known.again_at), known.stalls)

    def stalled(self, host: str) -> None:
        """It did not answer in time. It may be the only one that has a chunk, so it is tried again before long."""
        now, stalls = time.monotonic(), self._stalls(host)
        pause = min(FIRST_TRY_S * 2 ** min(stalls, MOST_DOUBLINGS), STALLED_S)
        self._hosts[host] = _Out(now + STALLED_S, now + pause, stalls + 1)

    def came(self, host: str) -> None:
        """A chunk from it arrived."""
        self._hosts.pop(host, None)

    def is_able(self, host: str, *, needed: bool) -> bool:
        """Whether to read from it; `needed`: nobody else has what is missing."""
        out, now = self._hosts.get(host), time.monotonic()
        return out is None or out.until <= now or (needed and out.again_at <= now)

    def _stalls(self, host: str) -> int:
        known = self._hosts.get(host)
        return known.stalls if known is not None else 0


class Feeders:
    """The hosts that feed a receiver now, and whether the source is spared where none does.

    `ways` are up the trees (`plan.feeders`): a host that is left out is passed over.
    """

    def __init__(self, ways: Ways = ()) -> None:
        self._ways = ways
        self._offered_at: dict[str, float] = {}
        self._others_at = float("-inf")  # when another than the source last had something

    @property
    def source(self) -> str:
        """The host at the top."""
        return self._ways[0][-1] if self._ways else ""

    def wanted(self, is_able: Callable[[str], bool]) -> tuple[str, ...]:
        """For each tree the first host above that `is_able`, "" if there is none."""
        return tuple(next(filter(is_able, way), "") for way in self._ways) or NOBODY

    def saw(self, host: str, now: float, *, offers: bool) -> None:
        """An open holder answered: `offers`, it has something that is missing here."""
        if offers:
            self._offered_at[host] = now
            self._others_at = self._others_at if host == self.source else now

    def spared(self, now: float) -> str:
        """The source, "" while no other host has had anything for a while. A chunk that the source sends because a tree
        is slow costs the time of all hosts; the others give on the chunks that it has sent."""
        return self.source if self._others_at >= now - PATIENCE_S else ""

    def now(self, is_able: Callable[[str], bool], now: float, slowest_s: float = 0.0) -> tuple[str, ...]:
        """As `wanted`, but "" for one that has had nothing for a while, or is not open by now. `slowest_s`: how long a
        chunk took of late."""
        since = now - max(PATIENCE_S, SLOWER * slowest_s)
        return tuple(h if h and self._offered_at.setdefault(h, now) >= since else "" for h in self.wanted(is_able))


class Patience:
    """The patience of one receiver. It doubles with each holder that is left, until a chunk arrives."""

    def __init__(self) -> None:
        self._idle: dict[str, int] = {}
        self._limit = LOOKS

    def saw(self, host: str, *, offers: bool, grows: bool = True) -> None:
        """An open holder answered: `offers`, it has something that is missing here; `grows`, it may get more."""
        self._idle[host] = 0 if offers else self._idle.get(host, 0) + (1 if grows else MOST_LOOKS)

    def came(self) -> None:
        """A chunk arrived."""
        self._limit = LOOKS

    def forget(self, host: str) -> None:
        """It is not open any more."""
        self._idle.pop(host, None)

    def exhausted(self, reading: Collection[str]) -> str | None:
        """The holder to leave now, none of those that are being read from."""
        found = next((h for h, looks in self._idle.items() if looks >= self._limit and h not in reading), None)
        if found is not None:
            self._limit = min(2 * self._limit, MOST_LOOKS)
        return found
