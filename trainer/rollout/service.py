"""Samples and scores prompts on a thread of its own, so that they decode while the training thread computes.

A sample goes to its rewards the moment it is complete, while the others of its prompt still decode.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from trainer.config import GatewayConfig, RolloutConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.rewards.base import RewardRequest, Score, Scorer
from trainer.rollout.client import GenerateClient, Request
from trainer.rollout.samples import Group, Sample

T = TypeVar("T")


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
        """When all tasks have seen that they are cancelled, their connections are closed."""
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
