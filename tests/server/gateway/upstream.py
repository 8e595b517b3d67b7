"""An instance a test can break on purpose: raw HTTP/1.1 over asyncio streams, answers written by hand."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass
class Received:
    """One request as it arrived on the wire."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    raw_head: bytes
    connection: int


@dataclass
class Link:
    """The upstream's side of one connection."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, body: bytes = b'{"ok":true}', status: bytes = b"200 OK", extra: bytes = b"") -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
        await self.send(head % (status, len(body), extra) + body)

    async def sse_head(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def gone(self) -> float:
        """Waits until the other side has closed; returns when (loop time)."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        return asyncio.get_running_loop().time()

    def cut(self) -> None:
        self.writer.transport.abort()


Handler = Callable[[Link, Received], Awaitable[None]]


@dataclass
class Upstream:
    """The upstream as a test sees it. `handler` answers one request; returning keeps the connection for the next."""

    handler: Handler
    port: int = 0
    scheme: str = "http"
    requests: list[Received] = field(default_factory=list)
    connections: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    close: Callable[[], None] = lambda: None  # stop listening; its connections stay

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = Link(self.connections, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while (received := await read_request(link)) is not None:
                self.requests.append(received)
                await self.handler(link, received)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled at the end of a test; asyncio's streams would log it as a fault
        finally:
            self.tasks.discard(task)
            writer.close()


async def read_request(link: Link) -> Received | None:
    """The next request, or None at the end of the connection. Only Content-Length: the gateway sends nothing else."""
    try:
        head = await link.reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
    assert "transfer-encoding" not in headers
    body = await link.reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, target, headers, body, head, link.number)


async def never_answer(link: Link, _: Received) -> None:
    await link.gone()


def answering(body: bytes = b'{"ok":true}', status: bytes = b"200 OK", extra: bytes = b"") -> Handler:
    """The same to each request; `extra` are whole header lines."""

    async def handler(link: Link, _: Received) -> None:
        await link.json(body, status, extra)

    return handler


def sending(raw: bytes) -> Handler:
    """These bytes to each request, and then the end of the connection."""

    async def handler(link: Link, _: Received) -> None:
        await link.send(raw)
        link.writer.close()

    return handler


def streaming(*parts: bytes | asyncio.Event, cut: bool = False) -> Handler:
    """A stream of these parts, where an event is waited for; `cut`: its connection breaks in the place of its end."""

    async def handler(link: Link, _: Received) -> None:
        await link.sse_head()
        for part in parts:
            await (link.chunk(part) if isinstance(part, bytes) else part.wait())
        if cut:
            link.cut()
        else:
            await link.end()

    return handler


async def cut(link: Link, _: Received) -> None:
    link.cut()


@dataclass
class Moody:
    """Answers requests and probes as it is told."""

    status: bytes = b"200 OK"
    health: bytes = b"200 OK"
    page: bytes = b"vllm:num_requests_running 0.0\n"
    silent: bool = False

    async def __call__(self, link: Link, received: Received) -> None:
        if self.silent:
            await link.gone()
        elif received.target == "/metrics":
            await link.json(self.page)
        else:
            await link.json(status=self.health if received.target == "/health" else self.status)


async def answer_json(link: Link, _: Received) -> None:
    await link.json()


@asynccontextmanager
async def upstream(handler: Handler = answer_json, tls: ssl.SSLContext | None = None) -> AsyncIterator[Upstream]:
    """A listening upstream on a free loopback port; its connections end with the context."""
    self = Upstream(handler, scheme="http" if tls is None else "https")
    server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=tls)
    self.port, self.close = server.sockets[0].getsockname()[1], server.close
    try:
        yield self
    finally:
        server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


# the client's side


@dataclass
class Answer:
    """One response as a client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool  # the framing said where it ends, and it got there

    @property
    def error(self) -> dict[str, Any]:
        """The gateway's answer to a request that it refuses, in the form of OpenAI's errors."""
        told: dict[str, Any] = orjson.loads(self.body)["error"]
        assert told.keys() >= {"message", "type", "param", "code"}
        return told

    @property
    def refusal(self) -> tuple[int, str]:
        return self.status, self.error["code"]


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Reads one response, 1xx ones skipped, in whatever framing it has."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        if status >= 200:
            break
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, *await _read_chunks(reader))
    if "content-length" in headers:
        body = await reader.read(0)
        length = int(headers["content-length"])
        while len(body) < length and (more := await reader.read(length - len(body))):
            body += more
        return Answer(status, headers, body, len(body) == length)
    return Answer(status, headers, await reader.read(), complete=True)


async def _read_chunks(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    body = b""
    try:
        while True:
            line = await reader.readline()
            if not re.fullmatch(rb"[0-9a-f]+\r\n", line):
                return body, False
            size = int(line, 16)
            data = await reader.readexactly(size + 2)
            if size == 0:
                return body, True
            body += data[:-2]
    except (asyncio.IncompleteReadError, ConnectionError) as exc:
        return body + getattr(exc, "partial", b""), False
