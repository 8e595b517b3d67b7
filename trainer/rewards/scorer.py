"""One interface for every reward of an answer, one for those of a prompt's whole group, and their weighted sum.

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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from trainer.errors import RewardError

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RewardRequest:
    """A trajectory to score: the prompt's and the last answer's text, the record's answer, and the record's `extra`.

    `turns` are all that was written after the prompt, as chat messages (`assistant`: the policy); `tokens` counts the
    policy's tokens, and `truncated` says that the trajectory was cut off. `messages` are the prompt's chat messages, if
    it was given as such, and `token_ids` all tokens after the prompt. `alternatives` are as right as `expected`.
    """

    prompt: str
    answer: str
    expected: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[Mapping[str, Any], ...] = ()
    tokens: int = 0
    truncated: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """Weighted sum, each reward's own (unweighted) value by name, and why a reward has none of its own (`failures`: its
    part is the configured `on_failure` then, if there is one). `missing` are those that failed without a value: the sum
    is not to be trained on. A reward in neither does not apply to the record. `relative` are the parts of group
    rewards. `full` when every other reward gave its best, 1."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    relative: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        return [name for name in self.failures if name not in self.parts]

    def plus(self, name: str, value: float, weight: float) -> Score:
        """With one more part."""
        return replace(self, total=self.total + weight * value, parts={**self.parts, name: value})

    def compared(self, name: str, value: float | None, weight: float, why: str) -> Score:
        """With the part of a group reward, and why it has none of its own ('': it has, or does not apply)."""
        score = self if value is None else self.plus(name, value, weight)
        failures = {**self.failures, name: why} if why else self.failures
        return replace(score, failures=failures, relative=(*self.relative, name))

    @property
    def full(self) -> bool:
        own = self.failures.keys() | self.parts.keys()
        return all(name not in self.failures and self.parts[name] >= 1.0 for name in own - set(self.relative))


@dataclass(frozen=True)
class Sample:
    """One of a prompt's samples as a group reward sees it: the last answer's text, all turns after the prompt as chat
    messages, the policy's tokens, whether it was cut off, the other rewards' values by name, and their weighted sum."""

    answer: str
    turns: tuple[Mapping[str, Any], ...]
    tokens: int
    truncated: bool
    scores: Mapping[str, float]
    total: float


@dataclass(frozen=True)
class SampleGroup:
    """All samples of a prompt that have a score, with the prompt's text, the record's answer and its `extra`."""

    prompt: str
    expected: str
    extra: Mapping[str, Any]
    samples: tuple[Sample, ...]

    @staticmethod
    def of(requests: Sequence[RewardRequest], scores: Sequence[Score]) -> SampleGroup:
        """Of one prompt's trajectories, at least one."""
        pairs = zip(requests, scores, strict=True)
        samples = [Sample(r.answer, r.turns, r.tokens, r.truncated, s.parts, s.total) for r, s in pairs]
        return SampleGroup(requests[0].prompt, requests[0].expected, requests[0].extra, tuple(samples))


class _Evaluator:
    """Runs on the rewards' event loop, so it must not block: what may block or die belongs into a worker
    (trainer/rewards/pool.py)."""

    nbytes: int = 0
    """Of host memory, once open: what `close` gives back, and another `open` takes again. 0: too little to count."""

    async def open(self) -> None:
        """Make ready. Raises ConfigError or RewardError for what the user must correct."""

    async def close(self) -> None:
        """Free what `open` took."""


class Reward(_Evaluator, ABC):
    """Scores one answer."""

    compares: bool = False
    """Whether it compares with the record's answer. Of several, the one that the answer fits best counts then."""

    @abstractmethod
    async def __call__(self, request: RewardRequest, /) -> float | None:
        """The answer's value; None if the reward does not apply to the record. Anything raised is counted, and gives
        the configured `on_failure`."""


class ComparingReward(_Evaluator, ABC):
    """Scores all samples of a prompt together."""

    @abstractmethod
    async def __call__(self, group: SampleGroup, /) -> list[float | None]:
        """A value for each sample, None where the reward does not apply. Anything raised is counted, and gives all of
        them the configured `on_failure`."""


@dataclass(frozen=True)
class Weighted:
    """A reward in a sum. `deadline_s` bounds what a sample waits for it, queueing included."""

    reward: Reward | ComparingReward
    weight: float = 1.0
    on_failure: float | None = None
    deadline_s: float = 120.0
    where: Mapping[str, Any] = field(default_factory=dict)

    def meant_for(self, extra: Mapping[str, Any]) -> bool:
        """Whether each column of `where` has its value, or one of its list. Raises RewardError for a record that lacks
        a column: a misspelt name would turn the reward off in silence."""
        for column, wanted in self.where.items():
            found: Any = extra.get(column, extra)
            for key in column.split(".") if found is extra else ():
                if not isinstance(found, Mapping) or key not in found:
                    raise RewardError(f"the record has no column {column!r} (where). Name it in data.extra_keys.")
                found = found[key]
            if found not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        return True


@dataclass
class _Tally:
    calls: int = 0
    failures: int = 0
    applied: float = 0.0
    seconds: float = 0.0


class Scorer:
    """A weighted sum of rewards, evaluated at the same time. `open` it before use; close it at the end."""

    def __init__(self, rewards: Mapping[str, Weighted]) -> None:
        self._rewards = dict(rewards)
        self._compare = [name for name, weighted in rewards.items() if isinstance(weighted.reward, ComparingReward)]
        self._loop = LoopThread()
        self._lock = threading.Lock()
        self._tallies = {name: _Tally() for name in self._rewards}
        self._warned: set[str] = set()
        self._partial: set[str] = set()  # the rewards that did not apply to some record

    @property
    def alone(self) -> bool:
        """Whether there are rewards of single answers."""
        return len(self._compare) < len(self._rewards)

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

    async def compared(self, requests: Sequence[RewardRequest], scores: Sequence[Score]) -> list[Score]:
        """The scores of a prompt's samples, with the parts of the group rewards. Never raises for one that fails."""
        if not self._compare or not requests:
            return list(scores)
        return await asyncio.wrap_future(self._loop.run(self._compared(SampleGroup.of(requests, scores), scores)))

    def stats(self) -> dict[str, float]:
        """Since the last call, by reward: `reward_time_ms/NAME` (mean of an evaluation, waiting included),
        `reward_failures/NAME` (count), and `reward_applied/NAME` (the share of evaluations that gave a value or
        failed), of a reward that has ever not applied."""
        with self._lock:
            tallies, self._tallies = self._tallies, {name: _Tally() for name in self._rewards}
        result = {}
        for name, tally in tallies.items():
            if tally.calls:
                result[f"reward_time_ms/{name}"] = round(tally.seconds * 1e3 / tally.calls, 3)
            if tally.calls and name in self._partial:
                result[f"reward_applied/{name}"] = round(tally.applied / tally.calls, 6)
            result[f"reward_failures/{name}"] = float(tally.failures)
        return result

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        if self._loop.alive:
            self._loop.run(self._all(weighted.reward.close() for weighted in self._rewards.values())).result()
            self._loop.close()

    @property
    def nbytes(self) -> int:
        """The bytes of the host's memory that rewards with models hold while they are awake."""
        return sum(weighted.reward.nbytes for weighted in self._rewards.values())

    def rest(self) -> None:
        """Give up the models, when nothing is being scored. Until `wake`, rewards that hold one fail."""
        self._loop.run(self._all(reward.close() for reward in self._models())).result()

    def wake(self) -> None:
        """Have them again. Raises as `open` does."""
        self._loop.run(self._all(reward.open() for reward in self._models())).result()

    def _models(self) -> list[Reward | ComparingReward]:
        return [weighted.reward for weighted in self._rewards.values() if weighted.reward.nbytes]

    async def _all(self, changes: Iterable[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*changes)

    async def _score(self, request: RewardRequest) -> Score:
        asked = {name: w.reward for name, w in self._rewards.items() if isinstance(w.reward, Reward)}
        results = await asyncio.gather(*(self._value(name, reward, request) for name, reward in asked.items()))
        parts = {name: value for name, (value, _) in zip(asked, results, strict=True) if value is not None}
        failures = {name: why for name, (_, why) in zip(asked, results, strict=True) if why}
        return Score(sum(self._rewards[name].weight * value for name, value in parts.items()), parts, failures)

    async def _value(self, name: str, reward: Reward, request: RewardRequest) -> tuple[float | None, str]:
        async def valued() -> list[float | None]:
            if not self._rewards[name].meant_for(request.extra):
                return [None]
            best = _finite(await reward(request))
            for other in request.alternatives if reward.compares else ():
                if best is not None and best < 1:
                    best = max(best, _finite(await reward(replace(request, expected=other))) or 0.0)
            return [best]

        (value,), why = await self._evaluate(name, valued, 1)
        return value, why

    async def _compared(self, group: SampleGroup, scores: Sequence[Score]) -> list[Score]:
        results = await asyncio.gather(*(self._values(name, group) for name in self._compare))
        found = list(scores)
        for name, (values, why) in zip(self._compare, results, strict=True):
            weight = self._rewards[name].weight
            found = [score.compared(name, value, weight, why) for score, value in zip(found, values, strict=True)]
        return found

    async def _values(self, name: str, group: SampleGroup) -> tuple[Sequence[float | None], str]:
        async def valued() -> list[float | None]:
            reward = self._rewards[name].reward
            assert isinstance(reward, ComparingReward)
            if not self._rewards[name].meant_for(group.extra):
                return [None] * len(group.samples)
            values = [_finite(value) for value in await reward(group)]
            if len(values) != len(group.samples):
                raise RewardError(f"it returned {len(values)} numbers for {len(group.samples)} samples.")
            return values

        return await self._evaluate(name, valued, len(group.samples))

    async def _evaluate(
        self, name: str, valued: Callable[[], Awaitable[list[float | None]]], count: int
    ) -> tuple[list[float | None], str]:
        """The `count` values and '', or as many of `on_failure` and the reason."""
        began, why = time.perf_counter(), ""
        values = [self._rewards[name].on_failure] * count
        limit = self._rewards[name].deadline_s
        try:
            async with asyncio.timeout(limit):
                values = await valued()
        except TimeoutError:
            why = f"no value within {limit:g} s. Raise deadline_s or workers, or make the reward faster."
        except Exception as error:
            why = str(error) if isinstance(error, RewardError) else repr(error)
        self._count(name, time.perf_counter() - began, why, 1.0 if why else 1 - values.count(None) / count)
        return values, why

    def _count(self, name: str, seconds: float, why: str, applied: float) -> None:
        with self._lock:
            tally = self._tallies[name]
            tally.calls += 1
            tally.seconds += seconds
            tally.failures += bool(why)
            tally.applied += applied
        if why and name not in self._warned:  # the count goes to the metrics; the log gets the first
            self._warned.add(name)
            log.warning("reward %s failed (counted in reward_failures/%s from now on): %s", name, name, why)
        if applied < 1 and name not in self._partial:
            self._partial.add(name)
            log.info("reward %s does not apply to every record: reward_applied/%s is the share", name, name)


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value := float(value)):
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
