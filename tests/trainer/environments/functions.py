"""Environments and tools for tests, some of which misbehave."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from trainer.environments import Environment, EnvironmentHost, Observation, Task


@contextlib.asynccontextmanager
async def hosting(config: Any) -> AsyncIterator[EnvironmentHost]:
    """The processes of an environment, in a test's own event loop."""
    host = EnvironmentHost(config)
    await host.open()
    try:
        yield host
    finally:
        await host.close()


class Countdown(Environment):
    """Says how many answers it still wants, and rewards each with 1. `how` makes it go wrong in the second turn, the
    first time (a file `marker` remembers it) or always."""

    def __init__(self, turns: int = 3, how: str = "", marker: str = "") -> None:
        self.turns, self.how, self.marker = turns, how, marker

    def reset(self, task: Task) -> Observation:
        self.left = self.turns
        return Observation([{"role": "user", "content": f"{task.prompt}"}])

    def step(self, answer: str) -> Any:
        self.left -= 1
        if self.how and self.left == self.turns - 2 and not os.path.exists(self.marker):
            if self.marker:
                open(self.marker, "w").close()
            return self._misbehave()
        return Observation([{"role": "user", "content": f"{self.left}+"}], reward=1.0, done=self.left == 0)

    def _misbehave(self) -> Any:
        if self.how == "raise":
            raise ZeroDivisionError
        if self.how == "hang":
            threading.Event().wait()
        if self.how == "die":
            os._exit(3)
        if self.how == "flood":
            return Observation([{"role": "user", "content": "7" * 10_000_000}], reward=1.0)
        if self.how == "no number":
            return Observation(reward=float("nan"))
        if self.how == "no text":
            return Observation([{"role": "user", "content": 5}])
        return {"nonsense": "as a dictionary"}


class Moody(Environment):
    """Begins each episode in another way."""

    started = 0

    def reset(self, task: Task) -> Observation:
        Moody.started += 1
        return Observation([{"role": "user", "content": f"{Moody.started}+{Moody.started}="}])

    def step(self, answer: str) -> Observation:
        return Observation(done=True)


class Obedient(Environment):
    """Does what the answer says."""

    def reset(self, task: Task) -> Observation:
        return Observation([{"role": "user", "content": "1+1="}])

    def step(self, answer: str) -> Observation:
        if answer == "hang":
            threading.Event().wait()
        if answer == "die":
            os._exit(3)
        return Observation(reward=1.0, done=True)


def no_environment() -> dict[str, str]:
    return {}


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


async def slow_add(a: int) -> str:
    """One more."""
    return str(a + 1)


def fails(text: str) -> str:
    """Fails."""
    raise ValueError(f"no {text}")


def floods(megabytes: int) -> str:
    """Says too much."""
    return "7" * (megabytes << 20)
