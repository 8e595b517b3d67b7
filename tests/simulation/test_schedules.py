"""The harness: a schedule repeats, a failing one is cut down and says how to repeat it; and all worlds for an hour."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import subprocess
import time
import uuid
from typing import Any, ClassVar

import pytest

from loadtest.histories.rules import Violation, require
from loadtest.simulation.clock import Clock, Loop, Stalled, determined
from loadtest.simulation.schedules import AwaitingWorld, World, commit, explore

from .swaps import Swaps
from .test_fanout import FanOut
from .test_limits import SharedLimits
from .test_releases import Releasing

WORLDS: list[type[World]] = [Swaps, FanOut, SharedLimits, Releasing]
SOAK_S = 900.0


class Sums(AwaitingWorld):
    """Fails once two more numbers were taken than given, in the time that it takes."""

    moves: ClassVar = {"give": 5, "take": 5, "rest": 20}
    steps = 100

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        self.sum = 0
        self.drawn: list[object] = []

    def give(self) -> None:
        self.sum += 1

    def take(self) -> None:
        self.sum -= 1

    def rest(self) -> None:
        self.wait(self.rng.random() * 100)
        self.drawn += [time.monotonic(), random.random(), secrets.token_hex(4), uuid.uuid4()]

    def check(self) -> None:
        require(self.sum > -2, f"{self.sum} at {self.clock.now}")


def failure(**more: Any) -> str:
    with pytest.raises(Violation) as found:
        explore(Sums, range(50), **more)
    return str(found.value)


def test_a_failing_schedule_is_cut_down_and_says_how_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEED", raising=False)
    found = failure()
    assert "2 of 100 moves are enough: take, take\n" in found
    seed = re.search(rf"SEED=({commit()}:\d+) python -m pytest '{re.escape(__file__[-34:])}::test_a_failing", found)
    assert seed is not None, found
    monkeypatch.setenv("SEED", seed[1])
    assert failure() == found
    monkeypatch.setenv("SEED", "another")
    assert "SEED=another:" in failure()
    assert "100 of 100 moves" in failure(base="always the same")


def test_the_seeds_are_those_of_the_commit() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert head.startswith(commit()) or commit() == "0"


def test_all_that_is_drawn_follows_from_the_seed() -> None:
    def drawn(seed: int) -> list[object]:
        clock = Clock()
        with determined(clock, seed):
            world = Sums(clock, random.Random(seed))
            world.rest()
            world.close()
        return world.drawn

    assert drawn(1) == drawn(1) != drawn(2)
    assert time.monotonic() != time.monotonic()


def test_what_a_task_raises_fails_the_schedule() -> None:
    async def wrong() -> None:
        raise ValueError("wrong")

    world = AwaitingWorld(Clock(), random.Random(0))
    world.start(wrong())
    world.wait(1.0)
    with pytest.raises(ValueError, match="wrong"):
        world.check()
    world.close()


def test_a_task_that_is_woken_a_moment_early_waits_for_the_rest() -> None:
    """A loop fires timers that are due within its clock's resolution."""
    clock = Clock(1000.0 - 1e-10)

    async def wait() -> None:
        for _ in range(1000):
            if clock.now >= 1000.0:
                return
            other = asyncio.ensure_future(asyncio.Event().wait())  # so that the loop has something to do
            await asyncio.wait({other}, timeout=1000.0 - clock.now)
            other.cancel()
        raise AssertionError("the clock stands still")

    with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
        runner.run(wait())


def test_a_loop_that_waits_for_nothing_says_so() -> None:
    with asyncio.Runner(loop_factory=lambda: Loop(Clock())) as runner, pytest.raises(Stalled):
        runner.run(asyncio.Event().wait())


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("world", WORLDS)
def test_no_long_schedule_fails(world: type[World]) -> None:
    end, number = time.monotonic() + SOAK_S, 1_000_000
    while time.monotonic() < end:
        explore(world, range(number, number + 20), steps=4 * world.steps)
        number += 20
    print(f"{number - 1_000_000} schedules of {world.__name__}")
