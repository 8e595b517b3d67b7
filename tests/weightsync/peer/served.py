"""A holder in the process of the test, with one published slot, and a host that fetches from it, driven by hand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import eventually
from tests.weightsync.peer.hosts import CHUNK, MODEL, is_free, newest, random_model
from weightsync import Publisher
from weightsync.control.hosts import local_path, slot_name
from weightsync.control.records import CopyRecord, VersionRecord
from weightsync.errors import transfer_timed_out
from weightsync.memory.arena import Arena
from weightsync.peer.chunks import Head
from weightsync.peer.control import Control, PeerClient, listen, serving
from weightsync.peer.fetch import Fetch, first_answer
from weightsync.peer.holders import Background, LeftOut, Sources
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.serve import Tickets
from weightsync.peer.settings import Pace
from weightsync.peer.shelf import Copy, Regions, Shelf
from weightsync.transport import Link, Piece, Region, Transport, open_transport
from weightsync.transport.addresses import Address


@dataclass
class Served:
    """Host `a`, and a client that is host `b`."""

    tickets: Tickets
    metrics: PeerMetrics
    address: str
    record: VersionRecord
    path: Path
    client: PeerClient

    @property
    def digest(self) -> str:
        return self.record.manifest_digest

    @property
    def copy(self) -> CopyRecord:
        """The copy's record in the store."""
        nbytes = self.path.stat().st_size
        return CopyRecord("a", slot_name(self.path, "a"), self.digest, nbytes, "ready", self.address, 0.0)

    def readers(self) -> int:
        return int(self.metrics.readers._value.get())

    def is_held(self) -> bool:
        return not is_free(self.path)


@contextlib.asynccontextmanager
async def slot_served(store_url: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A slot of five chunks, for two readers at a time."""
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    monkeypatch.setattr("weightsync.format.manifest.CHUNK", CHUNK)
    with Publisher(store_url, model=MODEL) as publisher:
        publisher.publish(random_model(1, 256 << 10), wait=False)
        record = newest(publisher)
    path = local_path(record.slot, "a")
    assert path is not None
    metrics, listener = PeerMetrics(), listen(Address("127.0.0.1"), None)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with open_transport("tcp", listen="127.0.0.1", tls=None) as transport, ThreadPoolExecutor(1) as pool:
        shelf = Shelf(Arena(directory), MODEL, Regions(transport))
        assert shelf.publish(record.manifest_digest, path)
        tickets = Tickets("a", shelf, transport, metrics, pool, chunk_nbytes=CHUNK, most=2)
        async with (
            serving(Control(tickets, metrics).app, listener, None),
            PeerClient(MODEL, "b", "tcp", None) as client,
        ):
            yield Served(tickets, metrics, address, record, path, client)


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
            raise transfer_timed_out("a", timeout_s)
        self._inner.read(into, remote, pieces, timeout_s)

    def close(self) -> None:
        self._owner.closed.append(self)
        self._inner.close()


class Reader:
    """Host `b`, which fetches. `offered` is what the store says."""

    def __init__(self, served: Served, transport: Transport, directory: Path) -> None:
        self.served, self.offered, self.wrapped = served, [served.copy], Wrapped(transport)
        self.shelf, self._pool = Shelf(Arena(directory), MODEL, Regions(transport)), ThreadPoolExecutor(4)
        self.left_out, self.background = LeftOut(), Background()
        self.sources = Sources(
            served.client,
            self.wrapped,  # type: ignore[arg-type]
            served.digest,
            lambda: self.offered,
            self.left_out,
            self.background,
            seed="b",
        )

    async def claim(self) -> Copy:
        first = await first_answer(self.sources)
        raw = await self.served.client.manifest("a", self.served.address, first.opened.ticket)
        head = Head.parse(raw, self.served.digest)
        return self.shelf.claim(self.served.digest, "", head.shape or first.shape, head)[0]

    def fetch(self, copy: Copy) -> Fetch:
        return Fetch(copy, lambda: copy.journal.done, self.sources, PeerMetrics(), self._pool, Pace(), "b")


async def nobody_reads(served: Served) -> None:
    await eventually(lambda: not served.readers(), GUARD_S)
