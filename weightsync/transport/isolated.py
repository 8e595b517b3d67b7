"""Transports of libraries, which work in processes of their own: one that serves, one that reads.

A library that has given up a read may still write into its buffer when a frozen peer wakes, may hang, and may crash. So
a read that fails ends the process that reads: when `read` raises, its mappings, sockets and RDMA queues are gone, by
the kernel's hand. The process that serves others stays. What is registered must be a mapping of a file, as slots are.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from types import TracebackType
from typing import Final, Self

import msgspec

from weightsync.errors import PeerUnreachable, TransferFailed, TransferTimedOut, TransportUnavailable
from weightsync.transport.addresses import Address, rdma_devices
from weightsync.transport.checks import bytes_of, check_pieces
from weightsync.transport.messages import BATCH, Read, Settings
from weightsync.transport.protocol import Buffer, Piece, Region
from weightsync.transport.rebuilt import Rebuilt
from weightsync.transport.shared import Shared
from weightsync.transport.uses import Closed, Uses

ADVICE: Final = {
    "mooncake": "Install mooncake-transfer-engine-non-cuda (mooncake-transfer-engine-cuda13 with CUDA) as pinned in "
    "requirements/, and Debian's libibverbs1, libnuma1 and libcurl4; or use tcp",
    "nixl": "Install nixl-cu12 (nixl-cu13 with CUDA 13) as pinned in requirements/; or use tcp",
}


class EngineEndpoint(msgspec.Struct, frozen=True):
    engine: str
    peer: str
    data: bytes


class EngineDescriptor(msgspec.Struct, frozen=True):
    engine: str
    nbytes: int
    data: bytes


class EngineRegion:
    """As Region. A writable one is registered twice: with the process that serves, and with the one that reads."""

    def __init__(self, transport: EngineTransport, number: int, shared: Shared, *, writable: bool) -> None:
        self.number, self.nbytes, self.writable, self.uses = number, shared.nbytes, writable, Uses()
        self._transport, self._shared = transport, shared
        self._engines = [transport.serving, transport.reading] if writable else [transport.serving]
        try:
            for engine in self._engines:
                engine.add(number, shared)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> bytes:
        """As in Region; another one when the serving process was started anew."""
        known = self._transport.serving.descriptor(self.number)
        return msgspec.msgpack.encode(EngineDescriptor(self._transport.name, self.nbytes, known))

    def close(self) -> None:
        self.uses.close()
        for engine in self._engines:
            engine.remove(self.number)
        self._shared.close()


class EngineLink:
    """As Link. All links read in the same process: what stops one read stops the others too."""

    def __init__(self, reading: Rebuilt, endpoint: EngineEndpoint) -> None:
        self._reading, self._endpoint, self._uses = reading, endpoint, Uses()

    def read(self, into: Region, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """As in Link. If the process must be started first, that does not count."""
        assert isinstance(into, EngineRegion), "a region of another transport"
        assert into.writable, "a region that was not registered as writable"
        peer = self._endpoint.peer
        try:
            region = msgspec.msgpack.decode(remote, type=EngineDescriptor)
        except msgspec.DecodeError as error:
            raise TransferFailed(peer, "its region is of another transport") from error
        if region.engine != self._endpoint.engine:
            raise TransferFailed(peer, f"its region is of {region.engine}")
        check_pieces(peer, pieces, into.nbytes, region.nbytes)
        try:
            with self._uses.use(self._reading.stop), into.uses.use(self._reading.stop):
                self._read(into, region.data, [piece for piece in pieces if piece.nbytes], timeout_s)
        except Closed:
            raise TransferFailed(peer, "the region or the link is closed") from None

    def close(self) -> None:
        self._uses.close()

    def _read(self, into: EngineRegion, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        peer = self._endpoint.peer
        try:
            worker = self._reading.worker()
        except TransportUnavailable as error:
            raise TransferFailed(peer, str(error)) from error
        if into.uses.closed or self._uses.closed:
            raise Closed
        settled = False
        try:
            futures = [
                worker.submit(Read(worker.number(), into.number, self._endpoint.data, remote, batch))
                for batch in _batches(pieces)
            ]
            done, waiting = wait(futures, timeout_s, FIRST_EXCEPTION)
            failure = next(filter(None, (future.exception() for future in done)), None)
            settled = failure is None and not waiting
        finally:
            if not settled:  # an interrupt too
                worker.kill()
        if failure is not None:
            raise TransferFailed(peer, str(failure)) from failure
        if waiting:
            raise TransferTimedOut(peer, timeout_s)


class EngineTransport:
    """As Transport. Raises TransportUnavailable when the library is not there or does not start."""

    def __init__(self, name: str, listen: Address) -> None:
        self.name, self._host = name, listen.reachable
        rdma = bool(rdma_devices())
        self.serving, self.reading = (
            Rebuilt(Settings(name, listen.reachable, serve=serve, rdma=rdma, parent=os.getpid()), ADVICE[name])
            for serve in (True, False)
        )
        self._numbers = itertools.count(1)
        self._regions: weakref.WeakSet[EngineRegion] = weakref.WeakSet()
        self._links: weakref.WeakSet[EngineLink] = weakref.WeakSet()
        self.serving.worker()

    @property
    def endpoint(self) -> bytes:
        data = self.serving.worker().endpoint
        return msgspec.msgpack.encode(EngineEndpoint(self.name, self._host, data))

    def register(self, buffer: Buffer, *, writable: bool) -> EngineRegion:
        """As in Transport. Raises ValueError for a buffer that is no shared mapping of a file; TransportUnavailable."""
        view = bytes_of(buffer, writable=writable)
        # RDMA pins for writing, what is only served as well.
        shared = Shared.of(view, writable=writable or bool(rdma_devices()))
        region = EngineRegion(self, next(self._numbers), shared, writable=writable)
        self._regions.add(region)
        return region

    def connect(self, endpoint: bytes) -> EngineLink:
        """As in Transport; a peer that is gone may be noticed at the first read only."""
        try:
            found = msgspec.msgpack.decode(endpoint, type=EngineEndpoint)
        except msgspec.DecodeError as error:
            raise PeerUnreachable("?", "its endpoint is of another transport") from error
        if found.engine != self.name:
            raise PeerUnreachable(found.peer, f"it uses {found.engine}, this host {self.name}")
        link = EngineLink(self.reading, found)
        self._links.add(link)
        return link

    def close(self) -> None:
        for engine in (self.reading, self.serving):
            engine.close()
        for link in list(self._links):
            link.close()
        for region in list(self._regions):
            region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _batches(pieces: Sequence[Piece]) -> list[list[tuple[int, int, int]]]:
    all_of_them = [(piece.local_offset, piece.remote_offset, piece.nbytes) for piece in pieces]
    return [all_of_them[start : start + BATCH] for start in range(0, len(all_of_them), BATCH)]
