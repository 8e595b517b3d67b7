"""ASGI middleware that writes a request's provenance into its answer, and lets another instance's answer go on here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from server import api

from . import replay
from .admission import DEAD, LOST, VERSION, refuse
from .inflight import VersionMismatch, Wish
from .provenance import Trace, annotate, annotate_chunk, current_trace, problem_body

HEADER = b"x-hotswap-weight-version"
TRACED = frozenset(route.path for route in api.ROUTES if route.annotated)


class ProvenanceMiddleware:
    """Wraps vLLM's app. The response head waits for the first body part that follows an output of the engine, so that
    the header is exact and what is refused until then has the status of its error, in streams too.

    `dead`: whether the engine has ended. `resumable`: routes whose streams may be continued by another instance.
    """

    def __init__(
        self,
        app: Any,
        active_version: Callable[[], int | None],
        dead: Callable[[], bool] = lambda: False,
        resumable: frozenset[str] = replay.ROUTES,
    ) -> None:
        self._app = app
        self._active = active_version
        self._dead = dead
        self._resumable = resumable

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            replaying, receive = await replay.read(scope, receive, self._resumable)
        except replay.BadResume as problem:
            error = {"message": str(problem), "type": "invalid_request_error", "param": None, "code": "bad_resume"}
            await _send_json(send, 400, {"error": error})
            return
        trace = Trace(Wish.of(scope.get("headers", ())), replaying)
        current_trace.set(trace)
        answer = _Answer(trace, send, self._active, self._dead, annotated=scope["path"] in TRACED)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if not await answer.told_the_problem():
                raise


class _Answer:
    def __init__(
        self, trace: Trace, send: Any, active: Callable[[], int | None], dead: Callable[[], bool], *, annotated: bool
    ) -> None:
        self._trace, self._send, self._active, self._annotated = trace, send, active, annotated
        self._dead = dead
        self._start: dict[str, Any] | None = None
        self._kind = b""
        self._body = self._held = b""
        self._over = False

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._kind = dict(message["headers"]).get(b"content-type", b"")
        elif message["type"] == "http.response.body":
            await self._send_body(message)
        else:
            await self._send(message)

    async def told_the_problem(self) -> bool:
        """The app broke off; the client gets the typed error if there is one, as an event where its stream runs."""
        if self._trace.problem is None:
            return False
        if self._start is not None and not self._over:
            await self._refuse()
        elif not self._over:
            self._over = True
            event = orjson.dumps({"type": "error", **problem_body(self._trace.problem)})
            await self._send({"type": "http.response.body", "body": b"event: error\ndata: " + event + b"\n\n"})
        return True

    async def _send_body(self, message: dict[str, Any]) -> None:
        if self._over:
            return
        if self._trace.problem is not None and self._start is not None:
            await self._refuse()
            return
        body = message.get("body", b"")
        if self._kind.startswith(b"text/event-stream"):
            if self._dead() and _is_error(body) and await self._broken_off():
                return
            events = self._events(body)
            if body and not events and message.get("more_body"):
                return  # the client has them
            if self._start is not None and not self._trace.begun and message.get("more_body"):
                self._held += events  # such as the first events of /v1/responses
                return
            message, self._held = {**message, "body": self._held + events}, b""
        elif self._annotated and self._kind.startswith(b"application/json"):
            self._body += body
            if message.get("more_body"):
                return
            good = self._start is not None and self._start["status"] < 400
            message = {**message, "body": self._whole(self._body) if good else self._body}
        await self._send_start(message)
        await self._send(message)

    def _events(self, body: bytes) -> bytes:
        """What is sent of the event(s) in `body`."""
        if self._annotated or self._trace.problem is not None:
            return annotate_chunk(body, self._trace)
        return b"" if self._trace.replaying.muted else body

    async def _broken_off(self) -> bool:
        """The engine has died. What no other instance can go on with ends with vLLM's own error instead: False."""
        if self._start is not None:
            self._over = True
            await refuse(self._send, 503, DEAD, LOST)
            return True
        self._over = self._trace.replaying.resumable  # nothing more is sent: the server cuts the connection
        return self._over

    async def _refuse(self) -> None:
        """Nothing was sent yet: the typed error, whatever the route made of it."""
        assert self._trace.problem is not None
        self._over = True
        body = orjson.dumps(problem_body(self._trace.problem))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if isinstance(self._trace.problem, VersionMismatch):
            headers.append((b"x-hotswap-refused", VERSION))
        if (seconds := self._trace.problem.retry_after_s) is not None:
            headers.append((b"retry-after", b"%d" % seconds))
        await self._send({"type": "http.response.start", "status": self._trace.problem.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _whole(self, body: bytes) -> bytes:
        payload = orjson.loads(body) if body else None
        if isinstance(payload, dict) and payload.get("error") is None:
            annotate(payload, self._trace, last=True)
            return orjson.dumps(payload)
        return body

    async def _send_start(self, message: dict[str, Any]) -> None:
        if self._start is None:
            return
        start, self._start = self._start, None
        headers = [h for h in start["headers"] if h[0] != b"content-length"]
        if len(headers) < len(start["headers"]):
            length = len(message["body"]) if not message.get("more_body") else None
            headers += [(b"content-length", b"%d" % length)] if length is not None else []
        version = self._trace.first_version() or self._active()
        headers += [(HEADER, b"%d" % version)] if version is not None else []
        if self._kind.startswith(b"text/event-stream"):
            headers += self._trace.replaying.headers()
        await self._send({**start, "headers": headers})


def _is_error(body: bytes) -> bool:
    """Whether vLLM, or /generate, tells the end of a stream in this event."""
    return body.startswith((b"event: error", b'data: {"error"'))


async def _send_json(send: Any, status: int, body: dict[str, Any]) -> None:
    data = orjson.dumps(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
