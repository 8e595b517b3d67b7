"""The holders that one fetch reads from: found in the store's records, opened, looked after, left out for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from weightsync.errors import PeerError, PeerRefused, PeerUnreachable, WeightSyncError
from weightsync.peer.bitmap import BadBitmap, Bitmap
from weightsync.peer.client import OPEN_S, PeerClient
from weightsync.peer.ending import Background
from weightsync.peer.left_out import BUSY_S, LOST_S, WRONG_S, LeftOut
from weightsync.peer.messages import Key
from weightsync.peer.opener import Opener, OtherChunks
from weightsync.peer.patience import Patience
from weightsync.peer.plan import Holder, choose
from weightsync.peer.source import Source, bitmap_of, known_holder
from weightsync.records import CopyRecord
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

REFRESH_S = 0.2
OPEN_AT_ONCE = 6
OPENING_S = 3.0  # who has not answered for so long takes no other's place
IDLE_S = 1.0  # a holder that had nothing new is not opened again before
SILENT_S = 3.0  # without anybody to read from


class NoHolder(PeerError):
    """Nobody who has what is missing can be read from now."""

    code = "no_holder"

    def __init__(self, digest: str, why: WeightSyncError | None) -> None:
        reason = f"the last one: {why}" if why is not None else "is `hotswap peer` running where it was published?"
        super().__init__(f"no host that has {digest} can be read from; {reason}")


class Sources:
    """Those of one key, for the host `seed`. `offered` gives the records of now; `left_out` and `background` are the
    caller's, who keeps them from fetch to fetch. The `patient` wait for as long as the store knows of a holder.
    """

    def __init__(
        self,
        client: PeerClient,
        transport: Transport,
        key: Key,
        offered: Callable[[], Iterable[CopyRecord]],
        left_out: LeftOut,
        background: Background,
        *,
        seed: str,
        rack: str = "",
        patient: bool = True,
    ) -> None:
        self._client, self._opener, self.key, self._offered = (
            client,
            Opener(client, transport, key, background),
            key,
            offered,
        )
        self._seed, self._rack, self._left_out, self._patient = seed, rack, left_out, patient
        self._turn, self._patience = 0, Patience()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, float] = {}  # since when; those are in `_asking` too
        self._seen_at = self._moved_at = time.monotonic()
        self.has_moved = False
        self._disagreed = False  # another holder said other digests
        self.taken = 0  # bits of the chunks that are here or being read
        self.bytes_per_s = 0.0  # as holders are told when they are left
        self.open: dict[str, Source] = {}
        self.problem: WeightSyncError | None = None  # the last one that kept a holder from being read

    def holders(self) -> list[Holder]:
        """What the planner chooses from."""
        return [source.holder(self._rack) for source in self.open.values()]

    async def keep_fresh(self) -> None:
        """Look after them for ever."""
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
        able = [r for h, r in offered.items() if h not in busy and self._left_out.is_able(h, needed=needed)]
        if able:
            self._open_some(able)

    def begin(self) -> None:
        """What went before does not count as silence."""
        self._seen_at = self._moved_at = time.monotonic()

    def moved(self) -> None:
        """Something is being read."""
        self._moved_at, self.has_moved = time.monotonic(), True

    def came(self, source: Source, nbytes: int) -> None:
        """A chunk, from `source`. One that was left meanwhile, for wrong bytes say, is not taken back for it."""
        source.nbytes += nbytes
        if self._is_open(source):
            self._left_out.came(source.host)
        self._patience.came()

    def held_up(self) -> NoHolder | None:
        """Why nothing has been read for a while; None: something has."""
        silent = time.monotonic() - self._moved_at
        return NoHolder(self.key.digest, self.problem) if silent > (OPEN_S if self._opening else SILENT_S) else None

    def check(self) -> None:
        """Raises NoHolder when the store has known of no holder for a while; as `held_up` for the impatient, and where
        the first holder said of the chunks what others do not: another fetch may begin with one of them.
        """
        if any(True for _ in self._offered()):
            self._seen_at = time.monotonic()
        gone = time.monotonic() - max(self._seen_at, self._moved_at) > SILENT_S
        problem = self.held_up()
        if gone or (problem is not None and (self._disagreed or not self._patient)):
            raise problem or NoHolder(self.key.digest, self.problem)

    def leave(self, source: Source, seconds: float) -> None:
        """Read no more from it for so long; what is in flight fails."""
        self._left_out.leave(source.host, seconds)
        self._end(source)

    def stalled(self, source: Source) -> None:
        """As `leave`, but sooner tried again if nobody else has what is missing."""
        self._left_out.stalled(source.host)
        self._end(source)

    async def close(self) -> None:
        """Leave all; reads in flight fail. They are told in the background: one of them may not answer."""
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
            self._opening[holder.host] = time.monotonic()
            self._begin(holder.host, self._open(records[holder.host]))

    def _begin(self, host: str, work: Coroutine[Any, Any, None]) -> None:
        """One question at a time to each, and none waits for another's answer."""
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
        except (PeerRefused, PeerUnreachable, OtherChunks, BadBitmap, ValueError) as error:
            passing = isinstance(error, PeerRefused) and error.status == 503
            seconds = BUSY_S if passing else WRONG_S if isinstance(error, OtherChunks | BadBitmap) else LOST_S
            self._left_out.leave(host, seconds)
            self.problem = error if isinstance(error, WeightSyncError) else PeerRefused(host, 200, "bad", str(error))
            self._disagreed |= isinstance(error, OtherChunks)
            if not passing:
                log.info("%s is not read from host %s: %s", self.key.digest, host, error)

    async def _ask(self, source: Source) -> None:
        chunks = source.shape.chunks
        taken = Bitmap(chunks, self.taken)
        try:
            found, seconds = await self._client.have(source.host, source.record.address, source.opened.ticket, taken)
            source.have = bitmap_of(found.have, chunks)
            source.lent = Bitmap.decoded(found.lent, chunks) if found.lent else None
        except (PeerRefused, PeerUnreachable, BadBitmap) as error:
            if not self._is_open(source):
                return None  # it was left meanwhile, for as long as its fault says
            self.problem = error
            ended = isinstance(error, PeerRefused) and error.status == 404
            return self.leave(source, 0.0 if ended else LOST_S)
        source.active = found.active
        source.round_trip_s = min(seconds, source.round_trip_s or seconds)
        offers = source.have is None or bool(source.have.bits & ~self.taken)
        return self._patience.saw(source.host, offers=offers) if self._is_open(source) else None

    def _is_open(self, source: Source) -> bool:
        return self.open.get(source.host) is source

    def _end(self, source: Source) -> None:
        if self._is_open(source):
            del self.open[source.host]
            self._patience.forget(source.host)
            self._opener.leave(source, self.bytes_per_s)
