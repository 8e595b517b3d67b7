"""A reader's connection to the owner of a region."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from weightsync.transport.tcp_wire import HELLO, Deadline, quick, receive


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

    def dial(self, deadline: Deadline) -> socket.socket:
        """A connection on which the peer has accepted the token. Raises OSError."""
        connection = socket.create_connection((self.host, self.port), deadline.left())
        try:
            quick(connection)
            connection.settimeout(deadline.left())
            if self.context is not None:
                connection = self.context.wrap_socket(connection)
            connection.sendall(HELLO + self.token)
            if receive(connection, len(HELLO), deadline) != HELLO:
                raise ConnectionError("what answers is no transport of this release")
        except BaseException:
            connection.close()
            raise
        return connection
