"""Both ends of the control channel between peers: small messages (messages.py) over HTTP, with mutual TLS beyond
loopback.

`PeerClient` asks another host's peer; `Control` has the routes that answer, and `serving` runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Literal, Self, TypeVar

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from weightsync.errors import PeerRefused, PeerUnreachable, TransportUnavailable
from weightsync.peer.chunks import Bitmap
from weightsync.peer.messages import TOLD, Ask, Close, Have, Open, Opened, Refusal
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.serve import Tickets
from weightsync.tls import ClusterTls
from weightsync.transport.addresses import Address

CONNECT_S = 3.0
ANSWER_S = 5.0  # for all of an answer, however slowly it comes
OPEN_S = 120.0  # the first reader of a published slot waits until its chunks are digested
MAX_ANSWER = 128 << 20  # a manifest, or the digests of MAX_CHUNKS chunks
MAX_BODY = 256 << 10  # a bitmap of MAX_CHUNKS chunks
TREES: dict[str, Literal[0, 1] | None] = {"": None, "tree=0": 0, "tree=1": 1}  # what a question may wait for
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class PeerClient:
    """Connections to all other peers. Every call raises PeerRefused or PeerUnreachable."""

    def __init__(self, model: str, host: str, transport: str, tls: ClusterTls | None) -> None:
        self._model, self._host, self._transport = model, host, transport
        self._scheme = "https" if tls is not None else "http"
        self._http = httpx.AsyncClient(
            verify=tls.client_context() if tls is not None else True,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )

    async def open(self, host: str, address: str, digest: str) -> Opened:
        wish = Open(self._model, digest, self._host, (self._transport,))
        return _decoded(host, await self._call(host, address, "POST", f"/v1/open?{TOLD}", wish, OPEN_S), Opened)

    async def have(
        self, host: str, address: str, ticket: str, chunks: int, tree: Literal[0, 1] | None = None
    ) -> tuple[Have, float]:
        """Those of `chunks` that can be read by now, and the seconds that the answer took. With `tree` it waits for
        news there."""
        started, query = time.perf_counter(), "" if tree is None else f"?tree={tree}"
        raw = await self._call(host, address, "POST", f"/v1/have/{ticket}{query}", Ask(Bitmap(chunks).encoded()))
        return _decoded(host, raw, Have), time.perf_counter() - started

    async def manifest(self, host: str, address: str, ticket: str) -> bytes:
        return await self._call(host, address, "GET", f"/v1/manifest/{ticket}", timeout_s=OPEN_S)

    async def close(self, host: str, address: str, ticket: str, nbytes: int) -> None:
        await self._call(host, address, "POST", f"/v1/close/{ticket}", Close(nbytes))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _call(
        self,
        host: str,
        address: str,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        content = msgspec.json.encode(body) if body is not None else None
        url, limit_s = f"{self._scheme}://{address}{path}", timeout_s or ANSWER_S
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.stream(
                    method, url, content=content, timeout=httpx.Timeout(limit_s, connect=CONNECT_S)
                ) as answer,
            ):
                raw = await _whole(host, answer)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PeerUnreachable(f"{host} ({address})", str(error) or type(error).__name__) from error
        if answer.status_code != 200:
            raise _refused(host, answer.status_code, raw)
        return raw


async def _whole(host: str, answer: httpx.Response) -> bytes:
    """Raises PeerRefused for more than a peer can mean."""
    raw = bytearray()
    async for piece in answer.aiter_raw():
        raw += piece
        if len(raw) > MAX_ANSWER:
            raise PeerRefused(host, 200, "not_a_peer", f"its answer has more than {MAX_ANSWER:,} bytes: leave it")
    return bytes(raw)


def _refused(host: str, status: int, raw: bytes) -> PeerRefused:
    try:
        said = msgspec.json.decode(raw, type=Refusal)
    except msgspec.DecodeError:
        said = Refusal("not_a_peer", "what listens there does not answer as a peer: is its address right?")
    return PeerRefused(host, status, said.code, said.message)


def _decoded(host: str, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise PeerRefused(host, 200, "not_a_peer", f"its answer cannot be read ({error}): run one release") from error


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
        wish = await _parsed(request, Open)
        return _json(await self._tickets.open(wish, told=request.url.query == TOLD))

    async def _have(self, request: Request) -> Response:
        await _parsed(request, Ask)
        try:
            tree = TREES[request.url.query]
        except KeyError:
            raise _bad_request("the query may be tree=0 or tree=1") from None
        return _json(await self._tickets.have(request.path_params["ticket"], tree))

    async def _manifest(self, request: Request) -> Response:
        return Response(self._tickets.manifest(request.path_params["ticket"]), media_type="application/json")

    async def _close(self, request: Request) -> Response:
        said = await _parsed(request, Close)
        self._tickets.close(request.path_params["ticket"], said.nbytes)
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


def _bad_request(problem: object) -> PeerRefused:
    return PeerRefused("", 400, "bad_request", f"{problem}: do both peers run the same release?")


async def _parsed(request: Request, kind: type[T]) -> T:
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY:
            raise _bad_request(f"the body has more than {MAX_BODY:,} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise _bad_request(error) from error


def _answering(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except PeerRefused as refused:
            return _json(Refusal(refused.reason, refused.message), refused.status)
        except ClientDisconnect:
            return _json(Refusal("gone", "the reader has gone"), 400)

    return answer


async def _alive(_: Request) -> Response:
    return _json({})


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
