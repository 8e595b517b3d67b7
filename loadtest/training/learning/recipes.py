"""The tasks of the learning benchmark: three whose answers can be checked, and the ways of learning them.

A model of about a million parameters, random at first. `base` is fine-tuned on data most of which makes a systematic
mistake (one too many; parentheses forgotten; a guess where a tool should be asked), so that it answers wrong with
confidence. From it start the algorithms that learn from comparisons and rewards, none of which shows it a training
target; `sft` starts from the random model and learns right targets. Held-out problems are never trained on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.training.learning import tools as learning_tools
from trainer.data.problems import CHARACTERS

MODEL = "learning"
ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "256")
KV_CACHE_GIB = 0.25
BASE = "base"
# One thread for the engine and one for the trainer: on two cores they would otherwise wait for each other's threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

Config = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Data, rewards and budgets of a task. `data` goes into the runs, and into the base's with what `mistaken` says
    instead; in both, `{work}` is the benchmark's directory. `ways` are those that the task can be learned by."""

    name: str
    title: str
    data: Config
    rewards: list[Config]
    max_tokens: int
    base_steps: int
    rl_steps: int
    sft_steps: int = 0
    dpo_steps: int = 0
    mistaken: Config = field(default_factory=lambda: {"noise": 0.6})
    characters: str = CHARACTERS
    environment: Config | None = None
    ways: tuple[str, ...] = ("sft", "dpo", "grpo", "ppo", "grpo-async")

    @property
    def held_out(self) -> int:
        """How many problems the runs never see."""
        return int(self.data.get("held_out", learning_tools.HELD_OUT))


@dataclass(frozen=True)
class Way:
    """One way of learning: the algorithm's section, and what differs from the common configuration."""

    name: str
    algorithm: Config
    batch: int
    optimizer: Config
    start: str = BASE  # the model it starts from: `base`, or `random`
    steps: str = "rl_steps"
    changes: Config = field(default_factory=dict)


_SUMS = {"kind": "arithmetic", "operands": 3, "largest": 5, "mistake": "off_by_one", "held_out": 40}
_PROGRAMS = {"kind": "code_tasks", "held_out": 60}
_PRODUCTS = {
    "kind": "jsonl",
    "path": "{work}/calculator-problems.jsonl",
    "eval_path": "{work}/calculator-held-out.jsonl",
    "cache_dir": "{work}/cache",
}

TASKS = (
    Task(
        name="arithmetic",
        title="the sum of three digits, `2+5+4=` -> `11`",
        data=_SUMS,
        rewards=[{"kind": "exact_match"}],
        max_tokens=4,
        base_steps=200,
        sft_steps=200,
        dpo_steps=60,
        rl_steps=60,
    ),
    Task(
        name="code",
        title="a small program, `add 3, mul 2:` -> `f=lambda x:(x+3)*2`, run against tests in the sandbox",
        data=_PROGRAMS,
        rewards=[{"kind": "code"}],
        max_tokens=24,
        base_steps=100,
        sft_steps=100,
        dpo_steps=100,
        rl_steps=20,
    ),
    Task(
        name="calculator",
        title="the product of two numbers, `38*47=` -> `1786`, with a calculator to ask",
        data=_PRODUCTS,
        mistaken={"path": "{work}/calculator-demonstrations.jsonl"},
        rewards=[{"kind": "exact_match"}],
        max_tokens=72,
        base_steps=250,
        rl_steps=60,
        characters=learning_tools.CHARACTERS,
        environment=learning_tools.ENVIRONMENT,
        ways=("grpo",),
    ),
)

_SFT = {"lr": 2e-3, "warmup_steps": 20, "decay": "cosine"}
_RL = {"lr": 3e-4, "decay": "linear"}

WAYS = (
    Way("sft", {"name": "sft"}, 128, _SFT, start="random", steps="sft_steps"),
    # At several times this rate DPO passes through its best and ends with neither answer: both become improbable.
    Way("dpo", {"name": "dpo", "beta": 0.1}, 64, {"lr": 1e-5, "warmup_steps": 5, "decay": "linear"}, steps="dpo_steps"),
    Way("grpo", {"name": "grpo", "samples_per_prompt": 8}, 16, _RL),
    Way(
        "ppo",
        {"name": "ppo", "samples_per_prompt": 4, "critic_lr": 1e-3, "critic_warmup": 5, "epochs": 2, "minibatches": 2},
        32,
        _RL,
    ),
    Way(
        "grpo-async",
        {"name": "grpo", "samples_per_prompt": 8, "correction": {"kind": "truncated", "max_lag": 2}},
        16,
        _RL,
        changes={"schedule": {"name": "async", "max_lag": 2}},
    ),
)


def base(task: Task, work: Path, seed: int) -> Config:
    """The configuration that learns the task's mistake. It needs no server."""
    return {
        "model": {"path": str(work / f"{task.name}-random")},
        "data": _placed(task.data | task.mistaken, work),
        "algorithm": {"name": "sft"},
        "steps": task.base_steps,
        "batch": 128,
        "seed": seed,
        "optimizer": dict(_SFT),
        "metrics": str(work / f"{task.name}-base.jsonl"),
        "save_to": str(work / f"{task.name}-{BASE}"),
    }


def recipe(task: Task, way: Way, work: Path, url: str, seed: int) -> Config:
    """The configuration of one run against a live server, evaluated at ten points."""
    steps = int(getattr(task, way.steps))
    config: Config = {
        "model": {"path": str(work / f"{task.name}-{way.start}")},
        "data": _placed(task.data, work),
        "algorithm": dict(way.algorithm),
        "steps": steps,
        "batch": way.batch,
        "seed": seed,
        "optimizer": dict(way.optimizer),
        "rewards": [dict(reward) for reward in task.rewards],
        "rollout": {"max_tokens": task.max_tokens},
        "gateway": {"url": url},
        "publish": {"model": MODEL, "dtype": "float32", "every": publish_every(way, steps), "timeout_s": 120.0},
        "eval": [{"every": steps // 10, "prompts": task.held_out}],
        "metrics": str(work / f"{task.name}-{way.name}.jsonl"),
    }
    if task.environment is not None:
        config["environment"] = dict(task.environment)
    return config | way.changes


def _placed(data: Config, work: Path) -> Config:
    return {key: value.format(work=work) if isinstance(value, str) else value for key, value in data.items()}


def publish_every(way: Way, steps: int) -> int:
    """Those that sample do so from the newest weights; the others are served when they are evaluated."""
    return 1 if "samples_per_prompt" in way.algorithm else steps // 10


def prepare_environment(environment: Mapping[str, str] = ENVIRONMENT) -> None:
    """Settings that the processes started later inherit; what the user has set stays."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
