"""uvicorn's part of a client connection: it runs the app for the requests that are not forwarded (connection.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState


class AppSide(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, told of one request at a time by the connection that reads them.

    The connection's parser, its deadlines and its place among uvicorn's connections stay the connection's own.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        transport: asyncio.Transport,
        answered: Callable[[], None],
    ) -> None:
        """`answered` is called at the end of each answer."""
        super().__init__(config, server_state, app_state)
        self._answered = answered
        self.transport = transport
        self.flow = FlowControl(transport)
        self.server, self.client = get_local_addr(transport), get_remote_addr(transport)
        self.scheme = "https" if is_ssl(transport) else "http"

    @property
    def busy(self) -> bool:
        """The app is making an answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def begin(
        self,
        parser: httptools.HttpRequestParser | None,
        url: bytes,
        headers: list[tuple[bytes, bytes]],
        state: Mapping[str, object],
        *,
        expect_continue: bool,
    ) -> None:
        """Has the app answer the request whose head `parser` has just read; `state` is for it.

        Raises HttpParserInvalidURLError, UnicodeDecodeError.
        """
        self.parser = parser  # type: ignore[assignment]  # None once the connection is lost
        self.on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expect_continue
        self.scope["headers"] = headers
        self.scope["state"].update(state)
        self.on_headers_complete()

    def say_close(self) -> None:
        """In the answer, unless that has begun."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def take_back(self) -> bool:
        """Tells the app that the request is over; whether nothing of an answer has gone out."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        return not self.cycle.response_started

    def on_response_complete(self) -> None:
        """uvicorn's hook. Its timer of idle connections is not set: the connection has its own."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self._answered()
