"""What moves the bytes of a slot from one host to another: reads out of memory that its owner has registered.

An owner registers a buffer and hands out two opaque byte strings, the `endpoint` of its transport and the `descriptor`
of the region, over a channel of the caller's. A reader connects to the endpoint and reads pieces of the region into a
region of its own. All calls block and may be made from any thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

Buffer = memoryview | mmap.mmap


@dataclass(frozen=True)
class Piece:
    """`nbytes` bytes that lie at `remote_offset` of the remote region and go to `local_offset` of the local one."""

    local_offset: int
    remote_offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.local_offset < 0 or self.remote_offset < 0 or self.nbytes < 0:
            raise ValueError(f"{self} has a negative number")


class Region(Protocol):
    """A registered buffer. It may be read by others, until it is closed, by whoever has `descriptor`."""

    @property
    def descriptor(self) -> bytes:
        """Opaque; `remote` of a read on the other side."""

    def close(self) -> None:
        """Nobody reads it or writes into it through the transport afterwards. Reads in flight fail. Twice is fine."""


class Link(Protocol):
    """A way to one peer. Several links, and several reads on one, may be in use at once."""

    def read(self, into: Region, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read all pieces into `into`, a writable region of the same transport; returns when all bytes are there.

        Raises TransferFailed (the peer died or refused, a piece is out of range, another link's failure stopped this
        read) or TransferTimedOut (not done after `timeout_s`). When it has raised, some pieces may have arrived, in
        part, and nothing is written into `into` any more. Never writes outside the pieces.
        """

    def close(self) -> None:
        """Reads in flight fail. Twice is fine."""


class Transport(Protocol):
    """One per process and kind: it serves the regions registered with it, and reads those of others."""

    @property
    def name(self) -> str:
        """`nixl`, `mooncake` or `tcp`."""

    @property
    def endpoint(self) -> bytes:
        """Opaque, for `connect` on another host; asked for again for every peer, since it may change."""

    def register(self, buffer: Buffer, *, writable: bool) -> Region:
        """Once per buffer: it may be slow, since RDMA pins the pages. `writable` for a region that is read into."""

    def connect(self, endpoint: bytes) -> Link:
        """Raises PeerUnreachable."""

    def close(self) -> None:
        """Ends all links and regions. Twice is fine."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
