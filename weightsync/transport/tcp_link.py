"""The reader's side of the TCP transport: pieces of a region, over several connections at once, into a buffer.

A read that fails closes its connections and waits for its threads, which are the only ones that write into the buffer:
what a frozen peer sends when it wakes finds no connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weightsync.errors import PeerUnreachable, TransferError, TransferFailed, TransferTimedOut
from weightsync.transport.checks import check_pieces
from weightsync.transport.protocol import Piece, Region
from weightsync.transport.stripes import stripes
from weightsync.transport.tcp_dial import Dialer
from weightsync.transport.tcp_wire import (
    DESCRIPTOR,
    HANDSHAKE_TIMEOUT_S,
    OK,
    REQUEST,
    WINDOW,
    Deadline,
    cut,
    is_idle,
    receive,
    receive_into,
)
from weightsync.transport.uses import Closed, Uses


class LocalRegion:
    """A registered buffer, as this side's reads see it. `descriptor`: for the readers of others."""

    def __init__(self, view: memoryview, descriptor: bytes, *, writable: bool) -> None:
        self.view, self.nbytes, self.descriptor = view, len(view), descriptor
        self.writable, self.uses = writable, Uses()


@dataclass
class _Job:
    """One read: the connections it uses now, and why it failed."""

    error: Exception | None = None
    _connections: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: Exception) -> None:
        """The first error counts; the others follow from the connections that it cuts."""
        with self._lock:
            self.error = self.error or error
            for connection in self._connections:
                cut(connection)

    @contextlib.contextmanager
    def using(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            if self.error is not None:
                raise ConnectionAbortedError("another part of this read has failed")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)


class TcpLink:
    """Connections to one peer; those that are idle are kept. Raises PeerUnreachable when there is none to be had."""

    def __init__(self, dialer: Dialer, streams: int) -> None:
        self._dialer, self._streams, self._uses = dialer, streams, Uses()
        self._lock = threading.Lock()
        try:
            self._idle = [dialer.dial(Deadline(HANDSHAKE_TIMEOUT_S))]
        except (OSError, ValueError, OverflowError) as error:  # the last two: what is no host name, and no port
            raise PeerUnreachable(dialer.peer, str(error)) from error

    def read(self, into: Region, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """As in Link."""
        assert isinstance(into, LocalRegion), "a region of another transport"
        assert into.writable, "a region that was not registered as writable"
        peer, deadline, job = self._dialer.peer, Deadline(timeout_s), _Job()
        try:
            key, nbytes = DESCRIPTOR.unpack(remote)
        except struct.error as error:
            raise TransferFailed(peer, "its region is of another transport") from error
        check_pieces(peer, pieces, into.nbytes, nbytes)

        def end() -> None:
            job.fail(ConnectionAbortedError("the region or the link was closed"))

        try:
            with self._uses.use(end), into.uses.use(end):
                self._read_stripes(job, into.view, key, stripes(pieces, self._streams), deadline)
        except Closed:
            raise TransferFailed(peer, "the region or the link is closed") from None
        if job.error is not None:
            raise self._told(job.error, timeout_s) from job.error

    def close(self) -> None:
        self._uses.close()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _read_stripes(
        self, job: _Job, view: memoryview, key: bytes, parts: list[list[Piece]], deadline: Deadline
    ) -> None:
        """The first in this thread, the others in their own; all are over when it returns."""
        threads = [
            threading.Thread(target=self._read_stripe, args=(job, view, key, part, deadline), daemon=True)
            for part in parts[1:]
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            if parts:
                self._read_stripe(job, view, key, parts[0], deadline)
        except BaseException as error:  # an interrupt, or there can be no more threads
            job.fail(ConnectionAbortedError(f"interrupted ({error})"))
            if not isinstance(error, RuntimeError):
                raise
        finally:
            for thread in started:
                thread.join()

    def _read_stripe(self, job: _Job, view: memoryview, key: bytes, part: list[Piece], deadline: Deadline) -> None:
        connection = None
        try:
            connection = self._connection(job, deadline)
            with job.using(connection):
                for start in range(0, len(part), WINDOW):
                    _exchange(connection, view, key, part[start : start + WINDOW], deadline)
            self._keep(connection)
        except Exception as error:  # whatever it is: a stripe that is not there must not pass for one that is
            job.fail(error)
            if connection is not None:
                connection.close()

    def _connection(self, job: _Job, deadline: Deadline) -> socket.socket:
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                return self._dial(job, deadline)
            if is_idle(found):
                return found
            found.close()

    def _dial(self, job: _Job, deadline: Deadline) -> socket.socket:
        try:
            return self._dialer.dial(Deadline(min(HANDSHAKE_TIMEOUT_S, deadline.left())), job.using)
        except TimeoutError as error:
            deadline.left()  # raises if it is the read's time that is over
            raise ConnectionError(f"no new connection within {HANDSHAKE_TIMEOUT_S:g} s") from error

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._uses.closed:
                self._idle.append(connection)
                return
        connection.close()

    def _told(self, error: Exception, timeout_s: float) -> TransferError:
        if isinstance(error, TransferError):
            return error
        if isinstance(error, TimeoutError):
            return TransferTimedOut(self._dialer.peer, timeout_s)
        return TransferFailed(self._dialer.peer, str(error))


def _exchange(connection: socket.socket, view: memoryview, key: bytes, part: list[Piece], deadline: Deadline) -> None:
    """Ask for all pieces, then take them in. Raises OSError."""
    connection.settimeout(deadline.left())
    connection.sendall(b"".join(REQUEST.pack(key, piece.remote_offset, piece.nbytes) for piece in part))
    for piece in part:
        if receive(connection, 1, deadline) != OK:
            raise ConnectionError("the peer refuses: the region is closed there, or smaller")
        receive_into(connection, view[piece.local_offset : piece.local_offset + piece.nbytes], deadline)
