"""A staging gives way to decoding, and to nothing else; a smooth one takes a tenth of each step at most."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.weightsync.codes import refused
from weightsync.errors import SwapError
from weightsync.vllm_engine.device import pacing
from weightsync.vllm_engine.device.pacing import (
    BOUND,
    IDLE_AFTER_S,
    LONGEST_YIELD_S,
    SHORTEST_PAUSE_S,
    YIELD_RATE,
    CpuPacer,
    Staging,
)


class Model(torch.nn.Module):
    """Says what the pacer sees in the middle of a step."""

    pacer: CpuPacer
    seen: bool | None = None

    def forward(self, fail: bool) -> None:
        self.seen = self.pacer.steps.decoding
        if fail:
            raise RuntimeError("a step that failed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    found: Any = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds: float) -> None:
        found.now += seconds
        found.slept.append(seconds)

    found.monotonic, found.sleep = (lambda: found.now), sleep
    monkeypatch.setattr(pacing, "time", found)
    return found


@pytest.mark.parametrize("fail", [False, True])
def test_it_sleeps_during_a_step_and_a_moment_after(clock: Any, fail: bool) -> None:
    model = Model()
    model.pacer = pacer = CpuPacer(model, "fast")
    small = int(SHORTEST_PAUSE_S * YIELD_RATE)
    pacer(10 * small)
    assert (pacer.steps.decoding, clock.slept) == (False, [])
    if fail:
        with pytest.raises(RuntimeError):
            model(fail)
    else:
        model(fail)
    assert model.seen
    pacer(small // 2)
    assert clock.slept == [], "small reads add up first"
    pacer(small // 2)
    pacer(1000 * small)
    assert clock.slept == pytest.approx([SHORTEST_PAUSE_S, LONGEST_YIELD_S])
    clock.now += 2 * IDLE_AFTER_S
    pacer(10 * small)
    assert (pacer.steps.decoding, len(clock.slept)) == (False, 2)


Lengths = Callable[[int], tuple[int, float]]  # the tokens and the seconds of a step, by its number


class Decoding:
    """A model whose steps follow each other on a clock of its own. Each second of work of a staging makes the step in
    which it falls `price` seconds longer."""

    GAP_S = 0.002  # from the end of a step to the start of the next
    TICK_S = 0.0001

    def __init__(self, lengths: Lengths, price: float) -> None:
        self.now, self.price, self._lengths = 100.0, price, lengths
        self._model = torch.nn.Module()
        self.steps: list[tuple[float, float]] = []  # (length alone, length)
        self.busy = True

    def attach(self, staging: Staging) -> None:
        self.pacer = CpuPacer(self._model, staging)
        (self._begin,), (self._end,) = self._model._forward_pre_hooks.values(), self._model._forward_hooks.values()
        self._next()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds, works=False)

    def advance(self, seconds: float, works: bool) -> None:
        for _ in range(max(1, round(seconds / self.TICK_S))):
            self.now += self.TICK_S
            if self.busy and works:
                self._ends += self.price * self.TICK_S
            if self.busy and self.now >= self._ends:
                self._end(self._model)
                self.steps.append((self._alone, self.now - self._began))
                self.now += self.GAP_S
                self._next()

    def _next(self) -> None:
        tokens, self._alone = self._lengths(len(self.steps))
        self._began, self._ends = self.now, self.now + self._alone
        self._begin(self._model, (), {"positions": torch.empty(tokens)})

    def stage(self, pieces: int, piece_s: float = 0.0004, go_on: Callable[[], None] = lambda: None) -> list[float]:
        """A staging of so many pieces. Returns by what part of its length each step beside it was longer."""
        first = len(self.steps)
        self.pacer.start(go_on)
        for _ in range(pieces):
            self.pacer(1 << 20)
            self.advance(piece_s, works=True)
        self.pacer(0)
        return [length / alone - 1 for alone, length in self.steps[first:]]


def steady(seconds: float) -> Lengths:
    return lambda _number: (16, seconds)


def mixed(seconds: float) -> Lengths:
    """Every fourth step has a prompt in it, of a length that comes once."""
    return lambda number: (16, seconds) if number % 4 else (64 + number, 3 * seconds)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Decoding]:
    def make(lengths: Lengths, price: float = 1.0, *, staging: Staging = "smooth", since: float = 1.0) -> Decoding:
        """A machine that decodes for so many seconds already."""
        found = Decoding(lengths, price)
        monkeypatch.setattr(pacing, "time", found)
        found.attach(staging)
        found.sleep(since)
        return found

    return make


@pytest.mark.parametrize("lengths", [steady, mixed])
@pytest.mark.parametrize("price", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("seconds", [0.03, 0.1, 0.6])
def test_a_smooth_staging_takes_a_tenth_of_a_step(
    decoding: Callable[..., Decoding], seconds: float, price: float, lengths: Any
) -> None:
    machine = decoding(lengths(seconds), price, since=20 * seconds)
    pieces = 800 if seconds < 0.5 else 2400
    machine.stage(pieces)
    found = machine.stage(pieces)  # it knows the price by now
    piece = 0.0004 * price / seconds
    assert max(found) < BOUND * 1.3 + 2 * piece
    assert sum(found) / len(found) > BOUND / 3 or machine.price < 0.5, "it uses what it may"
    assert 0 < (machine.pacer.step_loss or 0) < BOUND * 1.2 + 2 * piece


def test_the_price_is_learnt_within_a_few_steps(decoding: Callable[..., Decoding]) -> None:
    found = decoding(steady(0.1), price=3.5).stage(400)
    assert max(found) < 2.5 * BOUND, "more than a price of 2 allows is taken at first"
    assert max(found[6:]) < BOUND * 1.3


def test_a_piece_that_takes_too_long_is_made_up_for(decoding: Callable[..., Decoding]) -> None:
    """A layer that vLLM processes as a whole."""
    found = decoding(steady(0.05)).stage(30, 0.03)
    assert sum(found) / len(found) < BOUND * 1.2
    assert max(found) < 0.03 / 0.05 + BOUND, "no two of them are in one step"


def test_a_fast_staging_says_what_it_cost(decoding: Callable[..., Decoding]) -> None:
    seconds = {}
    for staging in ("fast", "smooth"):
        machine = decoding(steady(0.1), staging=staging)
        began = machine.now
        found = machine.stage(800)
        seconds[staging] = machine.now - began
        assert machine.pacer.step_loss == pytest.approx(sum(found) / len(found), rel=0.3)
    assert seconds["smooth"] > 2 * seconds["fast"]


def test_nothing_is_said_of_steps_that_were_not_there(decoding: Callable[..., Decoding]) -> None:
    machine = decoding(steady(0.1), since=0.0)
    machine.busy = False
    machine._end(machine._model)
    machine.sleep(1.0)
    began = machine.now
    machine.stage(100)
    assert machine.now - began == pytest.approx(100 * 0.0004), "nothing decodes: at full speed"
    assert machine.pacer.step_loss is None


def test_a_staging_that_waits_for_a_step_can_be_cancelled(decoding: Callable[..., Decoding]) -> None:
    machine = decoding(steady(5.0), since=12.0)
    began = machine.now

    def go_on() -> None:
        if machine.now > began + 1.0:
            raise SwapError("cancelled", code="staging_cancelled")

    with refused("staging_cancelled"):
        machine.stage(5000, go_on=go_on)
    assert machine.now < began + 1.1, "before the step has ended"
