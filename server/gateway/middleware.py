"""Plain ASGI around the app: what each port shows, the admin key, and the request id on every answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Response

from server.errors import HttpError, NotFound
from server.gateway.access.keys import ADMIN

Scope = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestIdMiddleware:
    """Returns the request id on every answer of the app, as the hot path does on its own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", scope["state"]["request_id"])]
            await send(message)

        await self._app(scope, receive, send_with_id)


OPEN = frozenset({"/healthz", "/readyz", "/metrics"})


class AdminGate:
    """Health and metrics are for everybody, on both ports. Everything else is on the admin port alone, and is not
    reached, and no body read for it, without an admin key."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                _check(scope)
            except HttpError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _check(scope: Scope) -> None:
    if not scope["state"]["admin_port"]:
        raise NotFound(f"There is no public route {scope['method']} {scope['path']}.")
    scope["state"]["gateway"].keys.authorize(scope["state"]["key"], ADMIN)


def error_response(error: HttpError) -> Response:
    """`error` as the app answers it."""
    return Response(error.body(), error.status, error.headers(), media_type="application/json")
