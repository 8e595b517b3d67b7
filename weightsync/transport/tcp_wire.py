"""The wire format of the TCP transport.

    reader: HELLO, then the 32 bytes of the token            owner: HELLO, or it hangs up
    reader: up to WINDOW requests (region, offset, nbytes)   owner: for each, OK and the bytes, or REFUSED and nothing

All numbers are big-endian. TLS, where it is used, begins before the first byte.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time

HELLO = b"HSWP\x01"
TOKEN_NBYTES = 32
REQUEST = struct.Struct(">16sQQ")
DESCRIPTOR = struct.Struct(">16sQ")  # the region and its length
OK, REFUSED = b"\0", b"\1"
WINDOW = 128  # requests fit into the buffers of a socket, so that neither side waits for the other to read
HANDSHAKE_TIMEOUT_S = 5.0
SET_AGAIN_S = 0.1  # by so much a time-out may be late


class Deadline:
    """A moment by the monotonic clock, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds. Raises TimeoutError when there are none."""
        if (left := self._at - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        return left


def receive_into(connection: socket.socket, view: memoryview, deadline: Deadline) -> None:
    """Fill `view`. Raises ConnectionError when the other side ends too early, OSError, TimeoutError."""
    done, left = 0, math.inf
    while done < len(view):
        if (now := deadline.left()) < left - SET_AGAIN_S:  # a system call, and TLS gives 16 KiB at a time
            left = now
            connection.settimeout(left)
        got = connection.recv_into(view[done:])
        if not got:
            raise ConnectionError("the peer closed the connection")
        done += got


def receive(connection: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """As `receive_into`."""
    data = bytearray(nbytes)
    receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def cut(connection: socket.socket) -> None:
    """Make reads and writes of other threads on it end now."""
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket's own would drop TLS and read on without it


def quick(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_idle(connection: socket.socket) -> bool:
    """Whether a kept connection still stands: nothing is to be read from it, not even its end."""
    poller = select.poll()  # select() takes no descriptor beyond 1,023
    poller.register(connection, select.POLLIN)
    return not poller.poll(0)
