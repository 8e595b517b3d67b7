"""The process in which NIXL works, with its UCX backend: python -m weightsync.transport.nixl_process SETTINGS FD.

It does what the messages on the socket FD ask for (MessagePack on a SOCK_SEQPACKET pair; nixl.py is the other end), and
ends when the socket does. Its parent kills it when a read has failed: NIXL can then write into no buffer any more.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weightsync.dying import die_with
from weightsync.memory.arena import address_of
from weightsync.transport.addresses import interface_of

MAX_NBYTES = 192 << 10  # of a message; below the send buffer that Linux gives a socket
BATCH = 512  # pieces of one Read

BACKEND = "UCX"
MEMORY = "DRAM"
MODULES = ("nixl_cu13", "nixl_cu12")  # `nixl` itself is only the choice between the two
POLL_MS = 1  # while something is read
PROGRESS_US = 100_000  # the most that the library's thread waits for an event


class Settings(msgspec.Struct, frozen=True):
    """The settings of a process at its start. `serve`: it serves regions; else it reads."""

    host: str
    serve: bool
    rdma: bool
    parent: int


class Register(msgspec.Struct, frozen=True, tag=True):
    """The file descriptor of what is to be mapped comes with it."""

    id: int
    region: int
    offset: int
    nbytes: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    id: int
    region: int


class Read(msgspec.Struct, frozen=True, tag=True):
    """`pieces`: local offset, remote offset, bytes; at most BATCH. `remote`: as `Done` told of a Register."""

    id: int
    region: int
    remote: bytes
    pieces: list[tuple[int, int, int]]


class Done(msgspec.Struct, frozen=True, tag=True):
    """`data`: of a Register the region's descriptor. The beginning has id 0."""

    id: int
    data: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag=True):
    id: int
    reason: str


Request = Register | Forget | Read
Reply = Done | Failed
encode = msgspec.msgpack.encode
REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class Remote(msgspec.Struct, frozen=True):
    """NIXL's description of one region and the way to it, and the address where the region begins."""

    agent: str
    metadata: bytes
    address: int


class Agent:
    """NIXL's agent, which refuses and fails with OSError. Addresses are of this process."""

    def __init__(self, settings: Settings) -> None:
        """Raises OSError, ImportError, or what the library raises."""
        _configure(settings)
        library = _library()
        self._agent = library.nixl_agent(f"hotswap-{uuid.uuid4()}", library.nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self._agent.backends:
            raise OSError("NIXL has no UCX backend here")
        self._regions: dict[int, Any] = {}
        self._known: set[Remote] = set()

    def register(self, address: int, nbytes: int) -> bytes:
        """Returns what a reader needs to know of it. Raises OSError."""
        try:
            region = self._agent.register_memory([(address, nbytes, 0, "")], MEMORY, backends=[BACKEND])
        except Exception as error:  # the library's own classes, which need it to be imported
            raise OSError(f"NIXL does not register {nbytes:,} bytes ({error}): allow more locked memory") from error
        self._regions[address] = region
        metadata = self._agent.get_partial_agent_metadata(region, True, [BACKEND])
        return encode(Remote(self._agent.name, metadata, address))

    def forget(self, address: int) -> None:
        self._agent.deregister_memory(self._regions.pop(address), [BACKEND])

    def read(self, remote: bytes, pieces: Sequence[tuple[int, int, int]]) -> Reading:
        """Begin. `pieces`: local address, remote offset, bytes. Raises OSError."""
        region = msgspec.msgpack.decode(remote, type=Remote)
        try:
            self._learn(region)
            return Reading(self._agent, region, pieces)
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _learn(self, region: Remote) -> None:
        """A region that lies where another of that agent lay is refused at first: then forget what lay there."""
        if region in self._known:
            return
        try:
            self._agent.add_remote_agent(region.metadata)
        except Exception:
            self._agent.remove_remote_agent(region.agent)
            self._known = {known for known in self._known if known.agent != region.agent}
            self._agent.add_remote_agent(region.metadata)
        self._known.add(region)


class Reading:
    """Some pieces on their way."""

    def __init__(self, agent: Any, region: Remote, pieces: Sequence[tuple[int, int, int]]) -> None:
        import numpy as np

        local = np.array([(at, nbytes, 0) for at, _, nbytes in pieces], np.uint64)
        remote = np.array([(region.address + offset, nbytes, 0) for _, offset, nbytes in pieces], np.uint64)
        self._agent = agent
        self._handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, MEMORY), agent.get_xfer_descs(remote, MEMORY), region.agent
        )
        self._state = agent.transfer(self._handle)

    def done(self) -> bool:
        """Whether all have arrived; does not block. Raises OSError."""
        try:
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state == "DONE":
                self._agent.release_xfer_handle(self._handle)
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if self._state not in ("PROC", "DONE"):
            raise OSError(f"NIXL says {self._state}")
        return bool(self._state == "DONE")


def _configure(settings: Settings) -> None:
    """Before UCX is loaded. Settings that the environment has already stay."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    # Never another process's memory directly: containers of one host have different process numbers.
    os.environ.setdefault("UCX_TLS", "ib,tcp" if settings.rdma else "tcp")
    if not settings.rdma and (interface := interface_of(settings.host)) is not None:
        os.environ.setdefault("UCX_NET_DEVICES", interface)


def _library() -> Any:
    """The library, with a thread for progress that waits for events: as it comes, that thread takes a whole core."""
    for name in MODULES:
        try:
            library = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        config: Any = library.nixlBind.nixlAgentConfig

        class AgentConfig(config):  # type: ignore[misc]
            def __setattr__(self, field: str, value: Any) -> None:
                super().__setattr__(field, PROGRESS_US if field == "pthrDelay" else value)

        library.nixlBind.nixlAgentConfig = AgentConfig
        return library
    raise ModuleNotFoundError("No module named 'nixl_cu12'")


@dataclass(frozen=True)
class MappedRegion:
    """A region as this process has it mapped: from `address` of `mapping`, which begins on a page."""

    mapping: mmap.mmap
    address: int


class Child:
    """Requests are begun one after the other; reads then go on side by side."""

    def __init__(self, agent: Agent, channel: socket.socket, *, writable: bool) -> None:
        self._agent, self._channel, self._writable = agent, channel, writable
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
        except (OSError, msgspec.DecodeError) as error:
            self._reply(Failed(request.id, str(error)))

    def _register(self, request: Register, fd: int) -> bytes:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable else 0)
        begin = request.offset - request.offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(fd, request.offset - begin + request.nbytes, prot=access, offset=begin)
        finally:
            os.close(fd)
        address = address_of(memoryview(mapping)) + request.offset - begin
        self._regions[request.region] = MappedRegion(mapping, address)
        return self._agent.register(address, request.nbytes)

    def _forget(self, request: Forget) -> None:
        """Unmapped too: the library can then neither read nor write there, whatever it thinks."""
        region = self._regions.pop(request.region)
        try:
            self._agent.forget(region.address)
        finally:
            region.mapping.close()

    def _read(self, request: Read) -> Reading:
        region = self._regions[request.region]
        pieces = [(region.address + local, remote, nbytes) for local, remote, nbytes in request.pieces]
        return self._agent.read(request.remote, pieces)

    def _look(self, number: int, reading: Reading) -> None:
        try:
            if not reading.done():
                return
            reply: Reply = Done(number)
        except OSError as error:
            reply = Failed(number, str(error))
        del self._readings[number]
        self._reply(reply)

    def _reply(self, reply: Reply) -> None:
        self._channel.send(encode(reply))


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    channel = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent
    die_with(settings.parent, signal.SIGKILL)
    try:
        agent = Agent(settings)
    except Exception as error:  # whatever the library raises when it does not work here
        channel.send(encode(Failed(0, f"{type(error).__name__}: {error}")))
        return
    channel.send(encode(Done(0)))
    # RDMA devices pin pages for writing only.
    Child(agent, channel, writable=settings.rdma or not settings.serve).run()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone
        main()
    os._exit(0)  # without the library's clean-up, which may wait for peers
