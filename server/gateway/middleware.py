"""Plain ASGI around the app: what each port shows, the admin key, and the request id on every answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Response

from server.errors import HttpError
from server.gateway.access.roles import needed
from server.gateway.console.routes import PREFIX, is_open
from server.gateway.observe.stats import Finished
from server.gateway.routes import elsewhere, find

log = logging.getLogger("hotswap.gateway")

Scope = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestIdMiddleware:
    """Returns the request id on every answer of the app, and tells of the request, as the hot path does on its own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 499, time.monotonic()
        state = scope["state"]
        if scope["method"] == "HEAD" and scope["path"] in OPEN:
            scope = {**scope, "method": "GET"}  # uvicorn sends its head alone: load balancers ask for no more
        origins, page = state["gateway"].origins, b"" if state["admin_port"] else state["origin"] or b""
        shown = origins.pairs(page) if page else []

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"]), *shown]
            await send(message)

        methods = _methods_at(scope) if page and state["preflight"] and scope["method"] == "OPTIONS" else ()
        try:
            if methods:
                shown = []
                await _answer_preflight(scope, page, methods)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("%s: a fault of the gateway", scope["state"]["request_id"].decode())
            if status != 499:
                raise  # the answer has begun: uvicorn cuts it
            failed = HttpError(500, "The gateway failed to answer; the fault is in its log.")
            await error_response(failed, scope["path"])(scope, receive, send_with_id)
        finally:
            self._tell(scope, status, time.monotonic() - began)

    @staticmethod
    def _tell(scope: Scope, status: int, duration_s: float) -> None:
        stats = scope["state"]["gateway"].stats
        if stats.watchers and scope["path"] not in OPEN:
            stats.tell(_finished(scope, status, duration_s))


def _finished(scope: Scope, status: int, duration_s: float) -> Finished:
    """By the route's template: a path may hold anything a client thinks of."""
    route = getattr(scope.get("route"), "path", "-")
    request_id = scope["state"]["request_id"].decode()
    return Finished(request_id, scope["method"], route, status, None, "-", time.time(), duration_s)


def _methods_at(scope: Scope) -> tuple[str, ...]:
    """The methods that a page may send there; none where the public port has no route."""
    targets = find(scope["raw_path"])
    if targets:
        return () if targets[0].route.admin else tuple(target.route.method.decode() for target in targets)
    return ("GET", "POST") if is_public(scope["path"]) else ()


def _answer_preflight(scope: Scope, page: bytes, methods: tuple[str, ...]) -> Response:
    asked = next((value for name, value in scope["headers"] if name == b"access-control-request-headers"), b"")
    answer = Response(status_code=204)
    answer.raw_headers = scope["state"]["gateway"].origins.preflight(page, asked, methods)
    return answer


OPEN = frozenset({"/healthz", "/readyz", "/metrics", "/health", "/ping", "/load"})
FEEDBACK = "/v1/feedback"  # it looks at the key itself
MODELS = "/v1/models"  # so does this one, where it is not forwarded
DOCUMENT = "/openapi.json"  # each port has its own; that of the admin port is behind the key


def is_public(path: str) -> bool:
    """Whether the app serves `path` on the public port."""
    return path in OPEN or path in (DOCUMENT, FEEDBACK, MODELS) or is_open(path)


def _is_open_here(scope: Scope) -> bool:
    return is_public(scope["path"]) and not (scope["path"] == DOCUMENT and scope["state"]["admin_port"])


class AdminGate:
    """Health, metrics and the console's files are for everybody, on both ports. Everything else is on the admin port
    alone, and is not reached, and no body read for it, without the role that it needs (access/roles.py)."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open_here(scope):
            try:
                await _check(scope)
            except HttpError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _check(scope: Scope) -> None:
    state = scope["state"]
    if not state["admin_port"]:
        raise HttpError(404, elsewhere(scope["path"], admin_port=False))
    if scope["path"] == "/":  # a browser that has the address alone sends no key
        raise HttpError(404, f"There is nothing at /. The console is at {PREFIX}.")
    role = needed(scope["method"], scope["path"])
    state["principal"] = await state["gateway"].access.authorize(state["key"], role)


def error_response(error: HttpError, path: str) -> Response:
    """`error` as the app answers it at this path."""
    return Response(error.body_for(path), error.status, error.headers(), media_type="application/json")
