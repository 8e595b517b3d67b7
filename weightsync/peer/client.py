"""What a peer asks of another one over the control channel."""

from __future__ import annotations

import time
from typing import Self, TypeVar

import httpx
import msgspec

from weightsync.errors import PeerRefused, PeerUnreachable
from weightsync.peer.messages import Close, Have, Key, Open, Opened, Refusal
from weightsync.tls import ClusterTls

CONNECT_S = 3.0
ANSWER_S = 5.0
OPEN_S = 120.0  # the first reader of a published slot waits until its chunks are digested
T = TypeVar("T")


class PeerClient:
    """Connections to all other peers. Every call raises PeerRefused or PeerUnreachable."""

    def __init__(self, model: str, host: str, transport: str, tls: ClusterTls | None) -> None:
        self._model, self._host, self._transport = model, host, transport
        self._scheme = "https" if tls is not None else "http"
        self._http = httpx.AsyncClient(
            verify=tls.client_context() if tls is not None else True,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def open(self, host: str, address: str, key: Key) -> Opened:
        wish = Open(self._model, key.digest, self._host, (self._transport,), key.delta_of)
        timeout = httpx.Timeout(OPEN_S, connect=CONNECT_S)
        return _read(host, await self._call(host, address, "POST", "/v1/open", wish, timeout), Opened)

    async def have(self, host: str, address: str, ticket: str) -> tuple[Have, float]:
        """What can be read by now, and how many seconds the answer took."""
        started = time.perf_counter()
        raw = await self._call(host, address, "GET", f"/v1/have/{ticket}")
        return _read(host, raw, Have), time.perf_counter() - started

    async def manifest(self, host: str, address: str, ticket: str) -> bytes:
        return await self._call(host, address, "GET", f"/v1/manifest/{ticket}", timeout=httpx.Timeout(OPEN_S))

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
        timeout: httpx.Timeout | None = None,
    ) -> bytes:
        content = msgspec.json.encode(body) if body is not None else None
        url = f"{self._scheme}://{address}{path}"
        try:
            answer = await self._http.request(method, url, content=content, timeout=timeout or httpx.USE_CLIENT_DEFAULT)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerUnreachable(f"{host} ({address})", str(error) or type(error).__name__) from error
        if answer.status_code != 200:
            raise _refused(host, answer)
        return answer.content


def _refused(host: str, answer: httpx.Response) -> PeerRefused:
    try:
        said = msgspec.json.decode(answer.content, type=Refusal)
    except msgspec.DecodeError:
        said = Refusal("not_a_peer", "what listens there does not answer as a peer: is its address right?")
    return PeerRefused(host, answer.status_code, said.code, said.message)


def _read(host: str, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise PeerRefused(host, 200, "not_a_peer", f"its answer cannot be read ({error}): run one release") from error
