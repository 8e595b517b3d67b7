"""Our trainer on the benchmark's task, under one schedule, against a live server."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from loadtest.measure.run import up
from loadtest.training.rl_step.task import DATA, Task
from server.up.server import Server
from trainer.tiny_model import tiny_run

MODEL, ADAPTER = "rl-step", "rl-step-adapter"
SCHEDULES: dict[str, dict[str, Any]] = {
    "colocated": {"name": "colocated"},
    "one-step-off": {"name": "one-step-off"},
    "async": {"name": "async", "max_lag": 2},
}
PHASES = ("rollout_ms", "inference_ms", "train_ms", "publish_ms", "swap_ms")
ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "128")


@dataclass(frozen=True)
class Step:
    """One step: seconds from the last one's end to its own, milliseconds by phase, tokens sampled for it."""

    seconds: float
    ms: dict[str, float]
    tokens: float


def server(task: Task, model: Path, state: Path) -> Server:
    """A gateway and an engine that serve the model in the trainer's precision."""
    return up(model, MODEL, state, engine_args(task), kv_cache_gib=0.5)


def engine_args(task: Task) -> tuple[str, ...]:
    """vLLM's options."""
    adapters = ("--enable-lora", "--max-lora-rank", str(task.rank)) if task.rank else ()
    return (*ENGINE_ARGS, *adapters)


def config(task: Task, model: Path, url: str, schedule: str, reward: str, metrics: Path) -> dict[str, Any]:
    """The trainer's configuration. Correction is on where samples are older than the weights they train."""
    algorithm: dict[str, Any] = {"name": "grpo", "samples_per_prompt": task.samples}
    if schedule != "colocated":
        algorithm["correction"] = {"kind": "truncated", "max_lag": 2}
    adapter = {"lora": {"name": ADAPTER, "rank": task.rank, "alpha": 2 * task.rank}} if task.rank else {}
    return adapter | {
        "model": {"path": str(model)},
        "data": DATA,
        "algorithm": algorithm,
        "schedule": SCHEDULES[schedule],
        "steps": task.steps,
        "batch": task.prompts,
        "seed": task.seed,
        "optimizer": {"lr": task.lr},
        "rewards": [{"kind": "callable", "target": f"loadtest.training.rl_step.task:{reward}", "concurrency": 512}],
        "packing": {"max_tokens": 1024},
        "rollout": {"max_tokens": task.max_tokens, "request": "group"},
        "gateway": {"url": url, "concurrency": 512},
        "publish": {"model": MODEL, "dtype": "float32"},
        "metrics": str(metrics),
    }


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tiny_run(values), sort_keys=False))
    return path


def read_steps(metrics: Path) -> list[Step]:
    """Every step but the first, which has no end before it."""
    events = [orjson.loads(line) for line in metrics.read_bytes().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    return [
        Step(
            now["time"] - before["time"],
            {phase: now[phase] for phase in PHASES if phase in now},
            now["rollout_tokens"],
        )
        for before, now in itertools.pairwise(steps)
    ]
