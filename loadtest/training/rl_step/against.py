"""Seconds of a GRPO step of this checkout and of another, in pairs: `hotswap bench rl-step --against DIRECTORY`.

Each checkout has a server of its own, and its trainer runs against that one. Both servers stand all the time; the runs
of the trainers alternate, schedule by schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from loadtest.demo.recipe import prepare_environment
from loadtest.measure import pairs as paired
from loadtest.measure.pairs import Ratio, Serving
from loadtest.training.rl_step import ours
from loadtest.training.rl_step.task import RANK, REWARDS, SMALL, Task
from server.errors import CliError
from server.up.processes import Child

PAIRS, WARM_UP, STEPS = 4, 2, 6  # of a run
SCHEDULES = ("colocated", "async")  # between which the others lie


def run(
    other: Path,
    json: Path | None = None,
    *,
    pairs: int = PAIRS,
    small: bool = False,
    lora: bool = False,
    steps: int = STEPS,
) -> dict[str, Ratio]:
    """Measures both checkouts, prints a table, and writes `json` if it is given; by the name of the figure.

    `steps` counts those of a run that are measured. Raises CliError.
    """
    prepare_environment()
    task, work = SMALL if small else Task(), Path("runs") / ("rl-step-small" if small else "rl-step")
    task = dataclasses.replace(task, rank=RANK if lora else 0, warm_up=WARM_UP, steps=WARM_UP + steps)
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    task.write_model(work / "model")
    both = paired.checkouts(other)
    visits: list[Callable[[Serving], Mapping[str, float]]] = [partial(_visit, task, work, s) for s in SCHEDULES]
    arguments = ["--kv-cache-gib", "0.5", *ours.engine_args(task)]
    with contextlib.ExitStack() as stack:
        this, that = (
            stack.enter_context(paired.serving(checkout, work / f"side-{i}", work / "model", ours.MODEL, arguments))
            for i, checkout in enumerate(both)
        )
        ratios = paired.by_turns((this, that), visits, pairs, warm_up=0)  # each run warms itself up
    paired.report("GRPO steps", (both[0].name, both[1].name), ratios, json)
    return ratios


def _visit(task: Task, work: Path, schedule: str, side: Serving) -> dict[str, float]:
    metrics = work / "paired.jsonl"
    metrics.unlink(missing_ok=True)
    values = ours.config(task, work / "model", side.url, schedule, REWARDS[0], metrics)
    config = ours.write_config(work / "paired.yaml", values)
    environment = {**side.checkout.environment, "HOTSWAP_STORE": side.store}
    command = ["trainer.main", "--config", str(config)]
    trainer = Child(f"the trainer of {side.checkout.name}", command, work / "paired.log", environment)
    try:
        trainer.process.wait()
    finally:
        trainer.stop()
    if trainer.returncode:
        raise CliError(f"{trainer.name} ended with {trainer.returncode}; the end of its log:\n{trainer.tail()}")
    steps = ours.read_steps(metrics)[task.warm_up - 1 :]
    return {
        f"{schedule}, s a step": statistics.median(step.seconds for step in steps),
        f"{schedule}, training, ms": statistics.median(step.ms["train_ms"] for step in steps),
    }
