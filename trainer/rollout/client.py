"""The client of the gateway's `POST /generate`: token ids in; token ids, log-probs and weight versions out."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson

from trainer.config import GatewayConfig
from trainer.connection import Bearer, verify
from trainer.errors import GatewayUnreachable, RolloutError
from trainer.rollout.samples import Sample, VersionSpan

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0


@dataclass(frozen=True)
class Request:
    """What is asked of `/generate` for one prompt. `on_swap` says what a swap in the middle of the answer does to it
    (docs/api.md, policies)."""

    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    on_swap: str = "keep"

    def split(self) -> list[Request]:
        """One request a sample. The engine adds a sample's index to the seed, so these give the same samples."""
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "prompt_token_ids": self.prompt_ids,
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": True,
            "stream": False,
        }
        if self.on_swap != "keep":
            body["hotswap"] = {"policy": self.on_swap}
        return body if self.seed is None else body | {"seed": self.seed}


class GenerateClient:
    """The gateway's `/generate`, with retries. Bound to the event loop it is first used on."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for a key or certificates that are not there."""
        self._config = config
        self._room = asyncio.Semaphore(config.concurrency)  # httpx's own waiting line is slow with hundreds in it
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        timeout = httpx.Timeout(config.timeout_s, connect=5.0, pool=None)
        self._http = httpx.AsyncClient(
            base_url=config.url,
            headers={"content-type": "application/json"},
            auth=Bearer(config.api_key),
            verify=verify(config),
            limits=limits,
            timeout=timeout,
        )

    async def generate(self, request: Request) -> tuple[Sample, ...]:
        """`request.n` samples in index order. At most `concurrency` requests are under way, the others wait in line.
        Retries what may pass (connection lost, 429, 5xx) for `retry_s` seconds from the first failure on. An answer
        that a swap did not wait for is asked for again, of the new weights, however often that happens.

        Raises GatewayUnreachable after that, RolloutError for a refusal or an answer that breaks the contract.
        """
        payload = orjson.dumps(request.body())
        async with self._room:
            return _samples(await self._answer(payload), request.n)

    async def _answer(self, payload: bytes) -> bytes:
        deadline, delay = math.inf, FIRST_DELAY_S
        while True:
            wait = delay
            try:
                response = await self._http.post("/generate", content=payload)
                if response.status_code == 200:
                    return response.content
                problem = f"HTTP {response.status_code}: {_error(response.content, 'message')}"
                if response.status_code == 409 and _error(response.content, "code") == "weights_changed":
                    await asyncio.sleep(FIRST_DELAY_S)
                    continue
                if response.status_code not in RETRYABLE:
                    raise RolloutError(f"the gateway refused a rollout ({problem}).", status=response.status_code)
                wait = _retry_after(response, delay)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            deadline = min(deadline, time.monotonic() + self._config.retry_s)
            if time.monotonic() + wait > deadline:
                raise GatewayUnreachable(
                    f"no rollout from {self._config.url} within {self._config.retry_s:g} s; last: {problem}. "
                    "Start the server with `hotswap up`, or set gateway.url."
                )
            await asyncio.sleep(wait)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def close(self) -> None:
        await self._http.aclose()


def _samples(content: bytes, n: int) -> tuple[Sample, ...]:
    """Parse an answer. Raises RolloutError when it is not the contract's."""
    try:
        choices = sorted(orjson.loads(content)["choices"], key=lambda choice: choice["index"])
        samples = tuple(
            Sample(
                token_ids=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]),
                finish_reason=choice["finish_reason"],
                versions=tuple(VersionSpan(v["version"], v["start"], v["end"]) for v in choice["weight_versions"]),
            )
            for choice in choices
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RolloutError(
            f"/generate answered something else than its contract ({error!r}). Is this hotswap?"
        ) from None
    if len(samples) != n or any(len(s.token_ids) != len(s.logprobs) for s in samples):
        raise RolloutError("/generate left out samples or log-probs. Is the server of the same version?")
    return samples


def _error(content: bytes, part: str) -> str:
    """The `message` or `code` of an error's body; of any other body its beginning."""
    try:
        return str(orjson.loads(content)["error"][part])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _retry_after(response: httpx.Response, default: float) -> float:
    try:
        return min(max(float(response.headers["retry-after"]), default), 30.0)
    except (KeyError, ValueError):
        return default
