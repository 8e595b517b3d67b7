"""Seconds of one GRPO step by schedule, beside TRL, and what overlap gains when a reward takes 200 ms.

One run on one machine: the same model, batch, task and number of tokens a step on average. The engine and our trainer
get a thread each; TRL, which does one thing at a time, is run with one thread and with as many as there are cores, and
its faster figure counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json as jsonlib
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.demo.recipe import prepare_environment
from loadtest.measure.run import with_machine
from loadtest.training.rl_step import ours
from loadtest.training.rl_step.memory import PeakMemory
from loadtest.training.rl_step.ours import Step
from loadtest.training.rl_step.task import RANK, REWARDS, SMALL, Task
from server.up.server import Server

Figures = dict[str, Any]


def run(json: Path | None, *, steps: int, small: bool = False, lora: bool = False) -> Figures:
    """Measure, print the table, and write the figures to `json`; returns them. With `lora` everybody trains an adapter
    of the linear layers. `steps` counts those that are measured."""
    prepare_environment()
    task, work = SMALL if small else Task(), Path("runs") / ("rl-step-small" if small else "rl-step")
    task = dataclasses.replace(task, rank=RANK if lora else 0, steps=task.warm_up + steps)
    work.mkdir(parents=True, exist_ok=True)
    task.write_model(work / "model")
    rows = [*_ours(task, work.resolve()), *_trl(task, work.resolve())]
    figures = {"rows": rows, "gains": gains(rows), "task": task.describe()}
    show(figures)
    return with_machine(figures, json)


def summary(contender: str, reward: str, steps: list[Step], peak: int) -> Figures:
    """A row: medians over the steps that count."""
    seconds = statistics.median(step.seconds for step in steps)
    phases = {name for step in steps for name in step.ms}
    return {
        "contender": contender,
        "reward": reward,
        "steps": len(steps),
        "s_per_step": round(seconds, 4),
        "ms": {name: round(statistics.median(s.ms.get(name, 0.0) for s in steps), 1) for name in sorted(phases)},
        "tokens_per_s": round(sum(s.tokens for s in steps) / sum(s.seconds for s in steps), 1),
        "peak_memory_mb": round(peak / 1e6),
    }


def gains(rows: list[Figures]) -> Figures:
    """Ratios of seconds per step: what is claimed, by reward."""
    found: Figures = {}
    for reward in REWARDS:
        by = {row["contender"]: row["s_per_step"] for row in rows if row["reward"] == reward}
        trl = min(seconds for name, seconds in by.items() if name.startswith("TRL"))
        asynchronous, colocated = by["async"], by["colocated"]
        found[reward] = {"async_over_colocated": round(colocated / asynchronous, 2)}
        found[reward] |= {f"{name}_over_trl": round(trl / by[name], 2) for name in ours.SCHEDULES}
    for name in ours.SCHEDULES:
        instant, slow = (
            next(r["s_per_step"] for r in rows if (r["contender"], r["reward"]) == (name, kind)) for kind in REWARDS
        )
        found[f"{name}_pays_of_200_ms"] = round((slow - instant) * 1e3, 1)
    return found


def _ours(task: Task, work: Path) -> list[Figures]:
    with ours.server(task, work / "model", work / "state") as server:
        return [_schedule(task, work, server, *case) for case in itertools.product(ours.SCHEDULES, REWARDS)]


def _schedule(task: Task, work: Path, server: Server, schedule: str, reward: str) -> Figures:
    name = f"{schedule}-{reward}"
    metrics = work / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)
    values = ours.config(task, work / "model", server.url, schedule, reward, metrics)
    trainer = server.train(ours.write_config(work / f"{name}.yaml", values))
    with PeakMemory(child.process.pid for child in server.children.values()) as memory:
        trainer.process.wait()
    if trainer.process.returncode:
        raise RuntimeError(f"{name} ended with {trainer.process.returncode}:\n{trainer.tail()}")
    return summary(schedule, reward, ours.read_steps(metrics)[task.warm_up - 1 :], memory.peak)


def _trl(task: Task, work: Path) -> list[Figures]:
    threads = sorted({1, os.cpu_count() or 1})
    return [_trl_case(task, work, *case) for case in itertools.product(threads, REWARDS)]


def _trl_case(task: Task, work: Path, threads: int, reward: str) -> Figures:
    asked = {"model": str(work / "model"), "reward": reward, "task": task.describe(), "work": str(work / "trl")}
    command = [sys.executable, "-m", "loadtest.training.rl_step.trl_run", jsonlib.dumps(asked)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with (work / f"trl-{threads}-{reward}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            with PeakMemory([process.pid]) as memory:
                said, _ = process.communicate()
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"TRL ended with {process.returncode}; see {log.name}")
    lines = [jsonlib.loads(line) for line in said.splitlines() if line.startswith('{"seconds"')]
    steps = [Step(x["seconds"], {k: v for k, v in x.items() if k.endswith("_ms")}, x["tokens"]) for x in lines]
    unit = "thread" if threads == 1 else "threads"
    return summary(f"TRL, {threads} {unit}", reward, steps[task.warm_up :], memory.peak)


def show(figures: Figures) -> None:
    """The table on standard output."""
    phases = sorted({name for row in figures["rows"] for name in row["ms"]})
    table = Table("contender", "reward", "s/step", *phases, "tokens/s", "peak MB")
    for row in figures["rows"]:
        times = [f"{row['ms'][name]:.0f}" if name in row["ms"] else "" for name in phases]
        rates = [f"{row['tokens_per_s']:.0f}", str(row["peak_memory_mb"])]
        table.add_row(row["contender"], row["reward"], f"{row['s_per_step']:.3f}", *times, *rates)
    console = Console(width=140)
    console.print(table)
    console.print(figures["gains"])
