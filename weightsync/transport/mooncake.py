"""Mooncake's transfer engine, in a process of its own.

It listens on every address whatever it is told, and lets whoever connects read and write the memory of its process
without asking who that is. Hence the filter on its sockets, and hence the process that serves maps slots read-only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from weightsync.transport.confine import confine
from weightsync.transport.engine import EngineError
from weightsync.transport.messages import Settings

IN_FLIGHT = 64  # pieces of one read
REFUSED = (0, -1, (1 << 64) - 1)  # instead of a batch


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
