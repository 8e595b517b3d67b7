"""A fast stand-in for an instance: canned OpenAI answers at a pace the request asks for.

`python -m loadtest.canned_upstream` prints its port. The request's `max_tokens` says how many chunks, `pace_ms` how far
apart (0: all at once).
"""

from __future__ import annotations

import asyncio

import orjson
import uvloop


def _event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "canned", "choices": [choice]}
    return b"data: %b\n\n" % orjson.dumps(chunk)


CHUNK = _event({"content": "word "}, None)
LAST = _event({}, "stop") + b"data: [DONE]\n\n"
WHOLE = orjson.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "canned",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)
MODELS = b'{"object":"list","data":[{"id":"canned","object":"model","created":1,"owned_by":"vllm"}]}'
METRICS = b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PAGES = {b"/v1/models": MODELS, b"/metrics": METRICS, b"/health": b"{}"}


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Canned(asyncio.Protocol):
    """One connection; requests come with Content-Length and one at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._answer(head.split(b" ", 2)[1], rest[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        page = PAGES.get(path)
        if page is not None:
            self._json(page)
            return
        ask = orjson.loads(body)
        if not ask.get("stream"):
            self._json(WHOLE)
            return
        chunks = int(ask.get("max_tokens", 16))
        pace_s = float(ask.get("pace_ms", 0)) / 1e3
        if pace_s == 0:
            # The first token in a write of its own, as an engine has it.
            self._transport.write(STREAM_HEAD + _framed(CHUNK))
            self._transport.write(_framed(CHUNK) * (chunks - 1) + _framed(LAST) + b"0\r\n\r\n")
            return
        self._transport.write(STREAM_HEAD)
        self._paced(chunks, pace_s, self._loop.time())

    def _paced(self, left: int, pace_s: float, due: float) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(_framed(LAST) + b"0\r\n\r\n")
            return
        self._transport.write(_framed(CHUNK))
        self._loop.call_at(due + pace_s, self._paced, left - 1, pace_s, due + pace_s)

    def _json(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


async def serve() -> None:
    """Listens on a free loopback port for ever."""
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
