"""Users' rewards, good and bad."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from trainer.rewards import SampleGroup


def length(prompt: str, answer: str, expected: str) -> float:
    print("a reward may print")
    return float(len(answer))


async def asynchronous(prompt: str, answer: str, expected: str) -> float:
    await asyncio.sleep(0.2 if answer == "slow" else 0)
    return float(prompt == "3+4=")


def of_extra(prompt: str, answer: str, expected: str, extra: dict[str, Any]) -> float:
    return float(extra["bonus"])


def of_some(prompt: str, answer: str, expected: str) -> float | None:
    """Does not apply to an answer in letters."""
    return None if answer.isalpha() else 1.0


def misbehaves(prompt: str, answer: str, expected: str) -> float:
    """Does what the answer says."""
    if answer == "raise":
        raise KeyError("missing")
    if answer.startswith("hang"):  # "hang FILE": once the file is there
        if file := answer.removeprefix("hang").lstrip():
            Path(file).touch()
        time.sleep(600)
    if answer == "no number":
        return float("nan")
    if answer == "loop":
        while True:
            pass
    if answer == "die":
        os._exit(3)
    if answer.startswith("leave "):  # a process that leaves the group, and then hangs itself
        if os.fork() == 0:
            os.setsid()
            Path(answer[6:]).write_text(str(os.getpid()))
        time.sleep(600)
    if answer == "close":
        os.close(0)
        os.close(3) if Path("/proc/self/fd/3").exists() else None
    return 1.0


async def blocks_the_loop(prompt: str, answer: str, expected: str) -> float:
    if answer == "block":
        time.sleep(600)  # noqa: ASYNC251 - the fault
    await asyncio.sleep(0.05)
    return 1.0


async def sleeps(prompt: str, answer: str, expected: str) -> float:
    await asyncio.sleep(600)
    return 1.0


def scaled(prompt: str, answer: str, expected: str, extra: dict[str, Any]) -> float:
    """Some number of the answer, as large as the record says: a verifier that is wrong by orders of magnitude."""
    return float(extra["scale"]) * sum(map(ord, answer)) / 1000


class Large:
    """A reward that holds a model."""

    nbytes = 8 << 20

    def __init__(self) -> None:
        self.weights = os.urandom(self.nbytes)

    def __call__(self, prompt: str, answer: str, expected: str) -> float:
        return self.weights[0] * 0.0 + sum(map(ord, answer)) / 1000


large = Large()


class Together:
    """Values an answer by how many were beside it; one answer spoils, blocks or ends it for all."""

    batch = 4

    def __call__(self, prompt: str, answer: str, expected: str) -> float:
        misbehaves(prompt, answer, expected)
        return 1.0

    def many(self, asked: list[tuple[str, str, str, dict[str, Any]]]) -> list[float]:
        for prompt, answer, expected, _ in asked:
            misbehaves(prompt, answer, expected)
        return [float(len(asked))] * len(asked)


together = Together()


def ranked(group: SampleGroup) -> list[float]:
    """Where each sample stands by length among its siblings; misbehaves as the first answer says."""
    first = group.samples[0].answer
    if first == "one number":
        return 1.0  # type: ignore[return-value]
    if first == "nothing":
        return [None, 2.0]  # type: ignore[list-item]
    if first == "too few":
        return [1.0]
    if first == "infinite":
        return [float("inf")] * len(group.samples)
    misbehaves(group.prompt, first, group.expected)
    by_length = sorted(sample.tokens for sample in group.samples)
    return [float(by_length.index(sample.tokens)) for sample in group.samples]


async def seen(group: SampleGroup) -> list[float]:
    """1 for each sample, if everything about the group has come."""
    await asyncio.sleep(0)
    one, two = group.samples
    assert (group.prompt, group.expected, group.extra) == ("3+4=", "07", {"bonus": 0.5})
    assert (one.answer, one.tokens, one.truncated) == ("07", 2, False)
    assert (two.answer, two.tokens, two.truncated) == ("8", 1, True)
    assert [turn["content"] for turn in one.turns] == ["07"]
    assert (dict(one.scores), one.total) == ({"exact_match": 1.0}, 2.0)
    assert (dict(two.scores), two.total) == ({"exact_match": 0.0}, 0.0)
    return [1.0, 1.0]
