"""Requests to the admin port of a gateway, and a server that answers as a test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from tests.server.gateway.harness import ADMIN_KEY, Ports, request

AUTH = f"Authorization: Bearer {ADMIN_KEY}\r\n"


async def call(gateway: Ports, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    raw = request(method, path, b"" if body is None else orjson.dumps(body), AUTH)
    answer = await gateway.ask(raw, admin=True)
    return answer.status, dict(orjson.loads(answer.body))


@contextlib.contextmanager
def answering(
    answer: Callable[[str, Mapping[str, str]], tuple[int, bytes]],
    address: str = "127.0.0.1",
    headers: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The URL of a server that answers GET with what `answer` says of path and headers, and with these `headers`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://{address}:{server.server_port}"
        server.shutdown()
