"""The gateway's server: the public port and the admin port may speak different TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from server.leaving import LeavingServer

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
        if self._admin_tls is None or sockets is None:
            await super().startup(sockets)
            return
        public, *admin = sockets
        await super().startup([public])
        tls: dict[str, Any] = {"ssl": self._admin_tls, "ssl_shutdown_timeout": FAREWELL_S}
        loop = asyncio.get_running_loop()
        for listener in admin:
            self.servers.append(await loop.create_server(self._protocol, sock=listener, **tls))

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
