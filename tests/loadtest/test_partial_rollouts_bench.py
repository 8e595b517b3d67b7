"""The benchmark of partial rollouts: its lengths, what a trainer is given, and what it counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.training import partial_rollouts as bench
from loadtest.training.partial_rollouts import SCHEDULES, SMALL, Lengths, Sizes
from trainer.config import TrainerConfig, strict
from trainer.rollouts.generate import Request


def test_the_tail_is_as_long_as_is_said() -> None:
    found = bench.described(Sizes())
    assert found["median"] == pytest.approx(Sizes().median, rel=0.05)
    assert found["p99"] / found["median"] == pytest.approx(bench.TIMES, rel=0.1)
    assert found["most"] <= Sizes().max_tokens


def test_a_sample_has_its_length_in_one_request_and_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "body", Request.body)  # restored after the test
    lengths, prompt, most = Lengths(24, 96), (1, 2, 3, 4, 5, 6), 480
    bench.with_lengths(lengths)
    for seed in range(1000, 1400):
        whole = Request(prompt, 1, most, 1.0, seed=seed)
        assert whole.body()["max_tokens"] == lengths.of(seed)
        assert whole.body()["ignore_eos"] is True
        written = 0
        while True:
            asked = Request(prompt, 1, most, 1.0, seed=seed).after([7] * written)
            given = Request(asked.prompt_ids, 1, min(96, most - written), 1.0, seed=asked.seed).body()["max_tokens"]
            assert given > 0
            written += given
            if given < 96:
                break
        assert written == lengths.of(seed)
    assert "ignore_eos" not in Request(prompt, 1, most, 0.0).body(), "an evaluation ends where the model ends it"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("budget", [None, SMALL.budget])
def test_every_run_has_a_configuration_the_trainer_takes(schedule: str, budget: int | None, tmp_path: Path) -> None:
    values = bench.config(SMALL, tmp_path, "http://127.0.0.1:1", "sqlite:///unused", schedule, budget)
    built = strict.build(TrainerConfig, values)
    assert built.rollout.token_budget == budget
    assert built.rollout.rounds == (1 if budget is None else -(-SMALL.max_tokens // SMALL.budget))
    other = bench.config(SMALL, tmp_path, "http://127.0.0.1:1", "sqlite:///unused", schedule, None)
    assert {k for k in values if values[k] != other[k]} <= {"rollout", "metrics"}, "they differ in the budget alone"


def test_a_row_counts_what_came_after_the_warm_up(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"rollout_ms": 5.0, "train_ms": 7.0, "rollout_tokens": 100.0, "answer_tokens_mean": 25.0}
    numbers |= {"answer_tokens_max": 90.0, "version_lag_mean": 1.5, "version_lag_max": 3.0}
    steps = [{"event": "step", "step": i, "time": t, **numbers} for i, t in enumerate((0.0, 9.0, 10.0, 13.0), 1)]
    ends = [{"event": "eval", "accuracy": accuracy} for accuracy in (0.2, 0.9)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, [ends[0], *steps, ends[1]])))
    sizes = Sizes(prompts=4, samples=2, steps=4, warm_up=2)
    found = bench.row("async", 12, path, sizes)
    assert (found["steps"], found["s_per_step"], found["s_per_step_mean"]) == (2, 2.0, 2.0)
    assert found["samples_per_s"] == 2 * 8 / 4.0
    assert found["tokens_per_s"] == 50.0
    assert (found["accuracy_before"], found["accuracy"]) == (0.2, 0.9)


def test_a_gain_is_in_samples_per_second() -> None:
    rates = {("one-step-off", None): 10.0, ("one-step-off", 96): 25.0, ("async", 96): 18.0, ("async", None): 12.0}
    rows = [{"schedule": s, "budget": b, "samples_per_s": rate} for (s, b), rate in rates.items()]
    assert bench.gains(rows) == {"target": 1.5, "one-step-off": 2.5, "async": 1.5}


def test_the_reward_looks_at_the_beginning() -> None:
    assert asyncio.run(bench.begins_right("1+2=", "03 and more", "03")) == 1.0
    assert asyncio.run(bench.begins_right("1+2=", "30", "03")) == 0.0
