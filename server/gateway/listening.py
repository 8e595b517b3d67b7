"""The gateway's server: the public port and the admin port may speak different TLS. And the settings of Python's and
C's memory management that are made once before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from server.errors import ConfigError
from server.gateway.gateway import Gateway
from server.leaving import LeavingServer

log = logging.getLogger("hotswap.gateway")
HANDSHAKE_S = 10.0
AGAIN_S = 1.0  # to the next attempt to accept, without a descriptor
REFUSED = 64  # handshakes beyond --max-connections that go on, for the client to be told with a status
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
            gateway: Gateway = self.lifespan.state["gateway"]
            if context is None:
                self.servers.append(await loop.create_server(self._protocol, sock=listener, backlog=backlog))
                continue
            tls = TlsListener(gateway, listener, context, self._protocol)
            tls.start(backlog)
            self.servers.append(tls)  # type: ignore[arg-type]

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class TlsListener:
    """Accepts connections that begin with a handshake. A handshake counts against --max-connections: a server of the
    loop's own tells of a connection only once its handshake has ended. An asyncio.Server by what uvicorn calls."""

    def __init__(
        self, gateway: Gateway, listener: socket.socket, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]
    ) -> None:
        self._gateway, self._listener, self._context, self._make = gateway, listener, context, make
        self._loop = asyncio.get_running_loop()

    def start(self, backlog: int) -> None:
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._backlog = backlog
        self._listen()

    def close(self) -> None:
        """No connection is accepted any more."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """It is closed at once."""

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        handshakes, most = self._gateway.handshakes, self._gateway.config.limits.max_connections
        for _ in range(self._backlog):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # of descriptors or memory there are none
                log.error("cannot accept a connection: %s; tried again in %g s", error.strerror, AGAIN_S)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(AGAIN_S, self._listen)
                return
            if len(handshakes) + len(self._gateway.clients) >= most + REFUSED:
                connection.close()
                continue
            agreeing = self._loop.create_task(self._agree(connection))
            handshakes.add(agreeing)
            agreeing.add_done_callback(handshakes.discard)

    async def _agree(self, connection: socket.socket) -> None:
        how: Any = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": FAREWELL_S}
        with contextlib.suppress(OSError):  # ssl.SSLError, and a client that leaves or is too slow
            await self._loop.connect_accepted_socket(self._make, connection, ssl=self._context, **how)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_FREE = 8 << 20
LARGE = 1 << 20


def spare_memory() -> None:
    """Few collections, and no page faults for every long prompt."""
    _spare_the_collector()
    _keep_freed_pages()


def _spare_the_collector() -> None:
    """The modules that are loaded by now stay, and requests leave no reference cycles: there is little to collect, and
    a full collection of 200,000 objects would hold every stream up for 50 ms each few seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _keep_freed_pages() -> None:
    """glibc gives a body of 128 KB back to the kernel as soon as it is freed, and the next one faults the same pages
    in again: a third of what a prompt of 220 KB costs. So up to 8 MiB stay. Another C library has no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)
