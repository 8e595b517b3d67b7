"""How a staging on a CPU shares the machine with decoding.

A staging takes memory bandwidth, the interpreter and, where cores are few, a core from the model's steps. `fast` pauses
with every piece that it reads. `smooth` bounds the loss of the steps: the staging works for such a part of the time as
makes them BOUND longer. By how much a second of its work lengthens a step is measured, on periods of the model with
work of the staging and without. A period lasts from the start of a step to the start of the next; only those of as many
tokens are compared.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Staging = Literal["fast", "smooth"]

# Decoding goes first. The stager gives the memory bus and the interpreter back for a moment with every piece (1 MB).
# The work takes 0.16 s of a core for 0.8 GB, the pauses about 0.5 s: staging goes at 1 GB/s beside 16 streams
# (`hotswap bench swap`, 0.4 B), and at 4 to 5 GB/s with none.
YIELD_RATE = 2e9  # bytes per second of pause
SHORTEST_PAUSE_S = (64 << 10) / YIELD_RATE
LONGEST_YIELD_S = 0.002
IDLE_AFTER_S = 0.05  # without a step: sampling, scheduling and a slow client's next request fit in between

BOUND = 0.1  # of a step
LOOK_S = 0.005  # for the next step, by a staging that waits for it
ALONE_EACH = 8  # one step in so many is left alone: contexts grow, and so do the steps that others are compared with
ALONE = 0.01  # of a period: with less work in it, it counts as one without
REMEMBERED = 256  # periods without
NEWEST = 9  # of them, of as many tokens, to compare with
FIRST_PRICE, LEAST_PRICE, MOST_PRICE = 2.0, 0.25, 4.0  # seconds by which a second of work lengthens the steps
FIRST_WORK_S = 0.005  # what FIRST_PRICE weighs against the periods that are measured
KEPT = 0.85  # of the weight of a period when the next one is measured


class Pacer(Protocol):
    """A staging calls it between its pieces."""

    def start(self, go_on: Callable[[], None]) -> None:
        """A staging begins, on this thread; `go_on` raises when it is to end."""

    def __call__(self, nbytes: int) -> None:
        """So many bytes are about to be read. Returns when the staging may go on."""

    @property
    def step_loss(self) -> float | None:
        """By what part of their length the steps beside the staging were longer; None: there were none to compare."""


class Unpaced:
    """A staging that leaves the steps alone as it is: on a stream of its own."""

    step_loss = None

    def start(self, go_on: Callable[[], None]) -> None:
        pass

    def __call__(self, nbytes: int) -> None:
        pass


@dataclass(frozen=True)
class Period:
    """From the start of a step to the start of the next, in seconds of the monotonic clock; `tokens`: of the step."""

    begin: float
    end: float
    tokens: int

    @property
    def length(self) -> float:
        return self.end - self.begin


class Steps:
    """The steps of a model: noted by the thread that runs them, read by the one that stages."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.begun = 0
        self.tokens = 0  # of the last one
        self._running = False
        self._begun_at = self._ended_at = float("-inf")
        self._periods: deque[Period] = deque(maxlen=REMEMBERED)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    @property
    def decoding(self) -> bool:
        """Whether a step runs, or one ended a moment ago."""
        return self._running or time.monotonic() - self._ended_at < IDLE_AFTER_S

    def periods(self) -> Iterator[Period]:
        """Those that have ended since this was called last, REMEMBERED at most."""
        while self._periods:
            yield self._periods.popleft()

    def _begin(self, _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._ended_at < IDLE_AFTER_S:
            self._periods.append(Period(self._begun_at, now, self.tokens))
        self._begun_at, self.tokens, self._running = now, _tokens(args, kwargs), True
        self.begun += 1

    def _end(self, *_: Any) -> None:
        self._running = False
        self._ended_at = time.monotonic()


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of vLLM's call of a model: (input_ids, positions, ...); positions are there whatever the input is."""
    positions: Any = kwargs.get("positions", args[1] if len(args) > 1 else None)
    return int(positions.shape[-1]) if hasattr(positions, "shape") else 0


class Loss:
    """The loss of steps beside a staging. `price`: the seconds by which a second of its work lengthens them."""

    def __init__(self) -> None:
        self._alone: deque[Period] = deque(maxlen=REMEMBERED)
        self._excess, self._work = FIRST_PRICE * FIRST_WORK_S, FIRST_WORK_S
        self.start()

    def start(self) -> None:
        self._lost = self._compared = 0.0

    def add(self, period: Period, work: float) -> None:
        """`work`: how long the staging worked within the period, in seconds."""
        if work < ALONE * period.length:
            self._alone.append(period)
        elif (alone := self._length(period.tokens)) is not None:
            self._lost += period.length - alone
            self._compared += alone
            self._excess = KEPT * self._excess + period.length - alone
            self._work = KEPT * self._work + work

    @property
    def price(self) -> float:
        return min(MOST_PRICE, max(LEAST_PRICE, self._excess / self._work))

    @property
    def of_steps(self) -> float | None:
        return self._lost / self._compared if self._compared else None

    def expected(self, tokens: int) -> float | None:
        """The length of a period of so many tokens without a staging, or of the next fewer; None: not known yet."""
        fewer = max((period.tokens for period in self._alone if period.tokens <= tokens), default=None)
        return None if fewer is None else self._length(fewer)

    def _length(self, tokens: int) -> float | None:
        found = (period.length for period in reversed(self._alone) if period.tokens == tokens)
        newest = list(itertools.islice(found, NEWEST))
        return statistics.median(newest) if newest else None


class CpuPacer:
    """At full speed while nothing decodes; beside steps in small bites, or, if `staging` is smooth, within BOUND."""

    def __init__(self, model: torch.nn.Module, staging: Staging = "smooth") -> None:
        self.steps = Steps(model)
        self._smooth = staging == "smooth"
        self._loss = Loss()
        self._go_on: Callable[[], None] = lambda: None
        self._since = 0.0  # it works
        self._worked: list[tuple[float, float]] = []  # from, until; what no period has counted yet
        self._owed = 0.0  # seconds of pause

    def start(self, go_on: Callable[[], None]) -> None:
        self._go_on = go_on
        self._count()
        self._loss.start()
        self._worked.clear()
        self._owed, self._since = 0.0, time.monotonic()

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        self._worked.append((self._since, now))
        self._count()
        self._owed += (now - self._since) * (self._loss.price / BOUND - 1) if self._smooth else nbytes / YIELD_RATE
        if self._owed >= SHORTEST_PAUSE_S or self._leaves_alone():
            self._pause()
            self._owed = 0.0
        self._since = time.monotonic()

    @property
    def step_loss(self) -> float | None:
        return self._loss.of_steps

    def _count(self) -> None:
        """The periods that have ended."""
        for period in self.steps.periods():
            within = (min(end, period.end) - max(begin, period.begin) for begin, end in self._worked)
            self._loss.add(period, sum(seconds for seconds in within if seconds > 0))
            self._worked = [(begin, end) for begin, end in self._worked if end > period.end]

    def _leaves_alone(self) -> bool:
        """Whether the present step is one to compare others with, or none is known that it can be compared with."""
        if not self._smooth:
            return False
        return self.steps.begun % ALONE_EACH == 0 or self._loss.expected(self.steps.tokens) is None

    def _pause(self) -> None:
        owed = self._owed if self._smooth else min(self._owed, LONGEST_YIELD_S)
        until = time.monotonic() + owed
        while self.steps.decoding and ((left := until - time.monotonic()) > 0 or self._leaves_alone()):
            time.sleep(min(left, LOOK_S) if left > 0 else LOOK_S)
            self._go_on()
            self._count()
