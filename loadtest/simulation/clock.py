"""The clock of everything that is simulated: it jumps to what is due next.

Code that is called back asks `Clock.at`. Code that awaits runs on a `Loop`, whose timers are the clock's too, within
`determined`, where the modules that tell the time and draw numbers do so for the schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import math
import random
import secrets
import selectors
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

TURN_S = 1e-9  # of a loop


class Clock:
    """Seconds. Calls that are due at the same time happen in the order in which they were asked for."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def at(self, when: float, what: Callable[[], object]) -> None:
        """`what` is due at `when`."""
        self._order += 1
        heapq.heappush(self._due, (when, self._order, what))

    def step(self, until: float = math.inf) -> bool:
        """Lets the next of what is due by `until` happen. False: nothing is, and it is `until`."""
        if self._due and self._due[0][0] <= until:
            when, _, what = heapq.heappop(self._due)
            self.now = max(self.now, when)
            what()
            return True
        if until < math.inf:
            self.now = max(self.now, until)
        return False

    def run(self, until: float = math.inf) -> None:
        """Lets all that is due by `until` happen."""
        while self.step(until):
            pass


class Stalled(RuntimeError):
    """All tasks of a loop wait, and nothing is due."""


class _Jumps(selectors.SelectSelector):
    """Instead of waiting for sockets, of which there are none."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # A turn takes time. The loop fires timers that are due within its clock's resolution: a task that is woken so
        # and looks at the clock waits for the rest, and would do so for ever.
        self._clock.now += TURN_S
        if not self._clock.step(math.inf if timeout is None else self._clock.now + timeout) and timeout is None:
            raise Stalled("all tasks wait for each other, or for a thread or a socket, which are not simulated")
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop in the time of a clock."""

    def __init__(self, clock: Clock) -> None:
        self._simulated = clock
        super().__init__(_Jumps(clock))

    def time(self) -> float:
        return self._simulated.now


@contextlib.contextmanager
def determined(clock: Clock, seed: int) -> Iterator[None]:
    """Within, `time` tells the clock's time, and what `random`, `secrets` and `uuid` give follows from `seed`."""
    drawn, state = random.Random(seed), random.getstate()
    random.seed(seed)
    given: list[tuple[object, str, Callable[..., object]]] = [
        (time, "monotonic", lambda: clock.now),
        (time, "time", lambda: clock.now),
        (secrets, "token_hex", lambda nbytes=32: f"{drawn.getrandbits(8 * nbytes):0{2 * nbytes}x}"),
        (uuid, "uuid4", lambda: uuid.UUID(int=drawn.getrandbits(128))),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for module, name, function in given:
                stack.enter_context(mock.patch.object(module, name, function))
            yield
    finally:
        random.setstate(state)


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that awaits, in the time of its argument `clock`, and within those that are asynchronous contexts."""

    async def within(**given: Any) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for each in given.values():
                if isinstance(each, contextlib.AbstractAsyncContextManager):
                    await stack.enter_async_context(each)
            await test(**given)

    @functools.wraps(test)
    def run(clock: Clock, **others: Any) -> None:
        with determined(clock, 0), asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
            runner.run(within(clock=clock, **others))

    return run
