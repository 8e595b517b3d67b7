"""The gateway as a plain ASGI app (`--plain-asgi`): uvicorn's own protocol below it, the same exchange behind it.

It needs nothing of uvicorn but ASGI, which makes it the way to run under another server, and to tell whether a fault is
in connection.py. It costs a task and a few switches of it for each piece of an answer. uvicorn reads requests and
decides what is malformed; docs/gateway.md says what the gateway does not promise there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from server.errors import HttpError, RequestTimeout, Unavailable
from server.gateway.access.keys import ANONYMOUS
from server.gateway.admission import streamed
from server.gateway.exchange import Exchange, State
from server.gateway.gateway import Gateway
from server.gateway.observe.stats import of_refusal
from server.gateway.wire.head import RequestHead, error_answer, new_request_id, too_large
from server.gateway.wire.pool import MANY

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class PlainApp:
    """Forwards the public routes, and hands the rest to `app`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if scope["type"] == "http":
            await _Client(scope["state"]["gateway"], scope, receive, send).run(self._app)
        else:
            await self._app(scope, receive, send)


class _Gone(Exception):
    """The client has left while its request was read."""


class _Client:
    """One request, and the side that asked for its exchange (admission.Client)."""

    def __init__(self, gateway: Gateway, scope: Message, receive: Receive, send: Send) -> None:
        self.gateway = gateway
        self._scope, self._receive, self._send_message = scope, receive, send
        query = scope["query_string"]
        self._url: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self._method: bytes = scope["method"].encode()
        self._head: RequestHead | None = None
        self._route = "-"
        self._principal = ANONYMOUS
        self._extra_head = b""
        self._large = False  # the body may be of any size
        self._held = 0  # bytes of the body
        self._ended_at = 0.0  # its exchange, about
        self.exchange: Exchange | None = None
        self.send: Callable[[bytes], None] = self.write
        self._pieces: list[bytes] = []  # of the answer, to be sent
        self._pending = 0  # bytes in them
        self._woken = asyncio.Event()
        self._started = False  # its head was sent
        self._over = False  # nothing more will be written
        self._complete = False  # and all of the answer was
        self._dropped = False  # the client took nothing for too long
        self._task = asyncio.current_task()

    async def run(self, app: App) -> None:
        """From the request's head to the end of its answer."""
        try:
            forwarded = await self._admitted()
        except HttpError as error:
            self.refuse(error)
            await self._pass_on()
            return
        except _Gone:
            return
        finally:
            if self.exchange is None:
                self.body_done()
        if forwarded:
            await self._exchanged()
            return
        try:
            await app(self._scope, self._receive if self._large else self._bounded_receive, self._send_message)
        finally:
            self.body_done()

    # the request

    async def _admitted(self) -> bool:
        """Whether the request is to be forwarded: its exchange is made then, and not begun. Raises HttpError."""
        admission, scope = self.gateway.admission, self._scope
        host, port = scope["server"] or ("", 0)
        admin_port = port == self.gateway.config.admin_port
        self._large = streamed(self._url, self._method)
        version = scope["http_version"]
        head = self._head = admission.read_head(scope["headers"], version, self._url, streamed=self._large)
        self._extra_head = head.cors
        targets = admission.targets(self._url, head, admin_port=admin_port)
        if not targets:
            scope["state"] |= {
                "request_id": head.request_id, "key": head.key, "origin": head.origin, "preflight": head.preflight,
                "admin_port": admin_port,
            }  # fmt: skip
            return False
        self._route = targets[0].route.name
        self._principal = admission.principal(head, targets)
        admission.check_head(head, scope["headers"], self._principal, host)
        target = admission.of_method(targets, self._method)
        body = await self._body()
        request = admission.request(target, head, self._principal, body, http10=True, keep_alive=True)
        try:
            admission.admit(request)
        finally:
            self._extra_head = request.extra_head
        self.exchange = Exchange(self, request)
        return True

    async def _body(self) -> bytes:
        limit_s, pieces = self.gateway.config.limits.request_timeout_s, []
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    pieces.append(self._bounded(message.get("body", b"")))
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError as exc:
            raise RequestTimeout(f"The request took over {limit_s:g} s to arrive.") from exc

    async def _bounded_receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._bounded(message.get("body", b""))
        return message

    def _bounded(self, piece: bytes) -> bytes:
        limits = self.gateway.config.limits
        self._held += len(piece)
        self.gateway.buffered += len(piece)
        if self._held > limits.max_body:
            raise too_large(limits)
        if self.gateway.buffered > limits.max_buffered:
            raise Unavailable("Too many large requests at once; try again.", code="overloaded")
        return piece

    # what its exchange says (admission.Client)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the answer, sent as soon as the task runs; while many wait the instance is held back."""
        self._pieces.append(data)
        self._pending += len(data)
        self._woken.set()
        if self._pending > MANY and self.exchange is not None:
            self.exchange.pause()

    def body_done(self) -> None:
        """Nobody needs the request's body any more."""
        self.gateway.buffered -= self._held
        self._held = 0

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        self._complete = True
        self.cut()

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does `work` now: a task of its own sends the answer."""
        work()

    def refuse(self, error: HttpError) -> None:
        """The gateway's own answer."""
        stats = self.gateway.stats
        if self.exchange is None and stats.watchers:
            told_id = self._head.request_id if self._head is not None else b"-"
            stats.tell(of_refusal(told_id, self._method, self._route, self._principal.name, error))
        stats.refused[error.code] += 1
        request_id = self._head.request_id if self._head is not None else new_request_id()
        head_only, extra = self._method == b"HEAD", self._extra_head
        answer = error_answer(error, request_id, keep_alive=True, head_only=head_only, extra_head=extra)
        self._pieces.append(answer)
        self.answered(keep_alive=True)

    def cut(self) -> None:
        """Nothing more is written."""
        self._over = True
        self.body_done()
        self._woken.set()

    def sweep(self, now: float) -> None:
        """Ends what is over its time (gateway.Client)."""
        limits = self.gateway.config.limits
        assert self.exchange is not None
        if self.exchange.state is not State.ENDED:
            self.exchange.sweep(now, limits.stalled_client_s)
            self._ended_at = now
        elif now - self._ended_at > limits.stalled_client_s and self._task is not None and not self._dropped:
            self._dropped = True  # it takes nothing of what is left
            self._task.cancel()

    # the answer

    async def _exchanged(self) -> None:
        assert self.exchange is not None
        self._ended_at = time.monotonic()
        self.gateway.clients.add(self)
        watching = asyncio.create_task(self._watch())
        try:
            self.exchange.start()
            await self._pass_on()
        except asyncio.CancelledError:
            if not self._dropped:
                raise
        finally:
            watching.cancel()
            self.gateway.clients.discard(self)
            self.exchange.cancel()
            self.body_done()

    async def _watch(self) -> None:
        """Until the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.exchange is not None:
            self.exchange.cancel()
        self.cut()

    async def _pass_on(self) -> None:
        """Sends what is written until nothing more is. An answer that was cut is left unfinished: uvicorn closes."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            pieces, self._pieces, self._pending = self._pieces, [], 0
            data, over = b"".join(pieces), self._over
            if not self._started and data:
                data = await self._send_head(data)
            last = over and self._complete
            if self._started and (data or last):
                await self._send_message({"type": "http.response.body", "body": data, "more_body": not last})
            if over:
                return
            if self.exchange is not None and self._pending <= MANY:
                self.exchange.resume()

    async def _send_head(self, data: bytes) -> bytes:
        """The first bytes of an answer hold its whole head; returns what comes after it."""
        head, _, rest = data.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
        headers = [pair for pair in headers if pair[0] != b"connection"]
        if self.gateway.leaving:
            headers.append((b"connection", b"close"))
        self._started = True
        await self._send_message(
            {"type": "http.response.start", "status": int(status.split(b" ")[1]), "headers": headers}
        )
        return rest
