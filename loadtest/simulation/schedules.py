"""Random schedules: made from a seed, repeated from it, and cut down to the moves that a failure takes.

A `World` is one simulated system. A schedule is a list of moves, and a move is a kind and a seed: all that is drawn
while it happens follows from the two, so a schedule without some of its moves can be played as well. After each move
`check` says what must always hold. At the end `settle` ends the faults and says what must hold at rest.

The seeds of a run follow from the hash of the commit that is checked out: each commit is tried with schedules of its
own. SEED=HASH repeats those of another commit, and SEED=HASH:17 its schedule 17 alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from loadtest.histories.rules import Violation
from loadtest.simulation.clock import Clock, Loop, determined
from loadtest.simulation.store import ModelStore, Puts
from weightsync.errors import StoreError

T = TypeVar("T")
EPOCH = 1000.0
ATTEMPTS = 300  # to leave moves out of a schedule that fails


class Move(NamedTuple):
    kind: str
    seed: int


class World:
    """One simulated system. `seen` counts what happened, so that a test can tell whether anything did.

    Moves are methods without arguments, which draw from `rng`. A StoreError ends a move: it has found no store.
    """

    moves: ClassVar[Mapping[str, float]]  # weights by kind
    steps: ClassVar[int]  # moves of a schedule

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng, self.seen = clock, rng, Counter[str]()

    @classmethod
    def opening(cls, rng: random.Random) -> list[str]:
        """The kinds of the first moves."""
        return []

    def check(self) -> None:
        """Raises Violation."""

    def settle(self) -> None:
        """Raises Violation."""

    def close(self) -> None:
        """Lets go of what it holds."""


class AwaitingWorld(World):
    """One whose code awaits, which goes on while a move lets time pass."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        self._loop = Loop(clock)
        self._running: list[asyncio.Task[Any]] = []
        self._found: Violation | None = None

    def look_at_writes(self, store: ModelStore, look: Callable[[Puts], None]) -> None:
        """A Violation of `look` fails the schedule, and does not reach the code that writes."""

        def on_write(puts: Puts) -> None:
            try:
                look(puts)
            except Violation as found:
                self._found = self._found or found

        store.on_write = on_write

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """It goes on by itself; what it raises fails the schedule."""
        task = self._loop.create_task(work)
        self._running.append(task)
        return task

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    def check(self) -> None:
        if self._found is not None:
            raise self._found
        for task in [task for task in self._running if task.done()]:
            self._running.remove(task)
            if not task.cancelled():
                task.result()

    def close(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):  # a schedule that failed may have left anything
            self.do(_ended(tasks))
        self._loop.close()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def schedule(world: type[World], seed: int, steps: int) -> list[Move]:
    rng = random.Random(seed)
    kinds = world.opening(rng) + rng.choices([*world.moves], [*world.moves.values()], k=steps)
    return [Move(kind, rng.getrandbits(32)) for kind in kinds]


def play(world: type[World], seed: int, moves: Iterable[Move]) -> Counter[str]:
    """Counts of what happened. Raises Violation, and what the code that is tried raises."""
    clock, disabled = Clock(EPOCH), logging.root.manager.disable
    logging.disable()
    with determined(clock, seed):
        tried = world(clock, random.Random(seed))
        try:
            for kind, number in moves:
                tried.rng.seed(number)
                with contextlib.suppress(StoreError):
                    getattr(tried, kind)()
                tried.check()
            tried.rng.seed(seed)
            tried.settle()
        finally:
            tried.close()
            logging.disable(disabled)
    return tried.seen


def explore(world: type[World], numbers: Sequence[int], base: str = "", steps: int = 0) -> Counter[str]:
    """Plays the schedules with these numbers; returns what happened in all of them.

    `base`: always the same schedules, of which none is cut down. Raises Violation, which names the moves that it takes
    and the command that repeats them.
    """
    attempts = 0 if base else ATTEMPTS
    base, _, alone = (base or os.environ.get("SEED") or commit()).partition(":")
    seen: Counter[str] = Counter()
    for number in [int(alone)] if alone else numbers:
        seed = int.from_bytes(hashlib.sha256(f"{base}/{world.__name__}/{number}".encode()).digest()[:8])
        moves = schedule(world, seed, steps or world.steps)
        try:
            seen += play(world, seed, moves)
        except Exception as failure:
            least = shrunk(world, seed, moves, failure, attempts)
            raise Violation(_report(failure, f"{base}:{number}", moves, least)) from failure
    return seen


def shrunk(world: type[World], seed: int, moves: list[Move], failure: Exception, left: int) -> list[Move]:
    """A part of the moves that fails in the same way: runs of them are left out, ever shorter ones, `left` times."""
    size = len(moves) // 2
    while size and left > 0:
        at = 0
        while at < len(moves) and left > 0:
            less = moves[:at] + moves[at + size :]
            left -= 1
            if _kind(_failure(world, seed, less)) == _kind(failure):
                moves = less
            else:
                at += size
        size //= 2
    return moves


def _failure(world: type[World], seed: int, moves: list[Move]) -> Exception | None:
    try:
        play(world, seed, moves)
    except Exception as failure:
        return failure
    return None


def _kind(failure: Exception | None) -> tuple[type, str]:
    """Two failures that differ by versions and times alone are the same."""
    return type(failure), re.sub(r"[\d.]+", "0", str(failure))


def _report(failure: Exception, seed: str, moves: list[Move], least: list[Move]) -> str:
    what = str(failure) if isinstance(failure, Violation) else f"{type(failure).__name__}: {failure}"
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    kinds = ", ".join(move.kind for move in least)
    return f"{what}\n{len(least)} of {len(moves)} moves are enough: {kinds}\nSEED={seed} python -m pytest '{test}'"


@functools.cache
def commit() -> str:
    """The first twelve digits of the hash of the commit that is checked out; "0" outside a repository."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"
