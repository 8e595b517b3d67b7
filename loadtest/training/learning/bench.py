"""Whether the algorithms learn: held-out accuracy by step, on three tasks, from a fixed seed, against a real server.

hotswap bench learning --json docs/benchmarks/learning.json --docs docs/learning.md

One server (gateway, vLLM, swaps) serves all runs of a task, one after the other; every run publishes into it and is
evaluated by greedy answers to problems it never trained on. The curve of a run says what it learned: a run whose last
accuracy is not `LEAST_GAIN` above its first is reported as one that did not learn, a run that failed with its error.
"""

from __future__ import annotations

import json as jsonlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from loadtest.measure.machine import machine
from loadtest.measure.run import up, write
from loadtest.training.learning import tools as learning_tools
from loadtest.training.learning.pages import chart, table, update_page
from loadtest.training.learning.recipes import (
    ENGINE_ARGS,
    KV_CACHE_GIB,
    MODEL,
    TASKS,
    WAYS,
    Config,
    Task,
    Way,
    base,
    prepare_environment,
    recipe,
)
from server.errors import CliError
from server.up.server import Server
from trainer.report import RunEvents, read_events
from trainer.tiny_model import tiny_run, write_tiny_model

LEAST_GAIN = 0.2  # of held-out accuracy, for a run to have learned
SHOWN = (
    "algorithm",
    "schedule",
    "batch",
    "optimizer",
    "data",
    "rewards",
    "rollout",
    "environment",
)  # of a run's configuration


class LearningFailed(CliError):
    """The benchmark cannot go on; says which part and shows the end of its log."""


@dataclass
class Bench:
    """Directories, seed and server of one benchmark."""

    work: Path
    seed: int
    server: Server
    console: Console

    def base(self, task: Task) -> None:
        """Teach the random model the task's mistake; every later run starts there. Raises LearningFailed."""
        path = self._written(f"{task.name}-base", base(task, self.work, self.seed))
        command = [sys.executable, "-m", "trainer.main", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LearningFailed(f"the base model of {task.name} was not trained:\n{done.stderr[-2000:]}")

    def run(self, task: Task, way: Way) -> dict[str, Any]:
        """Train one way; its figures, or why it failed."""
        config = recipe(task, way, self.work, self.server.url, self.seed)
        began = time.monotonic()
        trainer = self.server.train(self._written(f"{task.name}-{way.name}", config))
        while trainer.alive:
            for name in ("gateway", "instance-0"):
                if not (child := self.server.children[name]).alive:
                    raise LearningFailed(f"{name} ended; the end of {child.log}:\n{child.tail()}")
            time.sleep(0.2)
        if trainer.process.returncode:
            return {"failed": trainer.tail(3), "config": _shown(config, task)}
        found = figures(read_events(config["metrics"])) | {"seconds": round(time.monotonic() - began, 1)}
        shown = f"{found['first']:.1%} -> {found['last']:.1%} (best {found['best']:.1%}) in {found['seconds']:.0f} s"
        self.console.print(f"{task.name:12} {way.name:12} {shown}", highlight=False)
        return found | {"config": _shown(config, task)}

    def _written(self, name: str, config: Config) -> Path:
        path = self.work / f"{name}.yaml"
        Path(config["metrics"]).unlink(missing_ok=True)
        path.write_text(yaml.safe_dump(tiny_run(config), sort_keys=False))
        return path


def figures(run: RunEvents) -> dict[str, Any]:
    """A run's curves and what they come to. Accuracy is of greedy answers to held-out problems."""
    steps, accuracy = run.series("eval/held_out/accuracy")
    rewarded, reward = run.series("reward_mean")
    lags = run.series("version_lag_mean")[1]
    played, turns = run.series("turns_mean")
    found = {
        "steps": max(run.steps),
        "curve": [[step, round(value, 4)] for step, value in zip(steps, accuracy, strict=True)],
        "reward": [[step, round(value, 4)] for step, value in zip(rewarded, reward, strict=True)],
        "first": accuracy[0],
        "best": max(accuracy),
        "last": accuracy[-1],
        "learned": accuracy[-1] - accuracy[0] >= LEAST_GAIN,
        "step_ms": round(sum(run.series("step_ms")[1]) / len(run.steps), 1),
    }
    if lags:
        found["version_lag_mean"] = round(sum(lags) / len(lags), 3)
    if turns:
        found["turns"] = [[step, round(value, 3)] for step, value in zip(played, turns, strict=True)]
    return found


def run(
    json: Path | None,
    *,
    seed: int = 0,
    tasks: Sequence[str] = (),
    ways: Sequence[str] = (),
    docs: Path | None = None,
) -> dict[str, Any]:
    """Train, print, and write the figures to `json` and the table and chart into `docs`; returns the figures. `tasks`
    and `ways` choose by name; all by default; the figures of other tasks stay. Raises LearningFailed."""
    prepare_environment()
    console, work = Console(), Path("runs/learning").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    learning_tools.write_records(work, seed)
    found: dict[str, Any] = {"machine": machine(), "seed": seed, "least_gain": LEAST_GAIN, "tasks": _kept(json, seed)}
    for task in (t for t in TASKS if not tasks or t.name in tasks):
        write_tiny_model(work / f"{task.name}-random", characters=task.characters, seed=seed)
        with _server(task, work) as server:
            found["tasks"][task.name] = _task(Bench(work, seed, server, console), task, ways)
        _save(found, json, docs)  # what was measured is kept, whatever becomes of the rest
    console.print(table(found), highlight=False, markup=False, soft_wrap=True)
    return found


def _kept(json: Path | None, seed: int) -> dict[str, Any]:
    """The figures of an earlier run with this seed: what is not run again stays."""
    if json is None or not json.exists():
        return {}
    before = jsonlib.loads(json.read_text())
    return dict(before["tasks"]) if before["seed"] == seed else {}


def _server(task: Task, work: Path) -> Server:
    model, state = work / f"{task.name}-random", work / f"{task.name}-state"
    return up(model, MODEL, state, ENGINE_ARGS, kv_cache_gib=KV_CACHE_GIB)


def _shown(config: Config, task: Task) -> Config:
    return {key: config[key] for key in SHOWN if key in config} | {"data": task.data}


def _save(found: dict[str, Any], json: Path | None, docs: Path | None) -> None:
    write(found, json)
    if docs is not None:
        update_page(docs, found)
        chart(found, docs.with_suffix(".svg"))


def _task(bench: Bench, task: Task, ways: Sequence[str]) -> dict[str, Any]:
    bench.base(task)
    wanted = [way for way in WAYS if way.name in task.ways and (not ways or way.name in ways)]
    runs = {way.name: bench.run(task, way) for way in wanted}
    return {"title": task.title, "held_out": task.held_out, "runs": runs}
