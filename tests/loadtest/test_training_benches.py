"""The benchmarks of RL steps, of partial rollouts and of adapters: what both sides are given, and what is counted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loadtest.models.checkpoints import make_checkpoint
from loadtest.training import lora
from loadtest.training import partial_rollouts as partial
from loadtest.training.partial_rollouts import SMALL, Lengths, Sizes
from loadtest.training.rl_step import bench, ours, task
from loadtest.training.rl_step.memory import PeakMemory
from loadtest.training.rl_step.ours import Step
from tests.waiting import wait_until
from trainer.config import LINEAR_LAYERS, TrainerConfig, strict
from trainer.rollouts.generate import Request
from trainer.tiny_model import tiny_run

URL, STORE = "http://127.0.0.1:1", "sqlite:///unused"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", STORE)


def test_seconds_are_from_one_step_to_the_next(tmp_path: Path) -> None:
    lines = [
        {"event": "step", "time": at, "step": i, "rollout_ms": 5.0, "train_ms": 7.0, "rollout_tokens": 100.0}
        for i, at in enumerate((10.0, 11.0, 13.5))
    ]
    lines.insert(1, {"event": "eval", "time": 10.5})
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    steps = ours.read_steps(path)
    assert [step.seconds for step in steps] == [1.0, 2.5]
    assert steps[0].ms == {"rollout_ms": 5.0, "train_ms": 7.0}


def test_a_row_has_medians_and_a_rate() -> None:
    steps = [Step(1.0, {"train_ms": 10.0}, 100), Step(3.0, {"train_ms": 30.0}, 300), Step(2.0, {}, 200)]
    row = bench.summary("async", "slow", steps, peak=5_000_000)
    assert (row["s_per_step"], row["ms"], row["tokens_per_s"]) == (2.0, {"train_ms": 10.0}, 100.0)
    assert row["peak_memory_mb"] == 5


def test_gains_are_over_the_faster_of_trls() -> None:
    times = {"colocated": (1.0, 1.2), "one-step-off": (0.8, 0.8), "async": (0.5, 0.5), "TRL, 1 thread": (2.0, 2.2)}
    times["TRL, 2 threads"] = (1.5, 1.7)
    rows = [
        {"contender": name, "reward": reward, "s_per_step": seconds}
        for name, both in times.items()
        for reward, seconds in zip(task.REWARDS, both, strict=True)
    ]
    found = bench.gains(rows)
    assert found["instant"]["async_over_colocated"] == 2.0
    assert found["instant"]["async_over_trl"] == 3.0
    assert found["colocated_pays_of_200_ms"] == pytest.approx(200)
    assert found["async_pays_of_200_ms"] == pytest.approx(0)


@pytest.mark.parametrize("schedule", ours.SCHEDULES)
def test_every_schedule_has_a_configuration_the_trainer_takes(schedule: str, tmp_path: Path) -> None:
    built = strict.build(TrainerConfig, ours.config(task.SMALL, tmp_path, URL, schedule, "slow", tmp_path / "m"))
    assert built.schedule.name == schedule
    assert built.batch == task.SMALL.prompts


@pytest.mark.parametrize("rank", [0, 16])
def test_both_sides_of_a_step_train_the_same_adapter(rank: int, tmp_path: Path) -> None:
    from loadtest.training.rl_step.trl_run import adapter

    asked = dataclasses.replace(task.SMALL, rank=rank)
    values = ours.config(asked, tmp_path, URL, "async", "instant", tmp_path / "m")
    built, theirs = strict.build(TrainerConfig, tiny_run(values)), adapter(asked)
    if not rank:
        assert built.lora is None is theirs
        return
    assert built.lora is not None
    assert (built.lora.rank, built.lora.alpha) == (theirs.r, theirs.lora_alpha) == (16, 32)
    assert set(built.lora.target_modules) == set(theirs.target_modules)


def test_the_slow_reward_waits_and_says_the_same() -> None:
    async def both() -> tuple[float, float]:
        return await task.instant("1+2=", "03", "03"), await task.slow("1+2=", "03", "03")

    began = time.monotonic()
    assert asyncio.run(both()) == (1.0, 1.0)
    assert time.monotonic() - began >= task.SLOW_S
    assert task.value("0", "03") == 0.5


def test_peak_memory_counts_a_tree_of_processes() -> None:
    grab = "import time; x = bytearray(200 << 20); print(1, flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grab!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with PeakMemory([process.pid]) as memory:
            process.stdout.readline()
            wait_until(lambda: memory.peak > 200 << 20)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


# partial rollouts


def test_the_tail_is_as_long_as_is_said() -> None:
    found = partial.described(Sizes())
    assert found["median"] == pytest.approx(Sizes().median, rel=0.05)
    assert found["p99"] / found["median"] == pytest.approx(partial.TIMES, rel=0.1)
    assert found["most"] <= Sizes().max_tokens


def test_a_sample_has_its_length_in_one_request_and_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "body", Request.body)  # restored after the test
    lengths, prompt, most = Lengths(24, 96), (1, 2, 3, 4, 5, 6), 480
    partial.with_lengths(lengths)
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


@pytest.mark.parametrize("schedule", partial.SCHEDULES)
@pytest.mark.parametrize("budget", [None, SMALL.budget])
def test_every_budget_has_a_configuration_the_trainer_takes(schedule: str, budget: int | None, tmp_path: Path) -> None:
    values = partial.config(SMALL, tmp_path, URL, STORE, schedule, budget)
    built = strict.build(TrainerConfig, values)
    assert built.rollout.token_budget == budget
    assert built.rollout.rounds == (1 if budget is None else -(-SMALL.max_tokens // SMALL.budget))
    other = partial.config(SMALL, tmp_path, URL, STORE, schedule, None)
    assert {k for k in values if values[k] != other[k]} <= {"rollout", "metrics"}, "they differ in the budget alone"


def test_a_row_counts_what_came_after_the_warm_up(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"rollout_ms": 5.0, "train_ms": 7.0, "rollout_tokens": 100.0, "answer_tokens_mean": 25.0}
    numbers |= {"answer_tokens_max": 90.0, "version_lag_mean": 1.5, "version_lag_max": 3.0}
    steps = [{"event": "step", "step": i, "time": t, **numbers} for i, t in enumerate((0.0, 9.0, 10.0, 13.0), 1)]
    ends = [{"event": "eval", "accuracy": accuracy} for accuracy in (0.2, 0.9)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, [ends[0], *steps, ends[1]])))
    found = partial.row("async", 12, path, Sizes(prompts=4, samples=2, steps=4, warm_up=2))
    assert (found["steps"], found["s_per_step"], found["s_per_step_mean"]) == (2, 2.0, 2.0)
    assert (found["samples_per_s"], found["tokens_per_s"]) == (2 * 8 / 4.0, 50.0)
    assert (found["accuracy_before"], found["accuracy"]) == (0.2, 0.9)


def test_a_gain_is_in_samples_per_second() -> None:
    rates = {("one-step-off", None): 10.0, ("one-step-off", 96): 25.0, ("async", 96): 18.0, ("async", None): 12.0}
    rows = [{"schedule": s, "budget": b, "samples_per_s": rate} for (s, b), rate in rates.items()]
    assert partial.gains(rows) == {"target": 1.5, "one-step-off": 2.5, "async": 1.5}


def test_the_reward_looks_at_the_beginning() -> None:
    assert asyncio.run(partial.begins_right("1+2=", "03 and more", "03")) == 1.0
    assert asyncio.run(partial.begins_right("1+2=", "30", "03")) == 0.0


# adapters


def test_the_adapter_is_one_that_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    base = make_checkpoint(tmp_path / "base")
    path = lora.write_adapter(tmp_path / "adapter", base, rank=4)
    tensors = load_file(path / "adapter_model.safetensors")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(path))
    loaded = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(loaded) == len(tensors) == 2 * 2 * len(LINEAR_LAYERS)
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4


def test_figures_of_adapters_are_medians_and_ratios() -> None:
    row = {"bytes": 100, "publish_ms": 1.0, "stage_ms": 2.0, "first_token_ms": 10.0}
    adapter = lora.summary([row, row | {"first_token_ms": 30.0}, row | {"first_token_ms": 20.0}])
    assert (adapter["first_token_ms"], adapter["first_token_ms_range"]) == (20.0, [10.0, 30.0])
    model = lora.summary([row | {"bytes": 4000, "first_token_ms": 50.0}])
    assert lora.ratios(model, adapter) == {"bytes": 40, "publish_ms": 1, "stage_ms": 1, "first_token_ms": 2.5}
