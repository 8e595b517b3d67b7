"""The interface of a library that carries a transport, and the messages of its process (child.py) and of isolated.py.

The messages are MessagePack on a SOCK_SEQPACKET pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

MAX_NBYTES = 192 << 10  # below the send buffer that Linux gives a socket
BATCH = 512  # pieces of one Read; Mooncake's engine breaks at 3,072


class EngineError(Exception):
    """The library refused or failed; the message says why."""


class Reading(Protocol):
    """Some pieces on their way."""

    def done(self) -> bool:
        """Whether all have arrived; does not block. Raises EngineError."""


class Engine(Protocol):
    """Addresses are of this process."""

    @property
    def endpoint(self) -> bytes:
        """How others reach it."""

    def register(self, address: int, nbytes: int) -> bytes:
        """Returns what a reader needs to know of it. Raises EngineError."""

    def forget(self, address: int, nbytes: int) -> None:
        """Raises EngineError."""

    def read(self, endpoint: bytes, remote: bytes, pieces: Sequence[tuple[int, int, int]]) -> Reading:
        """Begin. `pieces`: local address, remote offset, bytes. Raises EngineError."""


class Settings(msgspec.Struct, frozen=True):
    """The settings of a process at its start. `serve`: it serves regions; else it reads."""

    engine: str
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
    """`pieces`: local offset, remote offset, bytes; at most BATCH."""

    id: int
    region: int
    endpoint: bytes
    remote: bytes
    pieces: list[tuple[int, int, int]]


class Done(msgspec.Struct, frozen=True, tag=True):
    """`data`: of a Register the region's descriptor, of the beginning (id 0) the endpoint."""

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
