"""Rollouts through the gateway: prompts in; samples, log-probs, weight versions and scores out. On rank 0 only.

`Rollouts` samples and scores on a thread of its own, so that prompts decode while the training thread computes. A
sample goes to its rewards the moment it is complete, while the others of its prompt still decode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx
import numpy as np
import orjson

from trainer.config import GatewayConfig, RolloutConfig
from trainer.connection import Bearer, verify
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import GatewayUnreachable, RolloutError
from trainer.rewards.scorer import RewardRequest, Score, Scorer
from trainer.staleness import StepsOfVersions

T = TypeVar("T")
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a sample were written by weight version `version`, the weights after `step` optimizer
    steps (as far as the trainer knows: see `Group.dated`)."""

    version: int
    start: int
    end: int
    step: int = 0


@dataclass(frozen=True)
class Sample:
    """One answer. `logprobs` are the engine's, of the chosen tokens: the behaviour policy."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]

    @property
    def oldest(self) -> int | None:
        """Steps in the oldest weights that wrote one of its tokens; None if it has none, or nobody said."""
        return min((span.step for span in self.versions if span.end > span.start), default=None)

    def lags(self, step: int) -> list[float]:
        """For each token, how many optimizer steps `step` is ahead of the weights that wrote it. Tokens that no span
        covers, and those of weights that are ahead themselves (training was rolled back), count as current."""
        lags = [0.0] * len(self.token_ids)
        for span in self.versions:
            lag = float(max(step - span.step, 0))
            lags[span.start : span.end] = [lag] * len(lags[span.start : span.end])
        return lags


@dataclass(frozen=True)
class Group:
    """All samples of one prompt with their scores."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]

    def dated(self, steps: StepsOfVersions) -> Group:
        """The group with the optimizer steps in the versions that wrote it."""
        spans = [tuple(replace(span, step=steps[span.version]) for span in s.versions) for s in self.samples]
        samples = [replace(s, versions=found) for s, found in zip(self.samples, spans, strict=True)]
        return replace(self, samples=tuple(samples))

    @property
    def rewards(self) -> list[float]:
        return [score.total for score in self.scores]

    @property
    def oldest(self) -> int | None:
        """Steps in the oldest weights that wrote a token of the group."""
        known = [sample.oldest for sample in self.samples]
        return min((step for step in known if step is not None), default=None)


@dataclass
class _Times:
    samples: int = 0
    generate_s: float = 0.0
    score_s: float = 0.0


class Rollouts:
    """The gateway's `/generate` and the rewards behind it. Close it, or use it as a context."""

    def __init__(
        self, gateway: GatewayConfig, rollout: RolloutConfig, scorer: Scorer, tokenizer: Tokenizer, seed: int
    ) -> None:
        self._rollout, self._scorer, self._tokenizer, self._seed = rollout, scorer, tokenizer, seed
        self._client = GenerateClient(gateway)
        self._times, self._tasks = _Times(), set[Future[Any]]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def submit(self, record: Record, n: int, number: int) -> Future[Group]:
        """Begin to sample and score `n` answers at temperature 1. `number` is the record's place in the run's order:
        with `rollout.seeded` it decides the samples. The future raises RolloutError."""
        c = self._rollout
        request = Request(record.prompt_ids, n, c.max_tokens, c.temperature, c.stop_token_ids, self._seed_of(number))
        return self._start(self._group(record, replace(request, on_swap=c.on_swap)))

    def greedy(self, records: Sequence[Record]) -> list[Group]:
        """The most probable answer to each record, scored."""
        c = self._rollout
        requests = [Request(r.prompt_ids, 1, c.max_tokens, 0.0, c.stop_token_ids) for r in records]
        pairs = zip(records, requests, strict=True)
        return [future.result() for future in [self._start(self._group(*pair)) for pair in pairs]]

    def stats(self) -> dict[str, float]:
        """Since the last call: mean milliseconds from a sample's request to its last token, and from there to its
        score; and what the rewards say of themselves (`Scorer.stats`)."""
        times, self._times = self._times, _Times()
        count = max(times.samples, 1)
        return {
            "generate_ms_mean": round(times.generate_s * 1e3 / count, 3),
            "score_ms_mean": round(times.score_s * 1e3 / count, 3),
            **self._scorer.stats(),
        }

    def close(self) -> None:
        """Cancel what is in flight; the server sees its clients leave and frees their memory."""
        for future in list(self._tasks):
            future.cancel()
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._scorer.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future

    async def _leave(self) -> None:
        """Cancel all tasks and wait for them, then close their connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _group(self, record: Record, request: Request) -> Group:
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = request.split() if self._rollout.request == "sample" else [request]
                running = [tasks.create_task(self._scored(record, part)) for part in parts]
        except ExceptionGroup as errors:  # one failure cancels the rest; it is what the user needs to see
            raise errors.exceptions[0] from None
        pairs = [pair for task in running for pair in task.result()]
        return Group(record.prompt_ids, tuple(sample for sample, _ in pairs), tuple(score for _, score in pairs))

    async def _scored(self, record: Record, request: Request) -> list[tuple[Sample, Score]]:
        began = time.perf_counter()
        samples = await self._client.generate(request)
        generated = time.perf_counter()
        scores = await asyncio.gather(*(self._score(record, sample) for sample in samples))
        self._times.samples += len(samples)
        self._times.generate_s += (generated - began) * len(samples)
        self._times.score_s += (time.perf_counter() - generated) * len(samples)
        return list(zip(samples, scores, strict=True))

    async def _score(self, record: Record, sample: Sample) -> Score:
        answer = self._tokenizer.decode(sample.token_ids)
        return await self._scorer(RewardRequest(record.prompt, answer, record.answer, record.extra))

    def _seed_of(self, number: int) -> int | None:
        if not self._rollout.seeded:
            return None
        rng = np.random.default_rng([self._seed, number])
        return int(rng.integers(0, 2**31 - 1024))  # room for the sample's index, which is added to it


@dataclass(frozen=True)
class Request:
    """A request to `/generate` for one prompt. `on_swap` says what a swap in the middle of the answer does to it
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
        """Raises ConfigError when a key or certificates are missing."""
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
    """Parse an answer. Raises RolloutError when it breaks the contract."""
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


def group_to_json(group: Group) -> dict[str, Any]:
    """Lists, dictionaries, numbers and text only; floats survive exactly."""
    return dataclasses.asdict(group)


def group_from_json(data: dict[str, Any]) -> Group:
    """The inverse of `group_to_json`, also after a round trip through a file."""
    samples = tuple(_sample(sample) for sample in data["samples"])
    return Group(tuple(data["prompt_ids"]), samples, tuple(Score(**s) for s in data["scores"]))


def _sample(data: dict[str, Any]) -> Sample:
    return Sample(
        token_ids=tuple(data["token_ids"]),
        logprobs=tuple(data["logprobs"]),
        finish_reason=data["finish_reason"],
        versions=tuple(VersionSpan(**span) for span in data["versions"]),
    )
