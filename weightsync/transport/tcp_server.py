"""The owner's side of the TCP transport: a reader with the token may read what is registered, within its bounds."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time

from weightsync.transport.addresses import Address
from weightsync.transport.protocol import Closed, Uses
from weightsync.transport.tcp_wire import (
    DESCRIPTOR,
    HANDSHAKE_TIMEOUT_S,
    HELLO,
    OK,
    REFUSED,
    REQUEST,
    TOKEN_NBYTES,
    Deadline,
    cut,
    quick,
    receive,
)

log = logging.getLogger("hotswap.transport")

MAX_CONNECTIONS = 256
SLICE = 4 << 20  # what is sent at once
STALLED_S = 60.0  # a reader that takes no slice for so long is left
IDLE_S = 600.0  # between requests
RETRY_S = 0.1


class ServedRegion:
    """A buffer that may be read. `key` cannot be guessed."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.nbytes, self.key, self.uses = view, len(view), secrets.token_bytes(16), Uses()
        self.descriptor = DESCRIPTOR.pack(self.key, self.nbytes)


class Server:
    """Listens from the beginning, with a thread for each connection. Raises OSError when it cannot listen."""

    def __init__(self, listen: Address, context: ssl.SSLContext | None) -> None:
        self.token = secrets.token_bytes(TOKEN_NBYTES)
        self._regions: dict[bytes, ServedRegion] = {}
        self._context, self._connections = context, Uses()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._socket = socket.create_server((listen.host, listen.port), family=listen.family, backlog=128)
        self.address = Address(listen.reachable, int(self._socket.getsockname()[1]))
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="transport-accept", daemon=True)
        self._thread.start()

    def add(self, view: memoryview) -> ServedRegion:
        region = ServedRegion(view)
        self._regions[region.key] = region
        return region

    def remove(self, region: ServedRegion) -> None:
        """Cuts the connections that are sending it; returns when nobody reads the buffer any more."""
        self._regions.pop(region.key, None)
        region.uses.close()

    def close(self) -> None:
        self._closed = True
        cut(self._socket)  # wakes `accept`
        self._thread.join()
        self._socket.close()
        self._connections.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:  # no file descriptors left, say: that passes
                    log.warning("a connection could not be accepted: %s", error)
                    time.sleep(RETRY_S)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                log.warning("more than %d connections: one was turned away", MAX_CONNECTIONS)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        try:
            threading.Thread(target=self._serve, args=(connection,), name="transport-serve", daemon=True).start()
        except RuntimeError as error:  # no more threads: that passes, and others must still be accepted
            connection.close()
            self._free.release()
            log.warning("a connection was turned away: %s", error)

    def _serve(self, connection: socket.socket) -> None:
        try:
            quick(connection)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            with contextlib.suppress(Closed), self._connections.use(lambda: cut(connection)):
                self._authenticate(connection)
                while self._answer(connection):
                    pass
        except (OSError, ValueError) as error:  # ValueError: ssl's, of a connection that was cut
            log.debug("a connection of the TCP transport ended: %s", error)
        finally:
            connection.close()
            self._free.release()

    def _authenticate(self, connection: socket.socket) -> None:
        """Raises OSError; whoever is refused learns nothing but that."""
        deadline = Deadline(HANDSHAKE_TIMEOUT_S)
        connection.settimeout(deadline.left())
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        shown = receive(connection, len(HELLO) + TOKEN_NBYTES, deadline)
        if not hmac.compare_digest(shown, HELLO + self.token):
            raise ConnectionError("a client without the token")
        connection.settimeout(deadline.left())
        connection.sendall(HELLO)

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; False when it was refused, which ends the connection."""
        key, offset, nbytes = REQUEST.unpack(receive(connection, REQUEST.size, Deadline(IDLE_S)))
        region = self._regions.get(key)
        connection.settimeout(STALLED_S)
        if region is None or offset + nbytes > region.nbytes:
            connection.sendall(REFUSED)
            return False
        try:
            with region.uses.use(lambda: cut(connection)):
                _send(connection, region.view[offset : offset + nbytes])
        except Closed:
            connection.sendall(REFUSED)
            return False
        return True


def _send(connection: socket.socket, view: memoryview) -> None:
    connection.sendall(OK)
    for start in range(0, len(view), SLICE):
        connection.sendall(view[start : start + SLICE])
