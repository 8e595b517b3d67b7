"""The transport that needs no library and no device: TCP, with mutual TLS where the cluster has certificates.

Beyond loopback it does not listen without TLS. Readers also show a token. Only those who were given the endpoint know
it, and the endpoint travels over an authenticated channel. tcp_server.py is the owner's side, tcp_wire.py the format.

A read goes over several connections at once. When it fails, it closes them and waits for its threads, which are the
only ones that write into the buffer: a frozen peer that wakes and sends finds no connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec

from weightsync.errors import PeerUnreachable, TransferError, TransportUnavailable, transfer_failed, transfer_timed_out
from weightsync.tls import ClusterTls
from weightsync.transport.addresses import Address
from weightsync.transport.protocol import Buffer, Closed, Piece, Region, Transport, Uses, bytes_of, check_pieces
from weightsync.transport.tcp_server import ServedRegion, Server
from weightsync.transport.tcp_wire import (
    DESCRIPTOR,
    HANDSHAKE_TIMEOUT_S,
    HELLO,
    OK,
    REQUEST,
    WINDOW,
    Deadline,
    cut,
    is_idle,
    quick,
    receive,
    receive_into,
)

STREAMS = min(4, os.cpu_count() or 1)
Using = Callable[[socket.socket], AbstractContextManager[object]]
MIN_STRIPE = 1 << 20  # bytes; less is not worth a connection of its own


class TcpEndpoint(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: bytes
    tls: bool


class TcpRegion:
    """As Region: served to others, and read into if it is writable."""

    def __init__(self, server: Server, served: ServedRegion, *, writable: bool) -> None:
        self.view, self.nbytes, self.descriptor = served.view, served.nbytes, served.descriptor
        self.writable, self.uses = writable, Uses()
        self._server, self._served = server, served

    def close(self) -> None:
        """As in Region. The buffer may be unmapped afterwards."""
        self._server.remove(self._served)
        self.uses.close()
        self.view.release()


class TcpTransport(Transport):
    """As Transport. `streams`: connections that one read is spread over. Raises TransportUnavailable."""

    name = "tcp"

    def __init__(self, listen: Address, tls: ClusterTls | None, streams: int = STREAMS) -> None:
        if tls is None and not listen.loopback:
            raise TransportUnavailable(
                "tcp",
                f"it does not listen on {listen.host} without TLS",
                "Give the cluster certificates (HOTSWAP_CLUSTER_TLS, docs/security.md), or listen on 127.0.0.1",
            )
        self._tls, self._streams = tls, streams
        try:
            self._server = Server(listen, tls.server_context() if tls else None)
        except OSError as error:
            reason = f"it cannot listen on {listen} ({error})"
            raise TransportUnavailable("tcp", reason, "Choose an address of this host and a free port") from error
        self._links: weakref.WeakSet[TcpLink] = weakref.WeakSet()
        self._regions: weakref.WeakSet[TcpRegion] = weakref.WeakSet()

    @property
    def endpoint(self) -> bytes:
        address = self._server.address
        return msgspec.msgpack.encode(
            TcpEndpoint(address.host, address.port, self._server.token, tls=self._tls is not None)
        )

    def register(self, buffer: Buffer, *, writable: bool) -> TcpRegion:
        """As in Transport. Raises ValueError for a buffer that cannot be."""
        region = TcpRegion(self._server, self._server.add(bytes_of(buffer, writable=writable)), writable=writable)
        self._regions.add(region)
        return region

    def connect(self, endpoint: bytes) -> TcpLink:
        """As in Transport."""
        try:
            found = msgspec.msgpack.decode(endpoint, type=TcpEndpoint)
        except msgspec.DecodeError as error:
            raise PeerUnreachable("?", "its endpoint is of another transport") from error
        if not (_is_address(found.host) and 0 < found.port < 1 << 16):  # a name might take long to look up
            raise PeerUnreachable(f"{found.host[:64]}:{found.port}", "its endpoint is no address")
        if found.tls != (self._tls is not None):
            mine, its = ("TLS", "none") if self._tls else ("no TLS", "it")
            raise PeerUnreachable(f"{found.host}:{found.port}", f"this host uses {mine}, the peer {its}")
        context = self._tls.client_context() if self._tls else None
        link = TcpLink(Dialer(found.host, found.port, found.token, context), self._streams)
        self._links.add(link)
        return link

    def close(self) -> None:
        """As in Transport."""
        for link in list(self._links):
            link.close()
        for region in list(self._regions):
            region.close()
        self._server.close()


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


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
        assert isinstance(into, TcpRegion), "a region of another transport"
        assert into.writable, "a region that was not registered as writable"
        peer, deadline, job = self._dialer.peer, Deadline(timeout_s), _Job()
        try:
            key, nbytes = DESCRIPTOR.unpack(remote)
        except struct.error as error:
            raise transfer_failed(peer, "its region is of another transport") from error
        check_pieces(peer, pieces, into.nbytes, nbytes)

        def end() -> None:
            job.fail(ConnectionAbortedError("the region or the link was closed"))

        try:
            with self._uses.use(end), into.uses.use(end):
                self._read_stripes(job, into.view, key, stripes(pieces, self._streams), deadline)
        except Closed:
            raise transfer_failed(peer, "the region or the link is closed") from None
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
            return transfer_timed_out(self._dialer.peer, timeout_s)
        return transfer_failed(self._dialer.peer, str(error))


def _exchange(connection: socket.socket, view: memoryview, key: bytes, part: list[Piece], deadline: Deadline) -> None:
    """Ask for all pieces, then take them in. Raises OSError."""
    connection.settimeout(deadline.left())
    connection.sendall(b"".join(REQUEST.pack(key, piece.remote_offset, piece.nbytes) for piece in part))
    for piece in part:
        if receive(connection, 1, deadline) != OK:
            raise ConnectionError("the peer refuses: the region is closed there, or smaller")
        receive_into(connection, view[piece.local_offset : piece.local_offset + piece.nbytes], deadline)


@dataclass(frozen=True)
class Dialer:
    """A dialer reaches a peer."""

    host: str
    port: int
    token: bytes
    context: ssl.SSLContext | None

    @property
    def peer(self) -> str:
        return f"{self.host}:{self.port}"

    def dial(self, deadline: Deadline, using: Using = contextlib.nullcontext) -> socket.socket:
        """A connection on which the peer has accepted the token; `using` may cut it before. Raises OSError."""
        connection = socket.create_connection((self.host, self.port), deadline.left())
        try:
            quick(connection)
            if self.context is not None:
                connection = self.context.wrap_socket(connection, do_handshake_on_connect=False)
            with using(connection):
                self._introduce(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _introduce(self, connection: socket.socket, deadline: Deadline) -> None:
        connection.settimeout(deadline.left())
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        connection.sendall(HELLO + self.token)
        if receive(connection, len(HELLO), deadline) != HELLO:
            raise ConnectionError("what answers is no transport of this release")


def stripes(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """The same bytes in at most `count` lists of equal size, the last one shorter, none made below MIN_STRIPE."""
    total = sum(piece.nbytes for piece in pieces)
    size = max(MIN_STRIPE, -(-total // count))
    parts: list[list[Piece]] = []
    room = 0
    for piece in _cut_at(pieces, size):
        if room < piece.nbytes or not parts:
            parts.append([])
            room = size
        parts[-1].append(piece)
        room -= piece.nbytes
    return parts


def _cut_at(pieces: Sequence[Piece], size: int) -> Iterable[Piece]:
    """The same bytes, cut where a stripe of `size` bytes is full; empty pieces fall away."""
    room = size
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            taken = min(room, piece.nbytes - done)
            yield Piece(piece.local_offset + done, piece.remote_offset + done, taken)
            done += taken
            room = room - taken or size
