"""What a peer asks of another one over the control channel."""

from __future__ import annotations

import asyncio
import time
from typing import Self, TypeVar

import httpx
import msgspec

from weightsync.errors import PeerRefused, PeerUnreachable
from weightsync.peer.bitmap import Bitmap
from weightsync.peer.messages import Ask, Close, Have, Key, Open, Opened, Refusal
from weightsync.tls import ClusterTls

CONNECT_S = 3.0
ANSWER_S = 5.0  # for all of an answer, however slowly it comes
OPEN_S = 120.0  # the first reader of a published slot waits until its chunks are digested
MAX_ANSWER = 128 << 20  # a manifest, or the digests of MAX_CHUNKS chunks
T = TypeVar("T")


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

    async def open(self, host: str, address: str, key: Key) -> Opened:
        wish = Open(self._model, key.digest, self._host, (self._transport,), key.delta_of)
        return _read(host, await self._call(host, address, "POST", "/v1/open", wish, OPEN_S), Opened)

    async def have(self, host: str, address: str, ticket: str, taken: Bitmap) -> tuple[Have, float]:
        """What can be read by now, and how many seconds the answer took; the holder is told what is `taken` here."""
        started = time.perf_counter()
        raw = await self._call(host, address, "POST", f"/v1/have/{ticket}", Ask(taken.encoded()))
        return _read(host, raw, Have), time.perf_counter() - started

    async def manifest(self, host: str, address: str, ticket: str) -> bytes:
        return await self._call(host, address, "GET", f"/v1/manifest/{ticket}", timeout_s=OPEN_S)

    async def close(self, host: str, address: str, ticket: str, nbytes: int, bytes_per_s: float = 0.0) -> None:
        await self._call(host, address, "POST", f"/v1/close/{ticket}", Close(nbytes, bytes_per_s))

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
                raw = await _body(host, answer)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PeerUnreachable(f"{host} ({address})", str(error) or type(error).__name__) from error
        if answer.status_code != 200:
            raise _refused(host, answer.status_code, raw)
        return raw


async def _body(host: str, answer: httpx.Response) -> bytes:
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


def _read(host: str, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise PeerRefused(host, 200, "not_a_peer", f"its answer cannot be read ({error}): run one release") from error
