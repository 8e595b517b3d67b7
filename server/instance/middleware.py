"""The middleware before vLLM's routes, outermost first: who may ask (`Admission`), what weights answered
(`ProvenanceMiddleware`), and what a fault of vLLM's means (`answer_faults`).

Members of the cluster may ask, with the key that this instance has written into its record in the store. Another
client may ask for health and metrics alone, or it would get around the gateway's keys, limits and cache scopes. While
this instance drains, or tries a version as a canary, only the probes may generate; once its engine has died none may.

The gateway routes nothing to such an instance, but it hears of it a moment later; what it has sent by then is refused
here. `x-hotswap-refused` tells it why, and that decides whether it may ask others:

    key       it did not bring this instance's key     nothing was begun: any other instance may answer
    version   other weights run here, or it drains    the same
    engine    the engine had died before it came       the same
    lost      the engine died while it ran             it may be what killed the engine: it counts as a loss

vLLM's schemas admit values that its code then cannot take, such as a text where the code asks for a key. An error
of vLLM before the engine has answered is therefore the request's fault, and gets a typed 400. A 500 would tell the
client to try again, and the gateway to leave the instance out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException

from server import api
from server.instance import replay
from server.instance.inflight import Problem, Wish
from server.instance.prefixes import with_shares
from server.instance.provenance import Trace, annotate, annotate_chunk, cannot_take, current_trace, problem_body
from server.instance.routed_experts import FIELD as ROUTING
from server.prefixes import PROMPT_FIELDS

GENERATING = frozenset(route.path for route in api.ROUTES if route.works)
OPEN = frozenset({"/health", "/metrics"})
KEY, VERSION, ENGINE, LOST = b"key", b"version", b"engine", b"lost"  # values of x-hotswap-refused
HAND_ON_S = 2.0  # until vLLM has let go of what was handed on
PROBE = b"x-hotswap-probe"  # set by the gateway's own probes; from clients the gateway lets no such header through


def _refusal(message: str, kind: str, code: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


REFUSAL = _refusal(
    "This instance takes no requests now: its weights are being changed, or it stops; ask another one.",
    "conflict_error",
    "version_mismatch",
)
STRANGER = _refusal(
    "This is the port of one instance, which answers its gateways alone; ask a gateway.",
    "authentication_error",
    "instance_key_required",
)
DEAD = _refusal(
    "The engine of this instance has died, and nothing was generated; ask another instance.",
    "server_error",
    "engine_died",
)


class Admission:
    """Wraps the app; `admits` is asked before every request that generates, `dead` when one has failed. `key`: what
    all requests bring as a bearer token, empty: nothing."""

    def __init__(self, app: Any, dead: Callable[[], bool] = lambda: False, key: str = "") -> None:
        self._app, self._dead = app, dead
        self.key = key
        self._bearer = f"Bearer {key}".encode() if key else b""
        self.admits: Callable[[], bool] = lambda: True
        self._running: dict[asyncio.Task[Any], _Head] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self, seconds: float) -> None:
        """Return when no client's request is generating, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def hand_on(self) -> int:
        """End what still generates, so that the gateway asks another instance: an answer that has not begun is refused,
        a stream breaks off. How many there were."""
        left = list(self._running.items())
        for task, head in left:
            head.handed_on = True
            task.cancel()
        if left:
            await self.idle(HAND_ON_S)
        return len(left)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._is_member(scope):
            await _turn_away(scope, send)
        elif scope["type"] != "http" or scope["path"] not in GENERATING or _is_probe(scope):
            await self._app(scope, receive, send)
        elif self._dead():
            await refuse(send, 503, DEAD, ENGINE)
        elif not self.admits():
            await refuse(send, 409, REFUSAL, VERSION)
        else:
            await self._count(scope, receive, send)

    def _is_member(self, scope: Any) -> bool:
        if not self._bearer or (scope["type"] == "http" and scope["path"] in OPEN):
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(sent, self._bearer)

    async def _count(self, scope: Any, receive: Any, send: Any) -> None:
        task, head = asyncio.current_task(), _Head()
        assert task is not None
        self._running[task] = head
        self._idle.clear()
        try:
            await self._app(scope, receive, self._unless_dead(send, head))
        except asyncio.CancelledError:
            if not head.handed_on:
                raise
            task.uncancel()
            if not head.sent:
                await refuse(send, 409, REFUSAL, VERSION)
        finally:
            del self._running[task]
            if not self._running:
                self._idle.set()

    def _unless_dead(self, send: Any, head: _Head) -> Any:
        """`send`, but what fails because the engine has died meanwhile is told as lost, not as an error of vLLM's; and
        what ends because it is handed on sends nothing more."""
        refused = False

        async def checked(message: dict[str, Any]) -> None:
            nonlocal refused
            if head.handed_on:
                return
            if message["type"] == "http.response.start" and message["status"] >= 500 and self._dead():
                refused = True
                await refuse(send, 503, DEAD, LOST)
            elif not refused:
                head.sent = True
                await send(message)

        return checked


@dataclass
class _Head:
    """Of an answer that is being made: whether any of it was sent, and whether another instance is to make it."""

    sent: bool = False
    handed_on: bool = False


def _is_probe(scope: Any) -> bool:
    return any(name == PROBE for name, _ in scope["headers"])


async def _turn_away(scope: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await refuse(send, 401, STRANGER, KEY)


async def refuse(send: Any, status: int, body: bytes, why: bytes) -> None:
    """Tell the gateway that there is no answer here, and `why`."""
    await _send_json(send, status, body, (b"x-hotswap-refused", why))


async def _send_json(send: Any, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


HEADER = b"x-hotswap-weight-version"
TRACED = frozenset(route.path for route in api.ROUTES if route.annotated)
VLLM_SPANS = frozenset({"/v1/chat/completions", "/v1/completions"})  # where vLLM has the field below, from 0.33 on
WANTED = "return_weight_versions"
_BOOL = TypeAdapter(bool)


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
        except Problem as problem:
            await _send_json(send, problem.status, orjson.dumps(problem_body(problem)))
            return
        trace = Trace(Wish.of(scope.get("headers", ())), replaying, scope["path"])
        current_trace.set(trace)
        if scope["path"] in TRACED or scope["path"] in PROMPT_FIELDS:
            receive = _read_along(receive, trace, scope["path"])
        answer = _Answer(trace, send, self._active, self._dead, annotated=scope["path"] in TRACED)
        try:
            with trace.lasting():
                await self._app(scope, receive, answer.send)
        except Exception:
            if not await answer.told_the_problem():
                raise


def _read_along(receive: Any, trace: Trace, route: str) -> Any:
    """`receive`, which tells `trace` of the body: the prefixes of its prompt, and what more it wants, which is its
    routing, and spans in vLLM's form. Raises Problem."""
    parts: list[bytes] = []

    async def read_along() -> Any:
        message = await receive()
        if message["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(parts)
                parts.clear()
                trace.prefixes = with_shares(route, body, trace.wish.scope)
                if route not in TRACED:
                    return message
                try:
                    trace.as_vllm = route in VLLM_SPANS and wants(body, WANTED)
                    trace.wants_routing = wants(body, ROUTING)
                except Problem as problem:
                    trace.problem = problem
                    raise
        return message

    return read_along


def wants(body: bytes, field: str) -> bool:
    """Whether its field says so in any way that vLLM takes for true. Raises Problem; other faults are vLLM's."""
    if field.encode() not in body:
        return False
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    try:
        return isinstance(fields, dict) and _BOOL.validate_python(fields.get(field, False))
    except ValidationError as error:
        message = f"{field} must be true or false"  # vLLM 0.33 says so too; 0.32 does not know its field
        raise Problem(message, code="invalid_parameter", param=field) from error


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
            event = orjson.dumps({"type": "error", **problem_body(self._trace.problem, self._trace.path)})
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
            self._over = self._trace.failed  # vLLM would tell the client next that the answer is complete
            more = not self._over and message.get("more_body", False)
            message, self._held = {**message, "body": self._held + events, "more_body": more}, b""
        elif self._annotated and self._kind.startswith(b"application/json"):
            self._body += body
            if message.get("more_body"):
                return
            good = self._start is not None and self._start["status"] < 400
            message = {**message, "body": self._whole(self._body) if good else self._body}
        await self._send_start(message)
        await self._send(message)

    def _events(self, body: bytes) -> bytes:
        """The bytes to send for the event(s) in `body`."""
        if self._annotated or self._trace.problem is not None or _is_error(body):
            return annotate_chunk(body, self._trace)
        return b"" if self._trace.replaying.muted else body

    async def _broken_off(self) -> bool:
        """Breaks an answer off whose engine has died. False: no other instance can go on, and vLLM's error ends it."""
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
        problem, more = self._trace.problem, list[tuple[bytes, bytes]]()
        if problem.code == "version_mismatch":
            more.append((b"x-hotswap-refused", VERSION))
        if problem.retry_after_s is not None:
            more.append((b"retry-after", b"%d" % problem.retry_after_s))
        await _send_json(self._send, problem.status, orjson.dumps(problem_body(problem, self._trace.path)), *more)

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


log = logging.getLogger("hotswap.instance")
KINDS = (AttributeError, LookupError, ArithmeticError, RecursionError)  # vLLM does so itself for others


def answer_faults(app: FastAPI) -> None:
    """Register the handlers beside vLLM's own."""
    whole: Any = app.exception_handlers
    app.add_exception_handler(AnyHTTPException, whole[HTTPException])  # FastAPI raises it for a body it cannot parse
    vllm_s = whole[Exception]

    async def refuse(request: Request, error: Exception) -> Any:
        trace = current_trace.get()
        if trace is None or trace.begun:
            return await vllm_s(request, error)
        log.warning("vLLM cannot take a request", exc_info=error)
        told = {"message": cannot_take(error), "type": "BadRequestError", "param": None, "code": 400}
        return JSONResponse({"error": told}, status_code=400)

    for kind in KINDS:
        app.add_exception_handler(kind, refuse)
    if app.middleware_stack is not None:  # vLLM has had it built, with a copy of the handlers of before
        app.middleware_stack = app.build_middleware_stack()
