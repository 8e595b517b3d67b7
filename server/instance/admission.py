"""Who may ask here: members of the cluster, with the key that this instance has written into its record in the store.
Whoever else asked for more than health and metrics would get around the gateway's keys, limits and cache scopes.

And who may generate here now: nobody but the probes while this instance drains, or tries a version as a canary; nobody
at all once its engine has died.

The gateway routes nothing to such an instance, but it hears of it a moment later; what it has sent by then is refused
here. `x-hotswap-refused` tells it why, and that decides whether it may ask others:

    key       it did not bring this instance's key     nothing was begun: any other instance may answer
    version   other weights run here, or it drains    the same
    engine    the engine had died before it came       the same
    lost      the engine died while it ran             it may be what killed the engine: it counts as a loss
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from typing import Any

import orjson

from server import api

GENERATING = frozenset(route.path for route in api.ROUTES if route.works)
OPEN = frozenset({"/health", "/metrics"})
KEY, VERSION, ENGINE, LOST = b"key", b"version", b"engine", b"lost"  # values of x-hotswap-refused
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
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self, seconds: float) -> None:
        """Return when no client's request is generating, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

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
        self._running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, self._unless_dead(send))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _unless_dead(self, send: Any) -> Any:
        """`send`, but what fails because the engine has died meanwhile is told as lost, not as an error of vLLM's."""
        refused = False

        async def checked(message: dict[str, Any]) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] >= 500 and self._dead():
                refused = True
                await refuse(send, 503, DEAD, LOST)
            elif not refused:
                await send(message)

        return checked


def _is_probe(scope: Any) -> bool:
    return any(name == PROBE for name, _ in scope["headers"])


async def _turn_away(scope: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await refuse(send, 401, STRANGER, KEY)


async def refuse(send: Any, status: int, body: bytes, why: bytes) -> None:
    """Tell the gateway that there is no answer here, and `why`."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers.append((b"x-hotswap-refused", why))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
