"""What the demo trains, on what, and how its engine runs. Found by trying: see docs/demo.md for what to expect.

The task is the sum of three digits. Most fine-tuning targets are one too many, so the fine-tuned model answers, with
confidence, one too many; GRPO's reward checks the sum, which is all it takes to put that right.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ArithmeticData, strict
from trainer.data.problems import Arithmetic
from trainer.data.tokenizer import Tokenizer

MODEL = "demo"
LARGEST_DIGIT = 5
ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "256")
KV_CACHE_GIB = 0.25
# One thread for the engine and one for the trainer: on two cores they would otherwise wait for each other's threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Recipe:
    """Budgets and seeds. `held_out` of the 216 problems are never trained on: accuracy is what greedy decoding gets
    right of them."""

    seed: int = 0
    sft_steps: int = 200
    grpo_steps: int = 60
    held_out: int = 40
    noise: float = 0.6

    def sft(self, run: Path, url: str) -> dict[str, Any]:
        """Fine-tuning from the random model; publishes now and then."""
        return self._common(run, url, "sft") | {
            "model": {"path": str(run / "model")},
            "algorithm": {"name": "sft"},
            "data": self._data(noise=self.noise),
            "steps": self.sft_steps,
            "batch": 128,
            "optimizer": {"lr": 2e-3, "warmup_steps": 20, "decay": "cosine"},
            "publish": self._publish(every=10),
            "eval": {"every": self.sft_steps, "prompts": self.held_out},
            "save_to": str(run / "fine-tuned"),
        }

    def grpo(self, run: Path, url: str) -> dict[str, Any]:
        """GRPO from the fine-tuned model; publishes every step."""
        return self._common(run, url, "grpo") | {
            "model": {"path": str(run / "fine-tuned")},
            "algorithm": {"name": "grpo", "samples_per_prompt": 8},
            "data": self._data(noise=0.0),
            "steps": self.grpo_steps,
            "batch": 16,
            "optimizer": {"lr": 3e-4, "decay": "linear"},
            "rewards": [{"kind": "exact_match"}],
            "publish": self._publish(every=1),
            "eval": {"every": 20, "prompts": self.held_out},
            "save_to": str(run / "final"),
        }

    def questions(self, run: Path, count: int) -> list[tuple[str, str]]:
        """(prompt, right answer) of the first held-out problems, as the trainer evaluates them."""
        config = strict.build(ArithmeticData, self._data(noise=0.0))
        problems = Arithmetic(config, Tokenizer(run / "model"), self.seed).held_out[:count]
        return [(problem.prompt, problem.answer) for problem in problems]

    def _data(self, noise: float) -> dict[str, Any]:
        problem = {"kind": "arithmetic", "operands": 3, "largest": LARGEST_DIGIT, "held_out": self.held_out}
        return problem | {"noise": noise, "mistake": "off_by_one"}

    def _publish(self, every: int) -> dict[str, Any]:
        return {"model": MODEL, "dtype": "float32", "every": every, "timeout_s": 120.0}

    def _common(self, run: Path, url: str, phase: str) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "gateway": {"url": url},
            "rollout": {"max_tokens": 4, "request": "group"},
            "metrics": str(run / f"{phase}.jsonl"),
        }


def prepare_environment() -> None:
    """Settings that the processes started later inherit; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
