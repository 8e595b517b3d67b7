"""Requests to the admin port of a gateway."""

from __future__ import annotations

from typing import Any

import orjson

from tests.server.gateway.harness import ADMIN_KEY, Ports, get, post

AUTH = f"Authorization: Bearer {ADMIN_KEY}\r\n"


async def call(gateway: Ports, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    raw = get(path, AUTH) if method == "GET" else post(path, b"" if body is None else orjson.dumps(body), AUTH)
    answer = await gateway.ask(raw.replace(b"POST", method.encode(), 1), admin=True)
    return answer.status, dict(orjson.loads(answer.body))
