"""One interface for every reward, and their weighted sum.

All rewards run on a thread of their own with its own event loop: they make progress while the training thread computes,
and whoever awaits a score may do so from any loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainer.errors import RewardError, RewardTimeout

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RewardRequest:
    """A trajectory to score: the prompt's and the last answer's text, the record's answer, and the record's `extra`.

    `turns` are all that was written after the prompt, as chat messages (`assistant`: the policy); `tokens` counts the
    policy's tokens, and `truncated` says that the trajectory was cut off.
    """

    prompt: str
    answer: str
    expected: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[Mapping[str, Any], ...] = ()
    tokens: int = 0
    truncated: bool = False


@dataclass(frozen=True)
class Score:
    """Weighted sum, each reward's own (unweighted) value by name, and why a reward has none of its own (`failures`: its
    part is the configured `on_failure` then, if there is one). `missing` are those without a value: the sum is not to
    be trained on. `full` when every reward gave its best, 1."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        return [name for name in self.failures if name not in self.parts]

    def plus(self, name: str, value: float, weight: float) -> Score:
        """With one more part."""
        return Score(self.total + weight * value, {**self.parts, name: value}, self.failures)

    @property
    def full(self) -> bool:
        return not self.failures and all(part >= 1.0 for part in self.parts.values())


class Reward(ABC):
    """Scores one answer. Runs on the rewards' event loop, so it must not block: what may block or die belongs into a
    worker (trainer/rewards/pool.py)."""

    nbytes: int = 0
    """Of host memory, once open: what `close` gives back, and another `open` takes again. 0: too little to count."""

    async def open(self) -> None:  # noqa: B027 - most have nothing to make ready
        """Make ready. Raises ConfigError or SandboxUnavailable for what the user must correct."""

    @abstractmethod
    async def __call__(self, request: RewardRequest, /) -> float:
        """The answer's value. Anything raised is counted, and gives the configured `on_failure`."""

    async def close(self) -> None:  # noqa: B027
        """Free what `open` took."""


@dataclass(frozen=True)
class Weighted:
    """A reward in a sum. `deadline_s` bounds what a sample waits for it, queueing included."""

    reward: Reward
    weight: float = 1.0
    on_failure: float | None = None
    deadline_s: float = 120.0


@dataclass
class _Tally:
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


class Scorer:
    """A weighted sum of rewards, evaluated at the same time. `open` it before use; close it at the end."""

    def __init__(self, rewards: Mapping[str, Weighted]) -> None:
        self._rewards = dict(rewards)
        self._loop = LoopThread()
        self._lock = threading.Lock()
        self._tallies = {name: _Tally() for name in self._rewards}
        self._warned: set[str] = set()

    def open(self) -> Scorer:
        """Make all rewards ready; raises what the first that cannot be raises, having closed the others."""
        try:
            self._loop.run(self._all(weighted.reward.open() for weighted in self._rewards.values())).result()
        except BaseException:
            self.close()
            raise
        return self

    async def __call__(self, request: RewardRequest) -> Score:
        """Never raises for a reward that fails: see `Score.failures`."""
        return await asyncio.wrap_future(self._loop.run(self._score(request)))

    def stats(self) -> dict[str, float]:
        """Since the last call, by reward: `reward_time_ms/NAME` (mean of an evaluation, waiting included) and
        `reward_failures/NAME` (count)."""
        with self._lock:
            tallies, self._tallies = self._tallies, {name: _Tally() for name in self._rewards}
        result = {}
        for name, tally in tallies.items():
            if tally.calls:
                result[f"reward_time_ms/{name}"] = round(tally.seconds * 1e3 / tally.calls, 3)
            result[f"reward_failures/{name}"] = float(tally.failures)
        return result

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        if self._loop.alive:
            self._loop.run(self._all(weighted.reward.close() for weighted in self._rewards.values())).result()
            self._loop.close()

    @property
    def nbytes(self) -> int:
        """What rewards that hold models hold of the host's memory while they are awake."""
        return sum(weighted.reward.nbytes for weighted in self._rewards.values())

    def rest(self) -> None:
        """Give up the models, when nothing is being scored. Until `wake`, rewards that hold one fail."""
        self._loop.run(self._all(reward.close() for reward in self._models())).result()

    def wake(self) -> None:
        """Have them again. Raises as `open` does."""
        self._loop.run(self._all(reward.open() for reward in self._models())).result()

    def _models(self) -> list[Reward]:
        return [weighted.reward for weighted in self._rewards.values() if weighted.reward.nbytes]

    async def _all(self, changes: Iterable[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*changes)

    async def _score(self, request: RewardRequest) -> Score:
        names = list(self._rewards)
        results = await asyncio.gather(*(self._evaluate(name, request) for name in names))
        parts = {name: value for name, (value, _) in zip(names, results, strict=True) if value is not None}
        failures = {name: why for name, (_, why) in zip(names, results, strict=True) if why}
        return Score(sum(self._rewards[name].weight * value for name, value in parts.items()), parts, failures)

    async def _evaluate(self, name: str, request: RewardRequest) -> tuple[float | None, str]:
        """The reward's value and '', or its `on_failure` and the reason."""
        weighted, began, why = self._rewards[name], time.perf_counter(), ""
        value: float | None
        try:
            value = await _bounded(weighted, request)
        except Exception as error:
            why = str(error) if isinstance(error, RewardError) else repr(error)
            value = weighted.on_failure
        self._count(name, time.perf_counter() - began, why)
        return value, why

    def _count(self, name: str, seconds: float, why: str) -> None:
        with self._lock:
            tally = self._tallies[name]
            tally.calls += 1
            tally.seconds += seconds
            tally.failures += bool(why)
        if why and name not in self._warned:  # the count goes to the metrics; the log gets the first
            self._warned.add(name)
            log.warning("reward %s failed (counted in reward_failures/%s from now on): %s", name, name, why)


async def _bounded(weighted: Weighted, request: RewardRequest) -> float:
    try:
        async with asyncio.timeout(weighted.deadline_s):
            value = float(await weighted.reward(request))
    except TimeoutError:
        raise RewardTimeout(
            f"no value within {weighted.deadline_s:g} s. Raise deadline_s or workers, or make the reward faster."
        ) from None
    if not math.isfinite(value):
        raise RewardError(f"it returned {value}. Return a finite number.")
    return value


class LoopThread:
    """An event loop on a daemon thread, started when first used."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._thread is not None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise RewardError("the scorer is closed. Build a new one.")
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._thread = None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
