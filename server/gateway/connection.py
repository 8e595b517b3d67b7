"""One client connection: reads HTTP/1.1 requests, and forwards those for the public routes without ASGI.

A request for a forwarded route never becomes an ASGI task: its head is checked, its body collected, it is admitted
(admission.py), and an `Exchange` (exchange.py) passes the instance's answer back. Everything else goes to the FastAPI
app, by uvicorn's own protocol (app_side.py), which a connection gets with its first such request. Both are held to the
same framing, sizes and times, and to one request at a time: a client that
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
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.utils import get_local_addr
from uvicorn.server import ServerState

from server.errors import HttpError
from server.gateway.access.keys import ANONYMOUS
from server.gateway.admission import streamed
from server.gateway.app_side import AppSide
from server.gateway.exchange import Exchange
from server.gateway.gateway import Gateway
from server.gateway.observe.stats import of_refusal
from server.gateway.routes import Target, find, without_slash
from server.gateway.wire.head import RequestHead, error_answer, head_too_large, new_request_id, too_large
from server.gateway.wire.pool import MANY

log: Final = logging.getLogger("hotswap.gateway")

_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})  # headers that mean nothing without a change of protocol
LINGER_S: Final = 2.0
FAREWELL_S: Final = 1.0  # for a request that was sent before its client could know that the gateway stops


class GatewayProtocol:
    """One client connection, and the side that asked for its exchange (admission.Client).

    It is an asyncio.Protocol, and what httptools and uvicorn's server call, by its methods alone.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As uvicorn makes it."""
        self._uvicorn = config, server_state, app_state
        self._server_state = server_state
        gateway: Gateway = app_state["gateway"]
        self.gateway = gateway
        self._admission, self._outbox = gateway.admission, gateway.outbox
        self.limits = gateway.config.limits
        self._parser: httptools.HttpRequestParser | None = self._new_parser()
        self._offered = False  # the head that was just read offers another protocol
        self._offered_at = 0  # where that head ends in what was read
        self.deadline: float | None = None  # monotonic; None while an answer is being made
        # the connection
        self.server: tuple[str, int | None] | None = None  # the address that the client has connected to
        self._on_admin_port = False
        self._app: AppSide | None = None  # from the first request that the app answers
        self._write_paused = False
        self._deaf = False  # whatever still arrives is thrown away
        self._close_after = False
        self._stopping = False  # told to shut down while a client had reason to think that the connection stays
        # the request
        self.head: RequestHead | None = None
        self.method = b""
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.http10 = False
        self._target: Target | None = None  # None: the request is the app's
        self._principal = ANONYMOUS
        self._body: bytes | bytearray = b""  # the first piece as it came, as most bodies have only one
        self._body_size = 0
        self._framing = 0  # bytes of all but bodies since the last head, piece of a body, or request
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
        return self.exchange is not None or (self._app is not None and self._app.busy)

    # what the transport says

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        self.transport = transport
        self.send: Callable[[bytes], None] = transport.write  # no call of ours between a chunk and its socket
        self.server = get_local_addr(transport)
        self._on_admin_port = self.server is not None and self.server[1] == self.gateway.config.admin_port
        clients = self.gateway.clients
        clients.add(self)
        if len(clients) + len(self.gateway.handshakes) > self.limits.max_connections:
            message = f"{self.limits.max_connections} connections are open; try again."
            self.reject(HttpError(503, message, code="overloaded"))
            return
        self.deadline = time.monotonic() + self.limits.request_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()
        self.gateway.clients.discard(self)
        self._server_state.connections.discard(self)  # type: ignore[arg-type]
        self._deaf = True
        self.body_done()
        self._parser = None  # it holds on to this
        app, self._app = self._app, None
        if app is not None:
            app.connection_lost(exc)

    def eof_received(self) -> None:
        """The client says no more: the connection closes."""

    def data_received(self, data: bytes) -> None:
        if self.exchange is not None:
            if data.strip(b"\r\n"):
                self.stop_listening()
            return
        if self._deaf or self._parser is None:
            return
        self._framing += len(data)  # before httptools puts them together, at a cost that grows with their square
        try:
            while not self._fed(data):
                data = self._without_offer(data)
        except httptools.HttpParserCallbackError:
            log.exception("a fault of the gateway in reading a request")
            self.reject(HttpError(500, "The gateway failed to read this request; the fault is in its log."))
        except httptools.HttpParserError as exc:
            self.reject(HttpError(400, f"Not a well-formed HTTP request: {exc}.", code="malformed_request"))
        if self._framing > self.limits.max_head:
            self.reject(head_too_large(self.limits))

    def _fed(self, data: bytes) -> bool:
        """Whether the parser has taken all of `data`. If not, it stopped behind an offer of another protocol."""
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._offered_at = offer.args[0]
            return self._deaf
        return True

    def _without_offer(self, data: bytes) -> bytes:
        """`data` from the head that has just been read, without its offer of another protocol, which a server may
        ignore (RFC 9110, 7.8). llhttp takes the body behind such a head for that protocol's, so a new parser reads it.
        """
        self._parser, self._offered = self._new_parser(), False
        lines = [b"%b %b HTTP/%b\r\n" % (self.method, self.url, b"1.0" if self.http10 else b"1.1")]
        lines += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in _OFFERS]
        return b"%b\r\n%b" % (b"".join(lines), data[self._offered_at :])

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # pipelining is answered here
        return parser

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._app is not None:
            self._app.pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._app is not None:
            self._app.resume_writing()
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
            self.reject(HttpError(408, f"The request took over {self.limits.request_timeout_s:g} s to arrive."))
        else:
            self.close()

    def shutdown(self) -> None:
        """Ends after the request in hand, and one that the client sends at once as its answer did not say `close`."""
        if self.exchange is not None or self._reading:
            self._stopping = True
        elif self._app is not None and self._app.busy:
            self._app.say_close()
        else:
            self._outbox.flush()
            self.transport.close()

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
        self.method = self.url = b""
        self.headers = []
        self._reading = self._reading_head = True
        self._answered_early = False
        self.deadline = time.monotonic() + self.limits.request_timeout_s

    def on_url(self, url: bytes) -> None:
        if self._reading_head:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading_head:  # later ones are trailers, which are dropped
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._framing = 0
        if self._deaf:
            return
        assert self._parser is not None
        self.method = self._parser.get_method()
        version = self._parser.get_http_version()
        self.http10 = version == "1.0"
        self._offered = self._parser.should_upgrade() and self.method != b"CONNECT" and version in ("1.0", "1.1")
        if self._offered:
            return  # it is read again (_without_offer)
        try:
            self.head = self._checked_head()
            self.extra_head = self.head.cors
            self._head_read(self.head)
        except HttpError as error:
            self.reject(error)

    def _checked_head(self) -> RequestHead:
        version = "1.0" if self.http10 else "1.1"
        if self._parser is not None and self._parser.get_http_version() != version:
            raise HttpError(400, "HTTP/1.1 is spoken here.", code="http_version")
        if self.method == b"CONNECT":
            raise HttpError(400, "This server is no proxy: it opens no tunnels.", code="connect_refused")
        self.url = without_slash(self.url)
        self._streamed = streamed(self.url, self.method)
        return self._admission.read_head(self.headers, version, self.url, streamed=self._streamed)

    def _head_read(self, head: RequestHead) -> None:
        """The head is in order: whose request is it, and may it come in."""
        admission = self._admission
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
            self._outbox.flush()  # the end of the answer before this one may still be there
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if self._deaf or self._answered_early:
            return
        app = self._app
        if app is not None and app.busy and self._streamed:
            # Held back by flow control, not by a size; it must not stand still, though.
            self.deadline = time.monotonic() + self.limits.request_timeout_s
            app.on_body(body)
            return
        self._body_size += len(body)
        self.gateway.buffered += len(body)
        if self._body_size > self.limits.max_body:
            self.reject(too_large(self.limits))
        elif self.gateway.buffered > self.limits.max_buffered:
            self.reject(HttpError(503, "Too many large requests at once; try again.", code="overloaded"))
        elif self._target is None:
            assert app is not None
            app.on_body(body)
        elif not self._body:
            self._body = body
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        self._framing = 0
        if self._offered:
            return
        if self._deaf:
            self._say_close()
            return
        assert self._parser is not None
        self._reading = False
        self._keep_alive = self._parser.should_keep_alive()
        if self._target is None:
            assert self._app is not None
            self._say_close()
            if self.busy:
                self.deadline = None
            else:
                self.rest()  # answered without its body
            self._app.on_message_complete()
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
        body = bytes(self._body)
        self._body = b""
        request = self._admission.request(
            target, self.head, self._principal, body, http10=self.http10, keep_alive=self._keep_alive
        )
        try:
            self._admission.admit(request)
        finally:
            self.extra_head = request.extra_head
        self.exchange = Exchange(self, request)
        if self._write_paused:  # the client has not taken the previous answer yet
            self.exchange.pause()
        self.exchange.start()

    # what the exchange says (admission.Client)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the answer. The `last` wait for the end of the loop's turn; others (`send`) seldom have company."""
        if last and len(data) < MANY:
            self._outbox.put(self.transport, (data,))
        else:
            self.transport.write(data)

    def body_done(self) -> None:
        """Releases the request's body, which is not needed any more."""
        self.gateway.buffered -= self._body_size
        self._body_size = 0
        self._body = b""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        self.exchange = None
        self.body_done()
        self._server_state.total_requests += 1
        if not keep_alive or self._close_after:
            self.close()
        else:
            self.rest()

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does `work` when the end of the answer is on its way."""
        self._outbox.afterwards(work)

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
            raise HttpError(404, "Only paths are served, not absolute URLs.")
        if self._app is None:
            config, server_state, app_state = self._uvicorn
            self._app = AppSide(config, server_state, app_state, self.transport, self.app_answered)
            if self._write_paused:
                self._app.pause_writing()
        state = {
            "request_id": head.request_id, "key": head.key, "origin": head.origin, "preflight": head.preflight,
            "admin_port": self._on_admin_port,
        }  # fmt: skip
        try:
            self._app.begin(self._parser, self.url, self.headers, state, expect_continue=head.expect_continue)
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as exc:
            raise HttpError(400, "The request target is not a valid path.", code="malformed_request") from exc
        self._say_close()

    def _say_close(self) -> None:
        """In an answer of the app, unless that has begun."""
        if self._leaves and self._app is not None:
            self._app.say_close()

    def app_answered(self) -> None:
        """An answer of the app is complete."""
        self._answered_early = self._reading
        self.body_done()
        if self._reading and self._streamed:
            self._linger()  # the rest may be gigabytes
        else:
            self.rest()

    # the end of an answer, or of the connection

    def rest(self) -> None:
        """Waits for the next request, or for the body of one that was answered without it."""
        patience = LINGER_S if self._answered_early and self._reading else self.limits.keep_alive_s
        self.deadline = time.monotonic() + (FAREWELL_S if self._stopping else patience)

    def close(self) -> None:
        """Closes once what is written has gone out, or when the client takes too long to take it."""
        self._deaf = True
        self.deadline = time.monotonic() + self.limits.stalled_client_s
        self._outbox.flush()
        self.transport.close()

    def stop_listening(self) -> None:
        """Another request came before this one was answered: answer this one, then close."""
        self._deaf = self._close_after = True
        if self._app is not None:
            self._app.say_close()

    def reject(self, error: HttpError) -> None:
        """The gateway's own answer to a request it does not read to its end; the connection is then closed."""
        if self._deaf or self.transport.is_closing():
            return
        begun = self._app is not None and self._app.busy and not (self._app.take_back() and self._reading)
        if begun:
            self.close()
            return
        self._deaf = True
        self.body_done()
        if not self._answered_early:
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
        """Writes a whole answer of the gateway's own. The exchange, if there is one, tells of its own end."""
        stats = self.gateway.stats
        request_id = self.head.request_id if self.head is not None else new_request_id()
        url = without_slash(self.url)
        targets = find(url)
        path = targets[0].route.name if targets else ""
        if self.exchange is None and stats.watchers:
            route = path if path and self.head is not None else "-"
            told_id = request_id if self.head is not None else b"-"
            stats.tell(of_refusal(told_id, self.method, route, self._principal.name, error))
        stats.refused[error.code] += 1
        self._outbox.flush()  # the end of the answer before this one may still be there
        head_only, extra = self.method == b"HEAD", self.extra_head
        shape = path or url.partition(b"?")[0].decode("latin-1")  # the app's routes have shapes, too
        self.transport.write(
            error_answer(error, request_id, keep_alive=keep_alive, head_only=head_only, extra_head=extra, path=shape)
        )
