"""The gateway's server: the public port and the admin port may speak different TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from server.errors import ConfigError
from server.leaving import LeavingServer

HANDSHAKE_S = 10.0  # a connection counts against --max-connections only once it has ended
FAREWELL_S = 2.0  # for an idle client to answer that its connection closes: nobody else waits for it


class GatewayServer(LeavingServer):
    """Listens on the sockets it is given: the public one first, then that of the admin port, if it serves that."""

    def __init__(
        self, config: uvicorn.Config, leave: Callable[[], Awaitable[bool]], admin_tls: ssl.SSLContext | None = None
    ) -> None:
        """`admin_tls`: None if the admin port speaks what the public one does."""
        super().__init__(config, leave)
        self._admin_tls = admin_tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sockets is None:
            raise ConfigError("The gateway's server listens on the sockets that it is given; give it some.")
        await super().startup([])  # of uvicorn's own listeners a handshake may take a minute
        loop, backlog = asyncio.get_running_loop(), self.config.backlog
        for at, listener in enumerate(sockets):
            context = self._admin_tls if at and self._admin_tls is not None else self.config.ssl
            tls: dict[str, Any] = {}
            if context is not None:
                tls = {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": FAREWELL_S}
            self.servers.append(await loop.create_server(self._protocol, sock=listener, backlog=backlog, **tls))

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
