"""A reader's connection to the owner of a region."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from weightsync.transport.tcp_wire import HELLO, Deadline, quick, receive

Using = Callable[[socket.socket], AbstractContextManager[object]]


@dataclass(frozen=True)
class Dialer:
    """How to reach a peer."""

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
