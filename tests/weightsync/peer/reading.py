"""A host that fetches from another, driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.waiting import eventually
from tests.weightsync.peer.hosts import MODEL
from tests.weightsync.peer.served import Served
from weightsync.errors import TransferTimedOut
from weightsync.memory.arena import Arena
from weightsync.peer.chunks import Head
from weightsync.peer.fetch import Fetch, first_answer
from weightsync.peer.holders import Background, LeftOut, Sources
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.settings import Pace
from weightsync.peer.shelf import Copy, Regions, Shelf
from weightsync.transport import Link, Piece, Region, Transport

GUARD_S = 60.0


class Wrapped:
    """A transport whose next `stalls` reads time out, and with which `connecting` is called before each link."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.stalls = inner, 0
        self.connecting: Callable[[], None] = lambda: None
        self.closed: list[Link] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def connect(self, endpoint: bytes) -> Link:
        self.connecting()
        return WrappedLink(self, self._inner.connect(endpoint))


class WrappedLink:
    def __init__(self, owner: Wrapped, inner: Link) -> None:
        self._owner, self._inner = owner, inner

    def read(self, into: Region, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        if self._owner.stalls > 0:
            self._owner.stalls -= 1
            raise TransferTimedOut("a", timeout_s)
        self._inner.read(into, remote, pieces, timeout_s)

    def close(self) -> None:
        self._owner.closed.append(self)
        self._inner.close()


class Reader:
    """Host `b`. `offered` is what the store says."""

    def __init__(self, served: Served, transport: Transport, directory: Path) -> None:
        self.served, self.offered, self.wrapped = served, [served.copy], Wrapped(transport)
        self.shelf, self._pool = Shelf(Arena(directory), MODEL, Regions(transport)), ThreadPoolExecutor(4)
        self.left_out, self.background = LeftOut(), Background()
        self.sources = Sources(
            served.client,
            self.wrapped,  # type: ignore[arg-type]
            served.key,
            lambda: self.offered,
            self.left_out,
            self.background,
            seed="b",
            patient=True,
        )

    async def claim(self) -> Copy:
        first = await first_answer(self.sources)
        raw = await self.served.client.manifest("a", self.served.address, first.opened.ticket)
        head = Head.parse(raw, self.served.key.digest)
        return self.shelf.claim(self.served.key, "", head.shape or first.shape, head)[0]

    def fetch(self, copy: Copy) -> Fetch:
        return Fetch(copy, lambda: copy.journal.done, self.sources, PeerMetrics(), self._pool, Pace(), "b")


async def nobody_reads(served: Served) -> None:
    await eventually(lambda: not served.readers(), GUARD_S)
