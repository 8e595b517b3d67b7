"""Mooncake's transfer engine, in a process of its own.

It listens on every address whatever it is told, and lets anyone who connects read and write the memory of its process
without asking who that is. Therefore `confine` filters what reaches its sockets, and the process that serves maps slots
read-only.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from weightsync.transport.engine import EngineError, Settings

IN_FLIGHT = 64  # pieces of one read
REFUSED = (0, -1, (1 << 64) - 1)  # instead of a batch
SO_ATTACH_FILTER = 26  # Linux; not in the socket module
NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from the IP header
LD_BYTE, LD_WORD, AND, JUMP_EQUAL, RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
DROP, KEEP = 0, 0xFFFFFFFF

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class Remote(msgspec.Struct, frozen=True):
    address: int


class MooncakeEngine:
    """As Engine."""

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # or it logs every transfer
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        protocol = "rdma" if settings.rdma else "tcp"
        if self._engine.initialize(settings.host, "P2PHANDSHAKE", protocol, ""):
            raise EngineError(f"Mooncake's engine does not start with {protocol} on {settings.host}")
        confine(settings.host if settings.serve else None)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.endpoint = f"{host}:{self._engine.get_rpc_port()}".encode()

    def register(self, address: int, nbytes: int) -> bytes:
        if self._engine.register_memory(address, nbytes):
            raise EngineError(f"Mooncake does not register {nbytes:,} bytes: allow more locked memory (ulimit -l)")
        return msgspec.msgpack.encode(Remote(address))

    def forget(self, address: int, nbytes: int) -> None:
        if self._engine.unregister_memory(address):
            raise EngineError("Mooncake does not know the region")

    def read(self, endpoint: bytes, remote: bytes, pieces: Sequence[tuple[int, int, int]]) -> MooncakeReading:
        base = msgspec.msgpack.decode(remote, type=Remote).address
        return MooncakeReading(self._engine, endpoint.decode(), [(at, base + offset, n) for at, offset, n in pieces])


class MooncakeReading:
    """Each piece is a batch of its own: batches of several can only be waited for in a loop that keeps a core busy."""

    def __init__(self, engine: Any, peer: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._engine, self._peer = engine, peer
        self._waiting, self._in_flight = deque(pieces), list[int]()
        self._fill()

    def done(self) -> bool:
        states = [(batch, self._engine.transfer_check_status(batch)) for batch in self._in_flight]
        if any(state < 0 for _, state in states):
            raise EngineError("the peer is gone, or refuses")
        self._in_flight = [batch for batch, state in states if state == 0]
        self._fill()
        return not self._in_flight

    def _fill(self) -> None:
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            local, remote, nbytes = self._waiting.popleft()
            batch = self._engine.batch_transfer_async_read(self._peer, [local], [remote], [nbytes])
            if batch in REFUSED:
                raise EngineError("the peer cannot be reached")
            self._in_flight.append(batch)


def confine(host: str | None) -> None:
    """All TCP sockets on which this process listens, and what they accept later. None: nobody may connect any more."""
    program = _only(ipaddress.ip_address(host)) if host is not None else [(RETURN, 0, 0, DROP)]
    if not program:
        return
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    for listening in _listening():
        with listening:
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)


def _only(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Instruction]:
    """Packets to the address, by its version; none is needed for a wildcard."""
    if address.is_unspecified:
        return []
    start = 16 if address.version == 4 else 24
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    compare: list[Instruction] = []
    for number, word in enumerate(words):
        left = 2 * (len(words) - number) - 1  # instructions to the one that drops
        compare += [
            (LD_WORD, 0, 0, NETWORK_HEADER + start + 4 * number),
            (JUMP_EQUAL, 0, left, word),
        ]
    version: list[Instruction] = [
        (LD_BYTE, 0, 0, NETWORK_HEADER),
        (AND, 0, 0, 0xF0),
        (JUMP_EQUAL, 0, len(compare) + 1, address.version << 4),
    ]
    return [*version, *compare, (RETURN, 0, 0, KEEP), (RETURN, 0, 0, DROP)]


def _listening() -> list[socket.socket]:
    """Duplicates, which the caller closes."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            candidate = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # closed meanwhile
            continue
        if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            found.append(candidate)
        else:
            candidate.close()
    return found
