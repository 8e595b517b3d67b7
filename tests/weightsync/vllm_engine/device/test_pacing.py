"""A staging gives way to decoding, and to nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.vllm_engine.device import cpu
from weightsync.vllm_engine.device.cpu import LONGEST_YIELD_S, YIELD_BYTES, Pacer


class Model(torch.nn.Module):
    """Says what the pacer sees in the middle of a step."""

    pacer: Pacer
    seen: bool | None = None

    def forward(self, fail: bool) -> None:
        self.seen = self.pacer.decoding
        if fail:
            raise RuntimeError("a step that failed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    found: Any = SimpleNamespace(now=100.0, slept=[])
    found.monotonic, found.sleep = (lambda: found.now), found.slept.append
    monkeypatch.setattr(cpu, "time", found)
    return found


@pytest.mark.parametrize("fail", [False, True])
def test_it_sleeps_during_a_step_and_a_moment_after(clock: Any, fail: bool) -> None:
    model = Model()
    model.pacer = pacer = Pacer(model)
    pacer(10 * YIELD_BYTES)
    assert (pacer.decoding, clock.slept) == (False, [])
    if fail:
        with pytest.raises(RuntimeError):
            model(fail)
    else:
        model(fail)
    assert model.seen
    pacer(YIELD_BYTES // 2)
    assert clock.slept == [], "small reads add up first"
    pacer(YIELD_BYTES // 2)
    pacer(100 * YIELD_BYTES)
    assert clock.slept == [YIELD_BYTES / cpu.YIELD_RATE, LONGEST_YIELD_S]
    clock.now += 2 * cpu.IDLE_AFTER_S
    pacer(10 * YIELD_BYTES)
    assert (pacer.decoding, len(clock.slept)) == (False, 2)
