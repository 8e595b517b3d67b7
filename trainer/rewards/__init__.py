"""Rewards by the kind of their config entry."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import (
    CallableReward,
    ClassifierReward,
    CodeReward,
    ExactMatchReward,
    FormatReward,
    GatewayConfig,
    GroupReward,
    GymReward,
    JudgeReward,
    MathReward,
    RegexReward,
    RewardConfig,
)
from trainer.errors import ConfigError, RewardError
from trainer.rewards.pool import WorkerPool
from trainer.rewards.rules import ExactMatch, Format
from trainer.rewards.scorer import ComparingReward, Reward, RewardRequest, Sample, SampleGroup, Score, Scorer, Weighted

__all__ = [
    "ComparingReward",
    "Reward",
    "RewardRequest",
    "Sample",
    "SampleGroup",
    "Score",
    "Scorer",
    "Weighted",
    "build_rewards",
    "build_scorer",
]


def build_scorer(configs: Sequence[RewardConfig], gateway: GatewayConfig | None = None) -> Scorer:
    """The weighted sum a config names, its workers started. Raises ConfigError, RewardError."""
    return Scorer(build_rewards(configs, gateway)).open()


def build_rewards(configs: Sequence[RewardConfig], gateway: GatewayConfig | None = None) -> dict[str, Weighted]:
    """The rewards by name, not yet open. A kind used twice gets a number: `regex`, `regex_2`. `gateway` is where a
    judge answers that names no server. Raises ConfigError."""
    rewards: dict[str, Weighted] = {}
    for config in configs:
        same = sum(name == config.kind or name.startswith(f"{config.kind}_") for name in rewards)
        name = config.name or (config.kind if not same else f"{config.kind}_{same + 1}")
        if name in rewards:
            raise ConfigError("rewards.name", f"{name} is given twice", "Give every reward its own name")
        options = (config.weight, config.on_failure, config.deadline_s, config.where)
        rewards[name] = Weighted(_build(config, gateway), *options)
    return rewards


class InWorker(Reward):
    """A reward that may hang or die: it runs in processes that can be killed (pool.py)."""

    def __init__(self, config: RewardConfig, job: Mapping[str, Any]) -> None:
        self._pool = WorkerPool({"job": config.kind, **job}, config.workers, config.timeout_s)
        self._rule = isinstance(config, MathReward | RegexReward | GymReward)
        self.compares = isinstance(config, MathReward | RegexReward)

    async def open(self) -> None:
        await self._pool.open()
        self.nbytes = self._pool.nbytes

    async def __call__(self, request: RewardRequest, /) -> float | None:
        try:
            asked = vars(request)
            if self._rule:
                asked = {name: asked[name] for name in ("prompt", "answer", "expected", "extra")}
            value: float | None = await self._pool.ask(asked)
            return value
        except RewardError as error:
            if self._rule and error.code == "timeout":
                return 0.0  # the answer is too much for it, which is the answer's fault
            raise

    async def close(self) -> None:
        await self._pool.close()


class ComparingInWorker(ComparingReward):
    """The user's function of a whole group, in a process that can be killed."""

    def __init__(self, config: GroupReward) -> None:
        job = {"job": config.kind, "target": config.target, "concurrency": config.concurrency}
        self._pool = WorkerPool(job, config.workers, config.timeout_s)

    async def open(self) -> None:
        await self._pool.open()
        self.nbytes = self._pool.nbytes

    async def __call__(self, group: SampleGroup, /) -> list[float | None]:
        values = await self._pool.ask({"group": dataclasses.asdict(group)})
        if not isinstance(values, list):
            raise RewardError(f"it returned {values!r}. Return a list with a number for each sample.")
        return values

    async def close(self) -> None:
        await self._pool.close()


def _build(config: RewardConfig, gateway: GatewayConfig | None) -> Reward | ComparingReward:
    if isinstance(config, ExactMatchReward):
        return ExactMatch()
    if isinstance(config, GroupReward):
        return ComparingInWorker(config)
    if isinstance(config, FormatReward):
        return Format(config)
    if isinstance(config, CodeReward):
        from trainer.rewards.code import Code  # each worker process imports this package, and uses neither of the two

        return Code(config)
    if isinstance(config, JudgeReward):
        from trainer.rewards.models import Judge

        return Judge(config, gateway)
    return InWorker(config, _job(config))


def _job(config: CallableReward | RegexReward | MathReward | GymReward | ClassifierReward) -> dict[str, Any]:
    if isinstance(config, CallableReward):
        return {"target": config.target, "concurrency": config.concurrency}
    if isinstance(config, RegexReward):
        try:
            re.compile(config.pattern)
        except re.error as error:
            raise ConfigError("rewards.pattern", f"{config.pattern!r}: {error}", "Correct the expression") from None
        return {"pattern": config.pattern}
    if isinstance(config, GymReward):
        return {"tag": config.tag}
    if isinstance(config, MathReward):
        return {"boxed_only": config.boxed_only, "precision": config.precision}
    options = ("path", "label", "probability", "max_tokens", "batch")
    return {name: getattr(config, name) for name in options}
