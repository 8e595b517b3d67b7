"""A transport moves the bytes of a slot between hosts: it reads memory that its owner has registered.

An owner registers a buffer and hands out two opaque byte strings, the `endpoint` of its transport and the `descriptor`
of the region, over a channel of the caller's. A reader connects to the endpoint and reads pieces of the region into a
region of its own. All calls block and may be made from any thread.

The needs of every transport follow the protocol: checks before a byte moves, and `Uses`, which ends reads in flight.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import transfer_failed

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 lacks it

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
        """The transport neither reads the buffer nor writes into it afterwards. Reads in flight fail. Twice is fine."""


class Link(Protocol):
    """A way to one peer. Several links, and several reads on one, may be in use at once."""

    def read(self, into: Region, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read all pieces into `into`, a writable region of the same transport; returns when all bytes are there.

        Raises TransferError (the peer died or refused, a piece is out of range, another link's failure stopped this
        read, or it is not done after `timeout_s`). When it has raised, some pieces may have arrived, in part,
        and nothing is written into `into` any more. Never writes outside the pieces.
        """

    def close(self) -> None:
        """Reads in flight fail. Twice is fine."""


class Transport(Protocol):
    """One per process and kind: it serves the regions registered with it, and reads those of others. As a context
    manager it closes itself."""

    @property
    def name(self) -> str:
        """`nixl` or `tcp`."""

    @property
    def endpoint(self) -> bytes:
        """Opaque, for `connect` on another host; asked for again for every peer, since it may change."""

    def register(self, buffer: Buffer, *, writable: bool) -> Region:
        """Once per buffer: it may be slow, since RDMA pins the pages. `writable` for a region that is read into."""

    def connect(self, endpoint: bytes) -> Link:
        """Raises PeerUnreachable."""

    def close(self) -> None:
        """Ends all links and regions. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bytes_of(buffer: Buffer, *, writable: bool) -> memoryview:
    """The buffer as bytes. Raises ValueError when it is not contiguous, or read-only and to be written."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("only a contiguous buffer can be registered")
    if writable and view.readonly:
        raise ValueError("a region that is read into needs a writable buffer")
    return view.cast("B")


def check_pieces(peer: str, pieces: Sequence[Piece], local_nbytes: int, remote_nbytes: int) -> None:
    """Raises TransferError when a piece reaches beyond one of the regions."""
    for piece in pieces:
        if piece.local_offset + piece.nbytes > local_nbytes:
            raise transfer_failed(peer, f"{piece} reaches beyond the {local_nbytes:,} bytes of the region it goes to")
        if piece.remote_offset + piece.nbytes > remote_nbytes:
            raise transfer_failed(peer, f"{piece} reaches beyond the {remote_nbytes:,} bytes of the peer's region")


class Closed(Exception):
    """The thing was closed; the caller says it in its own words."""


class Uses:
    """Uses of a region, link or transport. `close` ends those in flight and returns when the last one is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._enders: dict[object, Callable[[], None]] = {}
        self._closed = False

    @contextlib.contextmanager
    def use(self, end: Callable[[], None]) -> Iterator[None]:
        """Inside, the thing is there. Another thread calls `end` to make the inside end soon. Raises Closed."""
        key = object()
        with self._changed:
            if self._closed:
                raise Closed
            self._enders[key] = end
        try:
            yield
        finally:
            with self._changed:
                del self._enders[key]
                self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """No use can begin any more, and all have ended. Twice is fine."""
        with self._changed:
            self._closed = True
            enders = list(self._enders.values())
        for end in enders:
            end()
        with self._changed:
            self._changed.wait_for(lambda: not self._enders)
