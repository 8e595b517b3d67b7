"""The client's side: uvicorn's HTTP/1.1 protocol, with the public routes taken out before ASGI.

A request for a forwarded route never becomes an ASGI task: its body is collected, and an `Exchange` splices the
instance's answer back. Everything else goes to the FastAPI app as uvicorn does it. What holds for both is in guard.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httptools

from server.errors import BadRequest, HttpError, MethodNotAllowed, NotFound
from server.gateway.access.keys import ANONYMOUS
from server.gateway.access.records import ADMIN, INFER
from server.gateway.observe.finished import of_refusal
from server.gateway.proxy import terms
from server.gateway.proxy.exchange import Exchange
from server.gateway.proxy.guard import GuardedProtocol
from server.gateway.proxy.request import Request
from server.gateway.proxy.routes import Target, find
from server.gateway.wire.bodies import NONE, Fields, check_object
from server.gateway.wire.head import RequestHead, check_origin
from server.gateway.wire.pool import MANY

FAREWELL_S = 1.0  # for a request that was sent before its client could know that the gateway stops


class GatewayProtocol(GuardedProtocol):
    """One client connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange: Exchange | None = None
        self._target: Target | None = None  # None: the request is the app's
        self._principal = ANONYMOUS
        self._body: bytes | bytearray = b""  # the first piece as it came, as most bodies have only one
        self._on_admin_port = False
        self._stopping = False  # told to shut down while a client had reason to think that the connection stays

    # transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.send: Callable[[bytes], None] = transport.write  # no call of ours between a chunk and its socket
        self._on_admin_port = self.server is not None and self.server[1] == self.gateway.config.admin_port

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            super().data_received(data)
        elif data.strip(b"\r\n"):
            self.stop_listening()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.resume()

    def shutdown(self) -> None:
        """What is in hand is answered, and what the client sends at once because that answer did not say `close`."""
        if self.exchange is not None or self._reading:
            self._stopping = True
        else:
            self.gateway.outbox.flush()
            super().shutdown()

    def sweep(self, now: float) -> None:
        if self.exchange is not None:
            upstream = self.gateway.config.upstream
            self.exchange.sweep(now, upstream.read_idle_timeout_s, self.limits.stalled_client_s)
        else:
            super().sweep(now)

    # reading a request

    @property
    def busy(self) -> bool:
        return self.exchange is not None or super().busy

    def head_read(self, head: RequestHead) -> None:
        targets = find(self.url)
        if not targets or (targets[0].route.admin and not self._on_admin_port):
            self._target = None
            self._hand_to_app(head)
            return
        self._principal = ANONYMOUS
        self._principal = self.gateway.keys.authorize(head.key, ADMIN if targets[0].route.admin else INFER)
        if head.origin is not None and self.gateway.keys.open_inference:
            host = next((value for name, value in self.headers if name == b"host"), b"")
            listening_on = self.server[0] if self.server is not None else ""
            check_origin(head.origin, host, listening_on, self.gateway.config.allowed_origins)
        head.scope = self.gateway.scopes.line(self._principal)
        head.forward += head.scope
        for target in targets:
            if target.route.method == self.method:
                break
        else:
            allow = ", ".join(t.route.method.decode() for t in targets)
            raise MethodNotAllowed(f"Use {allow} for {targets[0].route.name}.", allow=allow)
        self._target = target
        if head.expect_continue and (head.chunked or head.content_length):
            self.gateway.outbox.flush()  # the end of the answer before this one may still be there
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def _leaves(self) -> bool:
        """A gateway that is about to stop says so in its answers: clients then go to another one before it closes."""
        return self.gateway.leaving or self._stopping

    def _say_close(self) -> None:
        """In an answer of the app, unless that has begun."""
        if self._leaves and self.cycle is not None:
            self.cycle.keep_alive = False

    def body_read(self, body: bytes) -> None:
        if self._target is not None:
            if not self._body:
                self._body = body
            else:
                if isinstance(self._body, bytes):
                    self._body = bytearray(self._body)
                self._body += body
        else:
            super().body_read(body)

    def on_message_complete(self) -> None:
        if self._target is None or self._deaf:
            self._say_close()
            super().on_message_complete()
            return
        self._reading = False
        self._keep_alive = self.parser.should_keep_alive() and not self._leaves
        self.deadline = None
        try:
            self._forward(self._target)
        except HttpError as error:
            self.refuse(error)

    def _hand_to_app(self, head: RequestHead) -> None:
        if not self.url.startswith(b"/"):
            raise NotFound("Only paths are served, not absolute URLs.")
        self.begin_scope(head)
        self.scope["state"] |= {"request_id": head.request_id, "key": head.key, "admin_port": self._on_admin_port}
        try:
            super().head_read(head)
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as exc:
            raise BadRequest("The request target is not a valid path.", code="malformed_request") from exc
        self._say_close()

    def _forward(self, target: Target) -> None:
        assert self.head is not None
        body = bytes(self._body)
        self._body = b""
        fields = NONE
        if target.route.json_body:
            fields = check_object(body)
        elif target.route.method == b"GET":
            body = b""
        request = Request(target, self.head, body, None, self.http10, self._keep_alive, self._principal)
        request.priority, request.fields = self._principal.priority, fields
        mode = self.gateway.config.upstream.failover.mode
        request.failover = mode if target.route.continued else "off"
        in_body = fields.has_wish
        if in_body or self.head.asked:
            asked, request.body = terms.read(self.head.asked or {}, body, in_body=in_body)
            if in_body:
                request.fields = check_object(request.body)  # those of the first one would keep that too
            self.head.forward += asked.lines
            request.need, request.deadline_s = asked.need, asked.deadline_s
            request.priority = terms.priority_within(asked, self._principal)
            if target.route.continued:
                request.failover = asked.failover_or(mode)
        if request.priority:
            self.head.forward += b"x-hotswap-priority: %d\r\n" % request.priority
        if self._principal.limits is not None:
            self._admit(request, fields)
        self.exchange = Exchange(self, request, self.gateway.fleet, self.gateway.gate, self.gateway.stats)
        if self.flow.write_paused:  # the client has not taken the previous answer yet
            self.exchange.pause()
        self.exchange.start()

    def _admit(self, request: Request, fields: Fields) -> None:
        """Within the limits of the key; what is left of them is said in the answer, whoever writes it."""
        limits, route = self.gateway.limits, request.target.route
        if not route.json_body:
            self.extra_head = request.extra_head = limits.head(self._principal)
            return
        try:
            grant = request.grant = limits.admit(self._principal, fields, route.name, request.body)
        except HttpError:
            self.extra_head = limits.head(self._principal)
            raise
        if grant is not None:
            request.body = grant.body
            self.extra_head = request.extra_head = grant.head

    # what an exchange tells its client (exchange.Client)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the answer. The `last` wait for the end of the loop's turn; others (`send`) seldom have company."""
        if last and len(data) < MANY:
            self.gateway.outbox.put(self.transport, (data,))
        else:
            self.transport.write(data)

    def body_done(self) -> None:
        super().body_done()
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

    def rest(self) -> None:
        if self._stopping:
            self.deadline = time.monotonic() + FAREWELL_S
        else:
            super().rest()

    def refuse(self, error: HttpError) -> None:
        """The gateway's own answer to a request that was read whole."""
        keep_alive = self._keep_alive and not self._close_after
        self.write_error(error, keep_alive=keep_alive)
        self.answered(keep_alive=keep_alive)

    def write_error(self, error: HttpError, *, keep_alive: bool) -> None:
        """A whole answer of the gateway's own. What an exchange ends with is told of by itself."""
        if self.exchange is None and self.gateway.stats.watchers:
            request_id = self.head.request_id if self.head is not None else b"-"
            targets = find(self.url) if self.head is not None else ()
            route = targets[0].route.name if targets else "-"
            told = of_refusal(request_id, self.method, route, self._principal.name, error)
            self.gateway.stats.tell(told)
        super().write_error(error, keep_alive=keep_alive)

    def cut(self) -> None:
        """Ends an answer that cannot be completed; what is written goes out first."""
        self.exchange = None
        self.body_done()
        self.close()
