"""The RL step benchmark's parts: what it reads, what it counts, and what both sides are given."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loadtest.training.rl_step import ours, task
from loadtest.training.rl_step.bench import gains, summary
from loadtest.training.rl_step.memory import PeakMemory
from loadtest.training.rl_step.ours import Step
from tests.waiting import wait_until
from trainer.config import TrainerConfig, strict


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
    row = summary("async", "slow", steps, peak=5_000_000)
    assert row["s_per_step"] == 2.0
    assert row["ms"] == {"train_ms": 10.0}
    assert row["tokens_per_s"] == 100.0
    assert row["peak_memory_mb"] == 5


def test_gains_are_over_the_faster_of_trls() -> None:
    times = {"colocated": (1.0, 1.2), "one-step-off": (0.8, 0.8), "async": (0.5, 0.5), "TRL, 1 thread": (2.0, 2.2)}
    times["TRL, 2 threads"] = (1.5, 1.7)
    rows = [
        {"contender": name, "reward": reward, "s_per_step": seconds}
        for name, both in times.items()
        for reward, seconds in zip(task.REWARDS, both, strict=True)
    ]
    found = gains(rows)
    assert found["instant"]["async_over_colocated"] == 2.0
    assert found["instant"]["async_over_trl"] == 3.0
    assert found["colocated_pays_of_200_ms"] == pytest.approx(200)
    assert found["async_pays_of_200_ms"] == pytest.approx(0)


@pytest.mark.parametrize("schedule", ours.SCHEDULES)
def test_every_schedule_has_a_configuration_the_trainer_takes(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///unused")
    values = ours.config(task.SMALL, tmp_path, "http://127.0.0.1:1", schedule, "slow", tmp_path / "m")
    built = strict.build(TrainerConfig, values)
    assert built.schedule.name == schedule
    assert built.batch == task.SMALL.prompts


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
