"""ASGI applications without a server: the messages of an answer, and what an application sends for a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STREAM = b"text/event-stream"


def head(kind: bytes = STREAM, status: int = 200, **headers: bytes) -> dict[str, Any]:
    """`headers` are those besides the content type, with `_` for `-`."""
    more = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}


def part(body: bytes = b"", *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def sent_by(
    app: Any, path: str, *parts: bytes, headers: Iterable[tuple[bytes, bytes]] = (), kind: str = "http"
) -> list[dict[str, Any]]:
    """The messages with which `app` answers a request whose body comes in `parts`."""
    left, sent = list(parts), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "method": "POST", "path": path, "query_string": b"", "headers": list(headers)}
    await app(scope, receive, send)
    return sent
