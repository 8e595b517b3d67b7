"""The task of every contender: a small random model on sums of three digits, whose answers have long-tailed lengths.

The model has 16 tokens and random weights, so an answer ends at each token with a chance of about one in sixteen: a
mean of 16 tokens, and some that run into the limit, as a batch of real answers has. The learning rate is too small to
change that within the run. The slow reward stands for a verifier on another machine: 200 ms for each answer, any number
at the same time.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.demo.recipe import LARGEST_DIGIT

SLOW_S = 0.2
REWARDS = ("instant", "slow")
RANK = 16  # of adapters; the trainer's default


@dataclass(frozen=True)
class Task:
    """Sizes. `warm_up` steps of `steps` are not counted. `rank` is that of the adapter that is trained; 0: all weights
    are."""

    hidden: int = 384
    layers: int = 4
    prompts: int = 16
    samples: int = 8
    max_tokens: int = 64
    steps: int = 14
    warm_up: int = 4
    lr: float = 1e-6
    seed: int = 0
    rank: int = 0

    def write_model(self, directory: Path) -> None:
        """The same bytes for everybody."""
        from trainer.tiny_model import write_tiny_model

        write_tiny_model(
            directory,
            seed=self.seed,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
        )

    def describe(self) -> dict[str, Any]:
        return asdict(self)


SMALL = Task(hidden=64, layers=2, prompts=4, samples=4, max_tokens=16, steps=4, warm_up=1)
DATA = {"kind": "arithmetic", "operands": 3, "largest": LARGEST_DIGIT}


def value(answer: str, expected: str) -> float:
    """The worth of an answer: the share of the expected sum's digits that it begins with."""
    hits = sum(a == b for a, b in zip(answer, expected, strict=False))
    return hits / max(len(expected), 1)


async def instant(prompt: str, answer: str, expected: str) -> float:
    """The value, at once."""
    return value(answer, expected)


async def slow(prompt: str, answer: str, expected: str) -> float:
    """The value, after 200 ms."""
    await asyncio.sleep(SLOW_S)
    return value(answer, expected)
