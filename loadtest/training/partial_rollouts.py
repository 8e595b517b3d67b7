"""Partial rollouts: samples per second with and without a budget of tokens, where a few answers are very long.

One run on one machine: the same model, task, steps and seed under `one-step-off` and `async`, each with and without
`rollout.token_budget`, against one real server. A small model is taught sums wrong, and learns from rewards what is
right; the sum is at the beginning of an answer. How long an answer goes on after it does not come from the model: each
has a length from a long tail, a lognormal distribution whose 99th percentile is ten times its median, and vLLM is told
to write so many tokens whatever they are (`ignore_eos`). The length belongs to the sample, not to the request, so a
continuation has what is left of it, and both ways write the same lengths.

`python -m loadtest.training.partial_rollouts CONFIG` is a trainer whose answers have these lengths.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from loadtest.measure.processes import cpu_seconds_of
from loadtest.measure.run import up, with_machine
from loadtest.training.learning.recipes import TASKS, base, prepare_environment
from loadtest.training.rl_step.ours import Step, read_steps
from server.up.server import Server
from trainer.tiny_model import tiny_run

MODEL = "partial"
TIMES = 10  # p99 over the median
SIGMA = math.log(TIMES) / statistics.NormalDist().inv_cdf(0.99)
LONGEST = 20  # medians: a longer answer is cut there
TARGET = 1.5
LENGTHS = "PARTIAL_ROLLOUTS_LENGTHS"  # the environment variable that tells a trainer's process
SCHEDULES: dict[str, dict[str, Any]] = {
    "one-step-off": {"name": "one-step-off"},
    "async": {"name": "async", "max_lag": 2},
}

# Answers that go on are read in one piece, so that no step of the engine is spent on a part of one.
UNCUT = ("--max-num-batched-tokens", "65536")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """`median` and `budget` in tokens; `warm_up` of the `steps` are not timed."""

    prompts: int = 16
    samples: int = 4
    median: int = 24
    budget: int = 96
    steps: int = 30
    warm_up: int = 6
    taught: int = 200
    lr: float = 3e-4
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        return LONGEST * self.median


SMALL = Sizes(prompts=4, samples=2, median=4, budget=12, steps=4, warm_up=1, taught=2)


@dataclass(frozen=True)
class Lengths:
    """How many tokens the sample of a seed writes. None has a multiple of `budget`, where it would be left with
    nothing to ask for."""

    median: int
    budget: int

    def of(self, seed: int) -> int:
        drawn = np.random.default_rng([seed, self.median]).lognormal(math.log(self.median), SIGMA)
        length = min(max(round(drawn), 2), LONGEST * self.median - 1)
        return length + (length % self.budget == 0)

    def left(self, seed: int, prompt: int, begun_prompt: int) -> int:
        """Of the sample whose continuation is asked for with this seed and a prompt of so many tokens."""
        written = prompt - begun_prompt
        return self.of(seed - written) - written


def run(json: Path | None, *, small: bool = False) -> Figures:
    """Measure, print the table, and write the figures to `json`; returns them."""
    prepare_environment()
    sizes, work = (
        SMALL if small else Sizes(),
        Path("runs") / ("partial-rollouts-small" if small else "partial-rollouts"),
    )
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    _teach(sizes, work)
    rows = _rows(sizes, work)
    figures = {
        "rows": rows,
        "gains": gains(rows),
        "lengths": described(sizes),
        "sizes": asdict(sizes),
    }
    show(figures)
    return with_machine(figures, json)


def config(sizes: Sizes, work: Path, url: str, store: str, schedule: str, budget: int | None) -> dict[str, Any]:
    """The trainer's configuration. The two ways of a schedule differ in the budget alone."""
    name = name_of(schedule, budget)
    rollout: dict[str, Any] = {"max_tokens": sizes.max_tokens}
    return {
        "model": {"path": str(work / "arithmetic-base")},
        "data": dict(TASKS[0].data),
        "algorithm": {
            "name": "grpo",
            "samples_per_prompt": sizes.samples,
            "normalize": "sequence",
            "correction": {"kind": "truncated"},
        },
        "schedule": SCHEDULES[schedule],
        "steps": sizes.steps,
        "batch": sizes.prompts,
        "seed": sizes.seed,
        "optimizer": {"lr": sizes.lr, "decay": "linear"},
        "rewards": [
            {"kind": "callable", "target": "loadtest.training.partial_rollouts:begins_right", "concurrency": 256}
        ],
        "packing": {"max_tokens": 2 * sizes.max_tokens},
        "rollout": rollout if budget is None else rollout | {"token_budget": budget},
        "gateway": {"url": url, "concurrency": 256},
        "publish": {"model": MODEL, "store": store, "dtype": "float32", "timeout_s": 120.0},
        "eval": [{"every": sizes.steps, "prompts": TASKS[0].held_out}],
        "metrics": str(work / f"{name}.jsonl"),
    }


def name_of(schedule: str, budget: int | None) -> str:
    return schedule if budget is None else f"{schedule}, {budget} tokens"


async def begins_right(prompt: str, answer: str, expected: str) -> float:
    """Whether the answer begins with the sum."""
    return float(answer.startswith(expected))


def row(schedule: str, budget: int | None, metrics: Path, sizes: Sizes) -> Figures:
    """The figures of a run: medians and rates over the steps after the warm-up."""
    steps: list[Step] = read_steps(metrics)[sizes.warm_up - 1 :]
    events = [jsonlib.loads(line) for line in metrics.read_text().splitlines()]
    accuracies = [event["accuracy"] for event in events if event["event"] == "eval"]
    trained = [event for event in events if event["event"] == "step"][sizes.warm_up :]
    seconds = sum(step.seconds for step in steps)
    return {
        "schedule": schedule,
        "budget": budget,
        "steps": len(steps),
        "s_per_step": round(statistics.median(step.seconds for step in steps), 4),
        "s_per_step_mean": round(seconds / len(steps), 4),
        "samples_per_s": round(len(steps) * sizes.prompts * sizes.samples / seconds, 2),
        "tokens_per_s": round(sum(step.tokens for step in steps) / seconds, 1),
        "waited_ms": round(statistics.fmean(step.ms["rollout_ms"] for step in steps), 1),
        "train_ms": round(statistics.fmean(step.ms["train_ms"] for step in steps), 1),
        "answer_tokens_mean": round(statistics.fmean(event["answer_tokens_mean"] for event in trained), 1),
        "answer_tokens_max": max(event["answer_tokens_max"] for event in trained),
        "version_lag_mean": round(statistics.fmean(event["version_lag_mean"] for event in trained), 3),
        "version_lag_max": max(event["version_lag_max"] for event in trained),
        "excluded_tokens": round(statistics.fmean(event.get("excluded_tokens", 0.0) for event in trained), 4),
        "accuracy_before": accuracies[0],
        "accuracy": accuracies[-1],
    }


def gains(rows: list[Figures]) -> Figures:
    """Samples per second with the budget over those without it, by schedule."""
    found: Figures = {"target": TARGET}
    for schedule in SCHEDULES:
        without, budgeted = sorted((r for r in rows if r["schedule"] == schedule), key=lambda r: r["budget"] or 0)
        found[schedule] = round(budgeted["samples_per_s"] / without["samples_per_s"], 2)
    return found


def described(sizes: Sizes, count: int = 20_000) -> Figures:
    """The distribution of lengths as it was drawn."""
    lengths = Lengths(sizes.median, sizes.budget)
    drawn = sorted(lengths.of(seed) for seed in range(count))
    return {
        "median": drawn[count // 2],
        "p90": drawn[count * 9 // 10],
        "p99": drawn[count * 99 // 100],
        "most": drawn[-1],
        "mean": round(statistics.fmean(drawn), 1),
    }


def show(figures: Figures) -> None:
    """The table on standard output."""
    columns = (
        "s_per_step",
        "samples_per_s",
        "waited_ms",
        "train_ms",
        "version_lag_mean",
        "server_cpu_ms_per_step",
        "accuracy",
    )
    table = Table("schedule", "budget", *columns)
    for each in figures["rows"]:
        table.add_row(each["schedule"], str(each["budget"] or "none"), *(str(each[name]) for name in columns))
    console = Console(width=140)
    console.print(table)
    console.print(figures["lengths"], figures["gains"])


def _teach(sizes: Sizes, work: Path) -> None:
    """The model that every run starts from: it gets most sums wrong."""
    from trainer.tiny_model import write_tiny_model

    write_tiny_model(work / "random", seed=sizes.seed, max_position_embeddings=1024)
    values = base(replace(TASKS[0], sft_steps=sizes.taught), work, sizes.seed)
    _trained(_written(work / "base.yaml", values), work / "base.log", {})


def _rows(sizes: Sizes, work: Path) -> list[Figures]:
    args = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "256", *UNCUT)
    with up(work / "arithmetic-base", MODEL, work / "state", args, kv_cache_gib=0.5) as server:
        cases = itertools.product(SCHEDULES, (None, sizes.budget))
        return [_row(sizes, work, server, *case) for case in cases]


def _row(sizes: Sizes, work: Path, server: Server, schedule: str, budget: int | None) -> Figures:
    values = config(sizes, work, server.url, server.store, schedule, budget)
    metrics = Path(values["metrics"])
    metrics.unlink(missing_ok=True)
    lengths = jsonlib.dumps(asdict(Lengths(sizes.median, sizes.budget)))
    before = _cpu_s(server)
    _trained(_written(metrics.with_suffix(".yaml"), values), metrics.with_suffix(".log"), {LENGTHS: lengths})
    busy = (_cpu_s(server) - before) / sizes.steps
    return row(schedule, budget, metrics, sizes) | {"server_cpu_ms_per_step": round(busy * 1e3, 1)}


def _cpu_s(server: Server) -> float:
    """Seconds that the server's processes have computed. Beside work that others do, a better measure than the
    clock."""
    return sum(cpu_seconds_of(child.process.pid) for child in server.children.values() if child.alive)


def _written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tiny_run(values), sort_keys=False))
    return path


def _trained(configuration: Path, said: Path, environment: dict[str, str]) -> None:
    """Run a trainer to its end. Raises RuntimeError with the end of its log."""
    command = [sys.executable, "-m", "loadtest.training.partial_rollouts", str(configuration)]
    with said.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        try:
            process.wait()
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{configuration.stem} ended with {process.returncode}:\n{said.read_text()[-2000:]}")


def with_lengths(lengths: Lengths) -> None:
    """From now on this process's sampled answers have these lengths. A prompt of the task has as many tokens as all
    others."""
    from trainer.rollouts.generate import Request

    asked = Request.body
    prompts: set[int] = set()

    def body(self: Request) -> dict[str, Any]:
        found = asked(self)
        if self.temperature == 0 or self.seed is None:
            return found
        prompts.add(len(self.prompt_ids))
        left = lengths.left(self.seed, len(self.prompt_ids), min(prompts))
        return found | {"max_tokens": min(self.max_tokens, left), "ignore_eos": True}

    Request.body = body  # type: ignore[method-assign]


def main(config: str) -> int:
    """Be a trainer; its exit status."""
    from trainer.main import main as train

    if LENGTHS in os.environ:
        with_lengths(Lengths(**jsonlib.loads(os.environ[LENGTHS])))
    return train(["--config", config])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
