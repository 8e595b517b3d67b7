"""The process in which a library works for a transport: python -m weightsync.transport.child SETTINGS FD.

It does what the messages on the socket FD ask for (engine.py), and ends when the socket does. Its parent kills it when
a read has failed: the library can then write into no buffer any more, which is why it has a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass

import msgspec

from weightsync.memory.arena import address_of
from weightsync.transport.engine import (
    MAX_NBYTES,
    REQUESTS,
    Done,
    Engine,
    EngineError,
    Failed,
    Forget,
    Read,
    Reading,
    Register,
    Reply,
    Request,
    Settings,
    encode,
)

PR_SET_PDEATHSIG = 1
POLL_MS = 1  # while something is read


@dataclass(frozen=True)
class MappedRegion:
    """A region as this process has it mapped: from `address` of `mapping`, which begins on a page."""

    mapping: mmap.mmap
    address: int
    nbytes: int


class Child:
    """Requests are begun one after the other; reads then go on side by side."""

    def __init__(self, engine: Engine, channel: socket.socket, *, writable: bool) -> None:
        self._engine, self._channel, self._writable = engine, channel, writable
        self._regions: dict[int, MappedRegion] = {}
        self._readings: dict[int, Reading] = {}

    def run(self) -> None:
        """Until the other end of the channel is closed."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while True:
            if poller.poll(POLL_MS if self._readings else None):
                data, fds, _, _ = socket.recv_fds(self._channel, MAX_NBYTES, 1)
                if not data:
                    return
                self._begin(REQUESTS.decode(data), fds)
            for number, reading in list(self._readings.items()):
                self._look(number, reading)

    def _begin(self, request: Request, fds: list[int]) -> None:
        try:
            match request:
                case Register():
                    self._reply(Done(request.id, self._register(request, fds[0])))
                case Forget():
                    self._forget(request)
                    self._reply(Done(request.id))
                case Read():
                    self._readings[request.id] = self._read(request)
        except (EngineError, OSError, msgspec.DecodeError) as error:
            self._reply(Failed(request.id, str(error)))

    def _register(self, request: Register, fd: int) -> bytes:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable else 0)
        begin = request.offset - request.offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(fd, request.offset - begin + request.nbytes, prot=access, offset=begin)
        finally:
            os.close(fd)
        address = address_of(memoryview(mapping)) + request.offset - begin
        self._regions[request.region] = MappedRegion(mapping, address, request.nbytes)
        return self._engine.register(address, request.nbytes)

    def _forget(self, request: Forget) -> None:
        """Unmapped too: the library can then neither read nor write there, whatever it thinks."""
        region = self._regions.pop(request.region)
        try:
            self._engine.forget(region.address, region.nbytes)
        finally:
            region.mapping.close()

    def _read(self, request: Read) -> Reading:
        region = self._regions[request.region]
        pieces = [(region.address + local, remote, nbytes) for local, remote, nbytes in request.pieces]
        return self._engine.read(request.endpoint, request.remote, pieces)

    def _look(self, number: int, reading: Reading) -> None:
        try:
            if not reading.done():
                return
            reply: Reply = Done(number)
        except EngineError as error:
            reply = Failed(number, str(error))
        del self._readings[number]
        self._reply(reply)

    def _reply(self, reply: Reply) -> None:
        self._channel.send(encode(reply))


def load(settings: Settings) -> Engine:
    """Raises EngineError, ImportError, or what the library raises."""
    if settings.engine == "mooncake":
        from weightsync.transport.mooncake import MooncakeEngine

        return MooncakeEngine(settings)
    from weightsync.transport.nixl import NixlEngine

    return NixlEngine(settings)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    channel = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings.parent:  # it died before that
        return
    try:
        engine = load(settings)
    except Exception as error:  # whatever a library raises when it does not work here
        channel.send(encode(Failed(0, f"{type(error).__name__}: {error}")))
        return
    channel.send(encode(Done(0, engine.endpoint)))
    # RDMA devices pin pages for writing only.
    Child(engine, channel, writable=settings.rdma or not settings.serve).run()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone
        main()
    os._exit(0)  # without the library's clean-up, which may wait for peers
