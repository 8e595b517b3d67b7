"""A holder in the process of the test: a control server and a transport with one published slot."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.weightsync.peer.hosts import CHUNK, MODEL, newest, random_model
from weightsync import Publisher
from weightsync.control.hosts import local_path, slot_name
from weightsync.control.records import CopyRecord, VersionRecord
from weightsync.memory.arena import Arena
from weightsync.peer.control import Control, PeerClient, listen, serving
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.serve import Tickets
from weightsync.peer.shelf import Regions, Shelf
from weightsync.transport import open_transport
from weightsync.transport.addresses import Address


class Served:
    """Host `a`, and a client that is host `b`."""

    def __init__(
        self,
        tickets: Tickets,
        metrics: PeerMetrics,
        address: str,
        record: VersionRecord,
        path: Path,
        client: PeerClient,
    ) -> None:
        self.tickets, self.metrics, self.address, self.record = tickets, metrics, address, record
        self.path, self.client, self.key = path, client, Key(record.manifest_digest)
        self.rates: dict[str, float] = {}  # what readers said

    @property
    def copy(self) -> CopyRecord:
        """What the store would say of it."""
        nbytes = self.path.stat().st_size
        return CopyRecord("a", slot_name(self.path, "a"), self.key.digest, nbytes, "ready", self.address, 0.0)

    def readers(self) -> int:
        return int(self.metrics.readers._value.get())

    def is_held(self) -> bool:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


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
    metrics, listener, rates = PeerMetrics(), listen(Address("127.0.0.1"), None), dict[str, float]()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with open_transport("tcp", listen="127.0.0.1", tls=None) as transport, ThreadPoolExecutor(1) as pool:
        shelf = Shelf(Arena(directory), MODEL, Regions(transport))
        assert shelf.publish(Key(record.manifest_digest), path)
        tickets = Tickets("a", shelf, transport, metrics, pool, chunk_nbytes=CHUNK, most=2, told=rates.__setitem__)
        async with (
            serving(Control(tickets, metrics).app, listener, None),
            PeerClient(MODEL, "b", "tcp", None) as client,
        ):
            served = Served(tickets, metrics, address, record, path, client)
            served.rates = rates
            yield served
