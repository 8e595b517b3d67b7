"""One interface for every reward."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

from trainer.errors import RewardError


class Reward(Protocol):
    """Scores one answer. May be a coroutine; must not block the loop for long. Called once per sample."""

    def __call__(self, prompt: str, answer: str, expected: str, /) -> float | Awaitable[float]: ...


@dataclass(frozen=True)
class Score:
    """Weighted sum, and each reward's own (unweighted) value by name. `full` when every reward gave its best, 1."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return all(part >= 1.0 for part in self.parts.values())


class Scorer:
    """A weighted sum of rewards."""

    def __init__(self, rewards: dict[str, tuple[float, Reward]]) -> None:
        self._rewards = rewards

    async def __call__(self, prompt: str, answer: str, expected: str) -> Score:
        """Raises RewardError when a reward raises or returns no finite number."""
        parts = {}
        for name, (_, reward) in self._rewards.items():
            try:
                value = reward(prompt, answer, expected)
                parts[name] = float(await value if isinstance(value, Awaitable) else value)
            except Exception as error:
                raise RewardError(f"reward {name} raised {error!r} for the answer {answer!r}. Correct it.") from error
            if not math.isfinite(parts[name]):
                raise RewardError(
                    f"reward {name} returned {parts[name]} for the answer {answer!r}. Return a finite number."
                )
        return Score(sum(self._rewards[name][0] * value for name, value in parts.items()), parts)
