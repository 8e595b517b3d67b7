"""The gateway's server: the public port and the admin port may speak different TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import uvicorn

from server.errors import ConfigError
from server.gateway.gateway import Gateway
from server.leaving import LeavingServer

HANDSHAKE_S = 10.0
FAREWELL_S = 2.0  # for an idle client to answer that its connection closes: nobody else waits for it


class GatewayServer(LeavingServer):
    """Listens on the sockets it is given: the public one first, then that of the admin port, if it serves that."""

    def __init__(
        self, config: uvicorn.Config, leave: Callable[[], Awaitable[bool]], admin_tls: ssl.SSLContext | None = None
    ) -> None:
        """`admin_tls`: None if the admin port speaks what the public one does."""
        super().__init__(config, leave)
        self._admin_tls = admin_tls
        self._handshakes: set[Handshake] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sockets is None:
            raise ConfigError("The gateway's server listens on the sockets that it is given; give it some.")
        await super().startup([])  # uvicorn's own listeners do not count handshakes
        loop, backlog = asyncio.get_running_loop(), self.config.backlog
        for at, listener in enumerate(sockets):
            context = self._admin_tls if at and self._admin_tls is not None else self.config.ssl
            make = self._protocol if context is None else self._handshake(context)
            self.servers.append(await loop.create_server(make, sock=listener, backlog=backlog))

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class  # type: ignore[assignment]
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _handshake(self, context: ssl.SSLContext) -> Callable[[], Handshake]:
        gateway: Gateway = self.lifespan.state["gateway"]

        def room() -> int:
            """For one there is always room: that client is told that all connections are taken."""
            return max(1, gateway.config.limits.max_connections - len(gateway.clients))

        return lambda: Handshake(context, self._protocol, self._handshakes, room)


class Handshake(asyncio.Protocol):
    """A connection until it speaks TLS. It counts as a connection: a client that stops here holds one, too.

    A listener with TLS of its own tells its protocol of a connection only once the handshake has ended.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        handshakes: set[Handshake],
        room: Callable[[], int],
    ) -> None:
        """`handshakes` has all of the server, `room` tells how many it may have."""
        self._context, self._make, self._handshakes, self._room = context, make, handshakes, room
        self._early = b""  # what the client has sent behind its handshake
        self._task: asyncio.Task[None] | None = None
        self._lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self._handshakes) >= self._room():
            transport.abort()
            return
        transport.pause_reading()  # until TLS reads
        self._handshakes.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    async def _shake(self, raw: asyncio.Transport) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                raw, self, self._context, server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=FAREWELL_S,
            )  # fmt: skip
        except OSError:  # refused, given up or too late: the connection is closed
            return
        finally:
            self._handshakes.discard(self)
        if transport is None or self._lost:
            return
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early:
            protocol.data_received(self._early)
