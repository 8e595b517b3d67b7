"""What every client connection is held to, whichever route it asks for: framing, sizes, times, one request at a time.

A client that sends the next request before it has its answer (pipelining) gets this answer and then a closed
connection, which HTTP lets it retry on; nothing of the later request is acted upon.

    IDLE --first byte--> READING --last byte--> BUSY --answered--> IDLE
                            `--rejected--> LINGER (answered; what still arrives is thrown away) --> closed
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import BadRequest, HttpError, RequestTimeout, Unavailable
from server.gateway.proxy import terms
from server.gateway.wire.head import (
    HeadCollector,
    RequestHead,
    error_answer,
    head_too_large,
    new_request_id,
    read_head,
    too_large,
)

if TYPE_CHECKING:
    from server.gateway.gateway import Gateway

log = logging.getLogger("hotswap.gateway")

LINGER_S = 2.0
STREAMED = b"/admin/weights/upload"  # a body as large as a model, which the app takes as it comes (admin/weights.py)


class GuardedProtocol(HttpToolsProtocol):
    """One client connection. A subclass says what a request is for in `head_read`, and takes its body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines = HeadCollector(self)
        self.parser = httptools.HttpRequestParser(self._lines)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: pipelining is answered here
        self.gateway: Gateway = self.app_state["gateway"]
        self.limits = self.gateway.config.limits
        self.deadline: float | None = None  # monotonic; None while an answer is being made
        self.head: RequestHead | None = None
        self.method = b""
        self.http10 = False
        self._body_size = 0
        self._head_size = 0
        self._reading_head = False
        self._reading = False
        self._answered_early = False  # by the app, which did not wait for the body
        self._deaf = False  # whatever still arrives is thrown away
        self._close_after = False
        self._keep_alive = False
        self._streamed = False
        self.extra_head = b""  # header lines for every answer to this request

    # for the subclass

    @property
    def busy(self) -> bool:
        """An answer is being made."""
        return self.cycle is not None and not self.cycle.response_complete

    def head_read(self, head: RequestHead) -> None:
        """A request's head has been read and found in order. May raise HttpError."""
        super().on_headers_complete()

    def body_read(self, body: bytes) -> None:
        """A piece of its body."""
        super().on_body(body)

    def body_done(self) -> None:
        """Nobody needs the request's body any more."""
        self.gateway.buffered -= self._body_size
        self._body_size = 0

    # transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        clients = self.gateway.clients
        clients.add(self)
        if len(clients) > self.limits.max_connections:
            message = f"{self.limits.max_connections} connections are open; try again."
            self.reject(Unavailable(message, code="overloaded"))
            return
        self.deadline = time.monotonic() + self.limits.request_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        self.gateway.clients.discard(self)
        self._deaf = True
        del self._lines  # it holds on to this
        self.body_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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

    def sweep(self, now: float) -> None:
        """Ends what is over its time; called a few times a second."""
        if self.deadline is None or now <= self.deadline:
            return
        if self._deaf:
            self.transport.abort()
        elif self._reading and not self._answered_early:
            self.reject(RequestTimeout(f"The request took over {self.limits.request_timeout_s:g} s to arrive."))
        else:
            self.close()

    # parser callbacks

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
        # As uvicorn begins a request, without its ASGI scope: see `begin_scope`. This, and no call of uvicorn for each
        # header, took 2 us from a request.
        self._lines.begin()

    def begin_scope(self, head: RequestHead) -> None:
        """Makes the ASGI scope of the request that is being read; those that are forwarded do without."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.scope["headers"] = headers
        self.expect_100_continue = head.expect_continue

    def on_headers_complete(self) -> None:
        lines = self._lines
        lines.end()  # what comes later are trailers, which are dropped
        if self._deaf:
            return
        self._reading_head = False
        self.url, self.headers = lines.url, lines.headers
        try:
            self.head = self._checked_head()
            self.head_read(self.head)
        except HttpError as error:
            self.reject(error)

    def on_body(self, body: bytes) -> None:
        if self._deaf or self._answered_early:
            return
        if self._streamed and self.busy:  # held back by flow control, not by a size; it must not stand still, though
            self.deadline = time.monotonic() + self.limits.request_timeout_s
            self.body_read(body)
            return
        self._body_size += len(body)
        self.gateway.buffered += len(body)
        if self._body_size > self.limits.max_body:
            self.reject(too_large(self.limits))
        elif self.gateway.buffered > self.limits.max_buffered:
            self.reject(Unavailable("Too many large requests at once; try again.", code="overloaded"))
        else:
            self.body_read(body)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._reading = False
        self._keep_alive = self.parser.should_keep_alive()
        if self.busy:
            self.deadline = None
        else:
            self.rest()  # answered without its body
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer of the app is complete (uvicorn's hook)."""
        super().on_response_complete()
        self._answered_early = self._reading
        self.body_done()
        if self._reading and self._streamed:
            self._linger()  # the rest may be gigabytes
        else:
            self.rest()

    def _checked_head(self) -> RequestHead:
        self.method = self.parser.get_method()
        version = self.parser.get_http_version()
        self.http10 = version == "1.0"
        if version != "1.1" and not self.http10:
            raise BadRequest("HTTP/1.1 is spoken here.", code="http_version")
        if self.parser.should_upgrade():
            raise BadRequest("Protocol upgrades are not served here.", code="upgrade_refused")
        if len(self.url) > self.limits.max_head:
            raise head_too_large(self.limits)
        self._streamed = self.url.startswith(STREAMED) and self.url.partition(b"?")[0] == STREAMED
        self._streamed = self._streamed and self.method == b"POST"
        limits = replace(self.limits, max_body=sys.maxsize) if self._streamed else self.limits
        return read_head(self.headers, version, limits, terms.HEADERS)

    # the end of an answer, or of the connection

    def rest(self) -> None:
        """Waits for the next request."""
        self.deadline = time.monotonic() + self.limits.keep_alive_s

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
        """A whole answer of the gateway's own."""
        self.gateway.stats.refused[error.code] += 1
        request_id = self.head.request_id if self.head is not None else new_request_id()
        head_only, extra = self.method == b"HEAD", self.extra_head
        self.gateway.outbox.flush()  # the end of the answer before this one may still be there
        self.transport.write(
            error_answer(error, request_id, keep_alive=keep_alive, head_only=head_only, extra_head=extra)
        )

    def _take_back(self) -> bool:
        """Tells an app that is reading this request that it is over; False if an answer has already begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        cycle.disconnected = True
        cycle.message_event.set()
        return self._reading and not cycle.response_started
