"""Rollouts through the gateway's `POST /generate`: token ids in; token ids, log-probs and weight versions out.

Runs on rank 0 only. A sample's rewards are computed as soon as its prompt's answer is there, while others still decode.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson

from trainer.config import GatewayConfig, RolloutConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, GatewayUnreachable, RolloutError
from trainer.rewards.base import Score, Scorer

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a sample were written by weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One answer. `logprobs` are the engine's, of the chosen tokens: the behaviour policy."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class Group:
    """All samples of one prompt with their scores."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]

    @property
    def rewards(self) -> list[float]:
        return [score.total for score in self.scores]


@dataclass(frozen=True)
class Request:
    """What is asked of `/generate` for one prompt."""

    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

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
        return body if self.seed is None else body | {"seed": self.seed}


class GenerateClient:
    """The gateway's `/generate`, with retries. Bound to the event loop it is first used on."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        headers = {"content-type": "application/json"}
        if config.api_key_env is not None:
            if config.api_key_env not in os.environ:
                raise ConfigError("gateway.api_key_env", f"{config.api_key_env} is not set", "Export it")
            headers["authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        timeout = httpx.Timeout(config.timeout_s, connect=5.0, pool=None)
        self._http = httpx.AsyncClient(base_url=config.url, headers=headers, limits=limits, timeout=timeout)

    async def generate(self, request: Request) -> tuple[Sample, ...]:
        """`request.n` samples in index order. Retries what may pass (connection lost, 429, 5xx) for `retry_s` seconds.

        Raises GatewayUnreachable after that, RolloutError for a refusal or an answer that breaks the contract.
        """
        payload = orjson.dumps(request.body())
        deadline, delay = time.monotonic() + self._config.retry_s, FIRST_DELAY_S
        while True:
            wait = delay
            try:
                response = await self._http.post("/generate", content=payload)
                if response.status_code == 200:
                    return _samples(response.content, request.n)
                problem = f"HTTP {response.status_code}: {_message(response.content)}"
                if response.status_code not in RETRYABLE:
                    raise RolloutError(f"the gateway refused a rollout ({problem}).", status=response.status_code)
                wait = _retry_after(response, delay)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() + wait > deadline:
                raise GatewayUnreachable(
                    f"no rollout from {self._config.url} within {self._config.retry_s:g} s; last: {problem}. "
                    "Start the server with `hotswap up`, or set gateway.url."
                )
            await asyncio.sleep(wait)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def close(self) -> None:
        await self._http.aclose()


class Rollouts:
    """Blocking access to samples and their scores, for the training loop. Close it, or use it as a context."""

    def __init__(
        self, gateway: GatewayConfig, rollout: RolloutConfig, scorer: Scorer, tokenizer: Tokenizer, seed: int
    ) -> None:
        self._rollout, self._scorer, self._tokenizer, self._seed = rollout, scorer, tokenizer, seed
        self._client = GenerateClient(gateway)
        self._runner = asyncio.Runner()  # one loop for all steps, so that connections stay open

    def sample(self, records: Sequence[Record], n: int, step: int) -> list[Group]:
        """`n` scored samples for each record, at temperature 1, in the records' order."""
        seeds = self._seeds(len(records), step)
        return self._runner.run(self._groups(records, n, self._rollout.temperature, seeds))

    def greedy(self, records: Sequence[Record]) -> list[Group]:
        """The most probable answer to each record, scored."""
        return self._runner.run(self._groups(records, 1, 0.0, [None] * len(records)))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _groups(
        self, records: Sequence[Record], n: int, temperature: float, seeds: Sequence[int | None]
    ) -> list[Group]:
        try:
            async with asyncio.TaskGroup() as tasks:
                pairs = zip(records, seeds, strict=True)
                running = [tasks.create_task(self._group(record, n, temperature, seed)) for record, seed in pairs]
        except ExceptionGroup as errors:  # one failure cancels the rest; it is what the user needs to see
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    async def _group(self, record: Record, n: int, temperature: float, seed: int | None) -> Group:
        c = self._rollout
        request = Request(record.prompt_ids, n, c.max_tokens, temperature, c.stop_token_ids, seed)
        samples = await self._client.generate(request)
        texts = [self._tokenizer.decode(sample.token_ids) for sample in samples]
        scores = [await self._scorer(record.prompt, text, record.answer) for text in texts]
        return Group(record.prompt_ids, samples, tuple(scores))

    def _seeds(self, count: int, step: int) -> list[int | None]:
        if not self._rollout.seeded:
            return [None] * count
        rng = np.random.default_rng([self._seed, step])
        return [int(s) for s in rng.integers(0, 2**31 - 1024, count)]  # engines add the sample's index


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


def _message(content: bytes) -> str:
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _retry_after(response: httpx.Response, default: float) -> float:
    try:
        return min(max(float(response.headers["retry-after"]), default), 30.0)
    except (KeyError, ValueError):
        return default
