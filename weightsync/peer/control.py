"""The control channel of a peer: an HTTP server for small messages (messages.py), with mutual TLS beyond loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from weightsync.errors import PeerRefused, TransportUnavailable
from weightsync.peer.messages import Ask, Close, Open, Refusal
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.tickets import Tickets
from weightsync.tls import ClusterTls
from weightsync.transport.addresses import Address

MAX_BODY = 256 << 10  # a bitmap of MAX_CHUNKS chunks
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class Control:
    """The routes."""

    def __init__(self, tickets: Tickets, metrics: PeerMetrics) -> None:
        self._tickets, self._metrics = tickets, metrics
        self.app = Starlette(
            routes=[
                Route("/v1/open", _answering(self._open), methods=["POST"]),
                Route("/v1/have/{ticket}", _answering(self._have), methods=["POST"]),
                Route("/v1/manifest/{ticket}", _answering(self._manifest)),
                Route("/v1/close/{ticket}", _answering(self._close), methods=["POST"]),
                Route("/metrics", self._tell),
                Route("/healthz", _alive),
            ]
        )

    async def _open(self, request: Request) -> Response:
        return _json(await self._tickets.open(await _body(request, Open)))

    async def _have(self, request: Request) -> Response:
        return _json(self._tickets.have(request.path_params["ticket"], (await _body(request, Ask)).taken))

    async def _manifest(self, request: Request) -> Response:
        return Response(self._tickets.manifest(request.path_params["ticket"]), media_type="application/json")

    async def _close(self, request: Request) -> Response:
        said = await _body(request, Close)
        self._tickets.close(request.path_params["ticket"], said.nbytes, said.bytes_per_s)
        return _json({})

    async def _tell(self, _: Request) -> Response:
        return Response(self._metrics.generate(), media_type="text/plain; version=0.0.4")


def listen(address: Address, tls: ClusterTls | None) -> socket.socket:
    """Raises TransportUnavailable: strangers would be served, or the address cannot be listened on."""
    if tls is None and not address.loopback:
        raise TransportUnavailable(
            "control",
            f"it does not listen on {address.host} without TLS",
            "Give the cluster certificates (--cluster-tls or HOTSWAP_CLUSTER_TLS, docs/security.md), or listen on "
            "127.0.0.1",
        )
    try:
        return socket.create_server((address.host, address.port), family=address.family, backlog=128)
    except OSError as error:
        reason = f"it cannot listen on {address} ({error})"
        raise TransportUnavailable("control", reason, "Choose an address of this host and a free port") from error


@contextlib.asynccontextmanager
async def serving(app: Starlette, listener: socket.socket, tls: ClusterTls | None) -> AsyncIterator[None]:
    """Answer on `listener` inside."""
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=2,
            ssl_context_factory=(lambda *_: tls.server_context()) if tls is not None else None,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]), name="control")
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has a flag, and no event
            await asyncio.sleep(0.005)
        if task.done():
            raise TransportUnavailable("control", "its server has not started", "Look at the log") from task.exception()
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BadRequest(Exception):
    """Its message says what is wrong."""


async def _body(request: Request, kind: type[T]) -> T:
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY:
            raise _BadRequest(f"the body has more than {MAX_BODY:,} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise _BadRequest(str(error)) from error


def _answering(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except PeerRefused as refused:
            return _json(Refusal(refused.reason, refused.message), refused.status)
        except _BadRequest as bad:
            return _json(Refusal("bad_request", f"{bad}: do both peers run the same release?"), 400)
        except ClientDisconnect:
            return _json(Refusal("gone", "the reader has gone"), 400)

    return answer


async def _alive(_: Request) -> Response:
    return _json({})


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
