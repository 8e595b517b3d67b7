"""One client connection: uvicorn's HTTP/1.1 protocol, with the public routes taken out before ASGI.

A request for a forwarded route never becomes an ASGI task: its head is checked, its body collected, it is admitted
(admission.py), and an `Exchange` (exchange.py) passes the instance's answer back. Everything else goes to the FastAPI
app as uvicorn does it. Both are held to the same framing, sizes and times, and to one request at a time: a client that
sends the next request before it has its answer (pipelining) gets this answer and then a closed connection, which HTTP
lets it retry on; nothing of the later request is acted upon.

    IDLE --first byte--> READING --last byte--> BUSY --answered--> IDLE
                            `--rejected--> LINGER (answered; what still arrives is thrown away) --> closed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import BadRequest, HttpError, NotFound, RequestTimeout, Unavailable
from server.gateway.access.keys import ANONYMOUS
from server.gateway.admission import streamed
from server.gateway.exchange import Exchange
from server.gateway.gateway import Gateway
from server.gateway.observe.stats import of_refusal
from server.gateway.routes import Target, find
from server.gateway.wire.head import (
    HeadCollector,
    RequestHead,
    error_answer,
    head_too_large,
    new_request_id,
    too_large,
)
from server.gateway.wire.pool import MANY

log = logging.getLogger("hotswap.gateway")

LINGER_S = 2.0
FAREWELL_S = 1.0  # for a request that was sent before its client could know that the gateway stops


class GatewayProtocol(HttpToolsProtocol):
    """One client connection, and the side that asked for its exchange (admission.Client)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines = HeadCollector(self)
        self.parser = httptools.HttpRequestParser(self._lines)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: pipelining is answered here
        self.gateway: Gateway = self.app_state["gateway"]
        self.limits = self.gateway.config.limits
        self.deadline: float | None = None  # monotonic; None while an answer is being made
        # the connection
        self._on_admin_port = False
        self._deaf = False  # whatever still arrives is thrown away
        self._close_after = False
        self._stopping = False  # told to shut down while a client had reason to think that the connection stays
        # the request
        self.head: RequestHead | None = None
        self.method = b""
        self.http10 = False
        self._target: Target | None = None  # None: the request is the app's
        self._principal = ANONYMOUS
        self._body: bytes | bytearray = b""  # the first piece as it came, as most bodies have only one
        self._body_size = 0
        self._head_size = 0
        self._reading_head = False
        self._reading = False
        self._streamed = False
        self._keep_alive = False
        # its answer
        self.exchange: Exchange | None = None
        self.extra_head = b""  # header lines for every answer to this request
        self._answered_early = False  # by the app, which did not wait for the body

    @property
    def busy(self) -> bool:
        """An answer is being made."""
        return self.exchange is not None or (self.cycle is not None and not self.cycle.response_complete)

    # what the transport says

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.send: Callable[[bytes], None] = transport.write  # no call of ours between a chunk and its socket
        self._on_admin_port = self.server is not None and self.server[1] == self.gateway.config.admin_port
        clients = self.gateway.clients
        clients.add(self)
        if len(clients) > self.limits.max_connections:
            message = f"{self.limits.max_connections} connections are open; try again."
            self.reject(Unavailable(message, code="overloaded"))
            return
        self.deadline = time.monotonic() + self.limits.request_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()
        self.gateway.clients.discard(self)
        self._deaf = True
        del self._lines  # it holds on to this
        self.body_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.exchange is not None:
            if data.strip(b"\r\n"):
                self.stop_listening()
            return
        if self._deaf:
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.reject(BadRequest("Protocol upgrades are not served here.", code="upgrade_refused"))
        except httptools.HttpParserCallbackError:
            log.exception("a fault of the gateway in reading a request")
            self.reject(HttpError("The gateway failed to read this request; the fault is in its log."))
        except httptools.HttpParserError as exc:
            self.reject(BadRequest(f"Not a well-formed HTTP request: {exc}.", code="malformed_request"))
        if self._reading_head:
            self._head_size += len(data)
            if self._head_size > self.limits.max_head:
                self.reject(head_too_large(self.limits))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.resume()

    # what the gateway says

    def sweep(self, now: float) -> None:
        """Ends what is over its time; called a few times a second."""
        if self.exchange is not None:
            self.exchange.sweep(now, self.limits.stalled_client_s)
            return
        if self.deadline is None or now <= self.deadline:
            return
        if self._deaf:
            self.transport.abort()
        elif self._reading and not self._answered_early:
            self.reject(RequestTimeout(f"The request took over {self.limits.request_timeout_s:g} s to arrive."))
        else:
            self.close()

    def shutdown(self) -> None:
        """What is in hand is answered, and what the client sends at once because that answer did not say `close`."""
        if self.exchange is not None or self._reading:
            self._stopping = True
        else:
            self.gateway.outbox.flush()
            super().shutdown()

    @property
    def _leaves(self) -> bool:
        """A gateway that is about to stop says so in its answers: clients then go to another one before it closes."""
        return self.gateway.leaving or self._stopping

    # reading a request: the parser's callbacks

    def on_message_begin(self) -> None:
        if self.busy:
            self.stop_listening()
        if self._deaf:
            return
        self.head = None
        self.extra_head = b""
        self.method = b""
        self._reading = self._reading_head = True
        self._answered_early = False
        self._head_size = 0
        self.deadline = time.monotonic() + self.limits.request_timeout_s
        # As uvicorn begins a request, without its ASGI scope: see `_begin_scope`. This, and no call of uvicorn for each
        # header, took 2 us from a request.
        self._lines.begin()

    def on_headers_complete(self) -> None:
        lines = self._lines
        lines.end()  # what comes later are trailers, which are dropped
        if self._deaf:
            return
        self._reading_head = False
        self.url, self.headers = lines.url, lines.headers
        try:
            self.head = self._checked_head()
            self.extra_head = self.head.cors
            self._head_read(self.head)
        except HttpError as error:
            self.reject(error)

    def _checked_head(self) -> RequestHead:
        self.method = self.parser.get_method()
        version = self.parser.get_http_version()
        self.http10 = version == "1.0"
        if version != "1.1" and not self.http10:
            raise BadRequest("HTTP/1.1 is spoken here.", code="http_version")
        if self.parser.should_upgrade():
            raise BadRequest("Protocol upgrades are not served here.", code="upgrade_refused")
        self._streamed = streamed(self.url, self.method)
        return self.gateway.admission.read_head(self.headers, version, self.url, streamed=self._streamed)

    def _head_read(self, head: RequestHead) -> None:
        """The head is in order: whose request is it, and may it come in."""
        admission = self.gateway.admission
        self._target = None
        targets = admission.targets(self.url, head, admin_port=self._on_admin_port)
        if not targets:
            self._hand_to_app(head)
            return
        self._principal = ANONYMOUS
        self._principal = admission.principal(head, targets)
        admission.check_head(head, self.headers, self._principal, self.server[0] if self.server is not None else "")
        self._target = admission.of_method(targets, self.method)
        if head.expect_continue and (head.chunked or head.content_length):
            self.gateway.outbox.flush()  # the end of the answer before this one may still be there
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._deaf or self._answered_early:
            return
        if self._streamed and self.busy:  # held back by flow control, not by a size; it must not stand still, though
            self.deadline = time.monotonic() + self.limits.request_timeout_s
            super().on_body(body)
            return
        self._body_size += len(body)
        self.gateway.buffered += len(body)
        if self._body_size > self.limits.max_body:
            self.reject(too_large(self.limits))
        elif self.gateway.buffered > self.limits.max_buffered:
            self.reject(Unavailable("Too many large requests at once; try again.", code="overloaded"))
        elif self._target is None:
            super().on_body(body)
        elif not self._body:
            self._body = body
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        if self._deaf:
            self._say_close()
            return
        self._reading = False
        self._keep_alive = self.parser.should_keep_alive()
        if self._target is None:
            self._say_close()
            if self.busy:
                self.deadline = None
            else:
                self.rest()  # answered without its body
            super().on_message_complete()
            return
        self._keep_alive = self._keep_alive and not self._leaves
        self.deadline = None
        try:
            self._forward(self._target)
        except HttpError as error:
            self.refuse(error)

    def _forward(self, target: Target) -> None:
        """The request is complete: an exchange of its own answers it."""
        assert self.head is not None
        gateway, body = self.gateway, bytes(self._body)
        self._body = b""
        request = gateway.admission.request(
            target, self.head, self._principal, body, http10=self.http10, keep_alive=self._keep_alive
        )
        try:
            gateway.admission.admit(request)
        finally:
            self.extra_head = request.extra_head
        self.exchange = Exchange(self, request)
        if self.flow.write_paused:  # the client has not taken the previous answer yet
            self.exchange.pause()
        self.exchange.start()

    # what the exchange says (admission.Client)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the answer. The `last` wait for the end of the loop's turn; others (`send`) seldom have company."""
        if last and len(data) < MANY:
            self.gateway.outbox.put(self.transport, (data,))
        else:
            self.transport.write(data)

    def body_done(self) -> None:
        """Nobody needs the request's body any more."""
        self.gateway.buffered -= self._body_size
        self._body_size = 0
        self._body = b""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        self.exchange = None
        self.body_done()
        self.server_state.total_requests += 1
        if not keep_alive or self._close_after:
            self.close()
        else:
            self.rest()

    def refuse(self, error: HttpError) -> None:
        """The gateway's own answer to a request that was read whole."""
        keep_alive = self._keep_alive and not self._close_after
        self.write_error(error, keep_alive=keep_alive)
        self.answered(keep_alive=keep_alive)

    def cut(self) -> None:
        """Ends an answer that cannot be completed; what is written goes out first."""
        self.exchange = None
        self.body_done()
        self.close()

    # requests for the app, which uvicorn runs

    def _hand_to_app(self, head: RequestHead) -> None:
        if not self.url.startswith(b"/"):
            raise NotFound("Only paths are served, not absolute URLs.")
        self._begin_scope(head)
        self.scope["state"] |= {
            "request_id": head.request_id, "key": head.key, "origin": head.origin, "preflight": head.preflight,
            "admin_port": self._on_admin_port,
        }  # fmt: skip
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as exc:
            raise BadRequest("The request target is not a valid path.", code="malformed_request") from exc
        self._say_close()

    def _begin_scope(self, head: RequestHead) -> None:
        """Makes the ASGI scope of the request that is being read; those that are forwarded do without."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.scope["headers"] = headers
        self.expect_100_continue = head.expect_continue

    def _say_close(self) -> None:
        """In an answer of the app, unless that has begun."""
        if self._leaves and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """An answer of the app is complete (uvicorn's hook)."""
        super().on_response_complete()
        self._answered_early = self._reading
        self.body_done()
        if self._reading and self._streamed:
            self._linger()  # the rest may be gigabytes
        else:
            self.rest()

    def _take_back(self) -> bool:
        """Tells an app that is reading this request that it is over; False if an answer has already begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        cycle.disconnected = True
        cycle.message_event.set()
        return self._reading and not cycle.response_started

    # the end of an answer, or of the connection

    def rest(self) -> None:
        """Waits for the next request."""
        self.deadline = time.monotonic() + (FAREWELL_S if self._stopping else self.limits.keep_alive_s)

    def close(self) -> None:
        """Closes once what is written has gone out, or when the client takes too long to take it."""
        self._deaf = True
        self.deadline = time.monotonic() + self.limits.stalled_client_s
        self.gateway.outbox.flush()
        self.transport.close()

    def stop_listening(self) -> None:
        """Another request came before this one was answered: answer this one, then close."""
        self._deaf = self._close_after = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def reject(self, error: HttpError) -> None:
        """The gateway's own answer to a request it does not read to its end; the connection is then closed."""
        if self._deaf or self.transport.is_closing():
            return
        if self._answered_early or not self._take_back():
            self.close()
            return
        self._deaf = True
        self.body_done()
        self.write_error(error, keep_alive=False)
        self._linger()

    def _linger(self) -> None:
        """Nothing more is said; what still arrives is read and thrown away for a moment.

        Closing over unread bytes would reset the connection, and the client might never see why.
        """
        self._deaf = True
        self.deadline = time.monotonic() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def write_error(self, error: HttpError, *, keep_alive: bool) -> None:
        """A whole answer of the gateway's own. What an exchange ends with is told of by itself."""
        stats = self.gateway.stats
        request_id = self.head.request_id if self.head is not None else new_request_id()
        if self.exchange is None and stats.watchers:
            targets = find(self.url) if self.head is not None else ()
            route = targets[0].route.name if targets else "-"
            told_id = request_id if self.head is not None else b"-"
            stats.tell(of_refusal(told_id, self.method, route, self._principal.name, error))
        stats.refused[error.code] += 1
        self.gateway.outbox.flush()  # the end of the answer before this one may still be there
        head_only, extra = self.method == b"HEAD", self.extra_head
        self.transport.write(
            error_answer(error, request_id, keep_alive=keep_alive, head_only=head_only, extra_head=extra)
        )
