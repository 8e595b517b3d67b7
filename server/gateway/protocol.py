"""The client's side: uvicorn's HTTP/1.1 protocol, with the public routes taken out before ASGI.

A request for a forwarded route never becomes a scope or a task: its head is checked, its body collected, and an
`Exchange` splices the instance's answer back. Everything else goes to the FastAPI app as uvicorn does it.

One request is answered at a time. A client that sends the next one before it has its answer (pipelining) gets this
answer and then a closed connection, which HTTP lets it retry on; nothing of the later request is acted upon.

    IDLE --first byte--> READING --last byte--> BUSY --answered--> IDLE
                            `--refused--> LINGER (answered; what still arrives is thrown away) --> closed
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import (
    BadRequest,
    HttpError,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    Unavailable,
)
from server.gateway.answers import error_answer, head_too_large, too_large
from server.gateway.auth import INFER
from server.gateway.exchange import Exchange, Request
from server.gateway.head import RequestHead, new_request_id, read_head
from server.gateway.json_check import check_object
from server.gateway.routes import Target, find

if TYPE_CHECKING:
    from server.gateway.gateway import Gateway

log = logging.getLogger("hotswap.gateway")

LINGER_S = 2.0


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gateway: Gateway = self.app_state["gateway"]
        self.limits = self.gateway.config.limits
        self.exchange: Exchange | None = None
        self.deadline: float | None = None  # monotonic; None while an answer is being made
        self._target: Target | None = None
        self._head: RequestHead | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        self._head_size = 0
        self._reading_head = False
        self._reading = False
        self._deaf = False  # whatever still arrives is thrown away
        self._close_after = False
        self._keep_alive = False
        self._method = b""

    # transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        clients = self.gateway.clients
        clients.add(self)
        if len(clients) > self.limits.max_connections:
            message = f"{self.limits.max_connections} connections are open; try again."
            self._refuse_head(Unavailable(message, code="overloaded"))
            return
        self.deadline = time.monotonic() + self.limits.request_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        self.gateway.clients.discard(self)
        self._deaf = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()
        self.body_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self.exchange is not None:
            if data.strip(b"\r\n"):
                self._stop_listening()
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse_head(BadRequest("Protocol upgrades are not served here.", code="upgrade_refused"))
        except httptools.HttpParserCallbackError:
            log.exception("a fault of the gateway in reading a request")
            self._refuse_head(HttpError("The gateway failed to read this request; the fault is in its log."))
        except httptools.HttpParserError as exc:
            self._refuse_head(BadRequest(f"Not a well-formed HTTP request: {exc}.", code="malformed_request"))
        if self._reading_head:
            self._count_head(len(data))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.resume()

    def shutdown(self) -> None:
        if self.exchange is not None:
            self._close_after = True
        else:
            super().shutdown()

    def sweep(self, now: float) -> None:
        """Ends what is over its time; called about once a second."""
        if self.exchange is not None:
            upstream = self.gateway.config.upstream
            self.exchange.sweep(now, upstream.read_idle_timeout_s, self.limits.stalled_client_s)
        elif self.deadline is None or now <= self.deadline:
            return
        elif self._deaf:
            self.transport.abort()
        elif self._reading:
            self._refuse_head(RequestTimeout(f"The request took over {self.limits.request_timeout_s:g} s to arrive."))
        else:
            self._close()

    # parser callbacks

    def on_message_begin(self) -> None:
        if self._busy:
            self._stop_listening()
        if self._deaf:
            return
        self._target = self._head = None
        self._method = b""
        self._reading = self._reading_head = True
        self._head_size = 0
        self.deadline = time.monotonic() + self.limits.request_timeout_s
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading_head and not self._deaf:  # later ones are trailers, which are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._reading_head = False
        try:
            self._take_head()
        except HttpError as error:
            self._refuse_head(error)

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._body_size += len(body)
        self.gateway.buffered += len(body)
        if self._body_size > self.limits.max_body:
            self._refuse_head(too_large(self.limits))
        elif self.gateway.buffered > self.limits.max_buffered:
            self._refuse_head(Unavailable("Too many large requests at once; try again.", code="overloaded"))
        elif self._target is not None:
            self._body.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._reading = False
        self._keep_alive = self.parser.should_keep_alive()
        if self._target is None:
            if self._busy:
                self.deadline = None
            else:
                self._rest()  # the app has answered without the body
            super().on_message_complete()
            return
        self.deadline = None
        try:
            self._forward()
        except HttpError as error:
            self.refuse(error)

    def on_response_complete(self) -> None:
        """An answer of the app is complete (uvicorn's hook)."""
        super().on_response_complete()
        self.body_done()
        self._rest()

    # a request for a forwarded route

    def _take_head(self) -> None:
        self._method = method = self.parser.get_method()
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadRequest("HTTP/1.1 is spoken here.", code="http_version")
        if self.parser.should_upgrade():
            raise BadRequest("Protocol upgrades are not served here.", code="upgrade_refused")
        if len(self.url) > self.limits.max_head:
            raise head_too_large(self.limits)
        self._head = head = read_head(self.headers, version, self.limits)
        targets = find(self.url)
        if not targets:
            self._hand_to_app(head)
            return
        self.gateway.keys.authorize(head.key, INFER)
        target = next((t for t in targets if t.route.method == method), None)
        if target is None:
            allow = ", ".join(t.route.method.decode() for t in targets)
            raise MethodNotAllowed(f"Use {allow} for {targets[0].route.name}.", allow=allow)
        self._target = target
        if head.expect_continue and (head.chunked or head.content_length):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _hand_to_app(self, head: RequestHead) -> None:
        if not self.url.startswith(b"/"):
            raise NotFound("Only paths are served, not absolute URLs.")
        self.scope["state"] |= {"request_id": head.request_id, "key": head.key}
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as exc:
            raise BadRequest("The request target is not a valid path.", code="malformed_request") from exc

    def _forward(self) -> None:
        assert self._target is not None
        assert self._head is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        route = self._target.route
        if route.json_body:
            check_object(body)
        elif route.method == b"GET":
            body = b""
        request = Request(
            self._target,
            self._head,
            body,
            http10=self.parser.get_http_version() == "1.0",
            keep_alive=self._keep_alive,
        )
        self.exchange = Exchange(self, request, self.gateway.fleet, self.gateway.stats)
        if self.flow.write_paused:  # the client has not taken the previous answer yet
            self.exchange.pause()
        self.exchange.start()

    # what an exchange tells its client (exchange.Client)

    def write(self, data: bytes) -> None:
        """Bytes of the answer."""
        self.transport.write(data)

    def body_done(self) -> None:
        """Nobody needs the request's body any more."""
        self.gateway.buffered -= self._body_size
        self._body_size = 0
        self._body = []

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        self.exchange = None
        self.body_done()
        self.server_state.total_requests += 1
        if keep_alive and not self._close_after:
            self._rest()
        else:
            self._close()

    def refuse(self, error: HttpError) -> None:
        """The gateway's own answer to a request that was read whole."""
        self.gateway.stats.refused[error.code] += 1
        keep_alive = self._keep_alive and not self._close_after
        self._write_error(error, keep_alive=keep_alive)
        self.answered(keep_alive=keep_alive)

    def cut(self) -> None:
        """Ends an answer that cannot be completed; what is written goes out first."""
        self.exchange = None
        self.body_done()
        self._close()

    # the rest

    @property
    def _busy(self) -> bool:
        return self.exchange is not None or (self.cycle is not None and not self.cycle.response_complete)

    def _stop_listening(self) -> None:
        """Another request came before this one was answered: answer this one, then close."""
        self._deaf = self._close_after = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _rest(self) -> None:
        self.deadline = time.monotonic() + self.limits.keep_alive_s

    def _count_head(self, received: int) -> None:
        self._head_size += received
        if self._head_size > self.limits.max_head:
            self._refuse_head(head_too_large(self.limits))

    def _close(self) -> None:
        """Closes once what is written has gone out, or when the client takes too long to take it."""
        self._deaf = True
        self.deadline = time.monotonic() + self.limits.stalled_client_s
        self.transport.close()

    def _refuse_head(self, error: HttpError) -> None:
        """The gateway's own answer to a request it does not read to its end; the connection is then closed.

        The rest is read and thrown away for a moment: closing over unread bytes would reset the connection, and the
        client might never see why.
        """
        if self._deaf or self.transport.is_closing():
            return
        if not self._take_back():
            self._close()
            return
        self._deaf = True
        self.body_done()
        self.deadline = time.monotonic() + LINGER_S
        self.gateway.stats.refused[error.code] += 1
        self._write_error(error, keep_alive=False)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _take_back(self) -> bool:
        """Tells an app that is reading this request that it is over; False if an answer has already begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        cycle.disconnected = True
        cycle.message_event.set()
        return self._reading and not cycle.response_started

    def _write_error(self, error: HttpError, *, keep_alive: bool) -> None:
        request_id = self._head.request_id if self._head is not None else new_request_id()
        self.transport.write(error_answer(error, request_id, keep_alive=keep_alive, head_only=self._method == b"HEAD"))
