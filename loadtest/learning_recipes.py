"""What the learning benchmark trains: two tasks whose answers can be checked, and every way of learning them.

A model of about a million parameters, random at first. `base` is fine-tuned on data most of which makes a systematic
mistake (one too many; parentheses forgotten), so that it answers wrong with confidence. From it start the algorithms
that learn from comparisons and rewards, none of which shows it a training target; `sft` starts from the random model
and learns right targets. Held-out problems are never trained on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "learning"
ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "256")
KV_CACHE_GIB = 0.25
BASE = "base"
# One thread for the engine and one for the trainer: on two cores they would otherwise wait for each other's threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

Config = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Data, rewards and budgets of a task. `noise` is the share of the base's targets that are mistaken."""

    name: str
    title: str
    data: Config
    rewards: list[Config]
    max_tokens: int
    noise: float
    sft_steps: int
    dpo_steps: int
    rl_steps: int

    @property
    def held_out(self) -> int:
        return int(self.data["held_out"])


@dataclass(frozen=True)
class Way:
    """One way of learning: the algorithm's section, and what differs from the common configuration."""

    name: str
    algorithm: Config
    batch: int
    optimizer: Config
    start: str = BASE  # the directory of the model it starts from
    steps: str = "rl_steps"
    changes: Config = field(default_factory=dict)


TASKS = (
    Task(
        name="arithmetic",
        title="the sum of three digits, `2+5+4=` -> `11`",
        data={"kind": "arithmetic", "operands": 3, "largest": 5, "mistake": "off_by_one", "held_out": 40},
        rewards=[{"kind": "exact_match"}],
        max_tokens=4,
        noise=0.6,
        sft_steps=200,
        dpo_steps=60,
        rl_steps=60,
    ),
    Task(
        name="code",
        title="a small program, `add 3, mul 2:` -> `f=lambda x:(x+3)*2`, run against tests in the sandbox",
        data={"kind": "code_tasks", "held_out": 60},
        rewards=[{"kind": "code"}],
        max_tokens=24,
        noise=0.6,
        sft_steps=100,
        dpo_steps=100,
        rl_steps=20,
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
        "model": {"path": str(work / "random")},
        "data": task.data | {"noise": task.noise},
        "algorithm": {"name": "sft"},
        "steps": task.sft_steps,
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
        "model": {"path": str(work / (f"{task.name}-{BASE}" if way.start == BASE else way.start))},
        "data": dict(task.data),
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
    return config | way.changes


def publish_every(way: Way, steps: int) -> int:
    """Those that sample do so from the newest weights; the others are served when they are evaluated."""
    return 1 if "samples_per_prompt" in way.algorithm else steps // 10


def prepare_environment(environment: Mapping[str, str] = ENVIRONMENT) -> None:
    """Settings that the processes started later inherit; what the user has set stays."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
