"""Courses of demos: a base of what one builds, trains and asks, and the recipe of the quick demo.

The module loadtest/demo/real.py has another.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from loadtest.demo.scene import Scene
from trainer.config import ArithmeticData, strict
from trainer.data.problems import Arithmetic
from trainer.data.tokenizer import Tokenizer

MODEL = "demo"
LARGEST_DIGIT = 5
LEAST_GAIN = 20.0  # points of held-out accuracy that GRPO alone must bring
# One thread for the engine and one for the trainer: on two cores they would otherwise wait for each other's threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Question:
    """A held-out problem: how it is shown, what the server is asked, and the right answer."""

    shown: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Course(ABC):
    """One demo. `trainings` are its phases after `serve`, each with the method that makes its configuration."""

    seed: int = 0

    name: ClassVar[str]
    model: ClassVar[str]
    engine_args: ClassVar[tuple[str, ...]]
    kv_cache_gib: ClassVar[float]
    trainings: ClassVar[tuple[tuple[str, str], ...]]
    moments: ClassVar[dict[str, str]]
    unit: ClassVar[str]
    """What accuracy is a share of."""
    line_every: ClassVar[int]
    """Steps between two lines, where there is no terminal."""
    long_tokens: ClassVar[int]
    short_tokens: ClassVar[int]

    @property
    def phases(self) -> tuple[str, ...]:
        return ("build", "serve", *(phase for phase, _ in self.trainings), "done")

    @abstractmethod
    def build(self, run: Path) -> list[str]:
        """The command that writes the model into `run`/model."""

    @abstractmethod
    def questions(self, run: Path, count: int) -> list[Question]:
        """The first held-out problems, as the trainer evaluates them."""

    @abstractmethod
    def right(self, text: str, question: Question) -> bool:
        """Whether this text answers the question, as the trainer's reward sees it."""

    def asked(self, scene: Scene) -> str:
        """The model that clients ask for at this moment."""
        return self.model

    def enough(self, scene: Scene) -> bool:
        """Whether the training under way has shown what it is there to show; otherwise it ends by itself."""
        return False

    @abstractmethod
    def shortcoming(self, scene: Scene) -> str:
        """The promise that the training did not keep; empty as a rule."""

    @abstractmethod
    def serve_again(self, run: Path) -> list[str]:
        """The commands that serve what was trained."""


@dataclass(frozen=True)
class Recipe(Course):
    """The quick demo: budgets and seeds. `held_out` of the 216 problems are never trained on: accuracy is what greedy
    decoding gets right of them."""

    sft_steps: int = 200
    grpo_steps: int = 60
    held_out: int = 40
    noise: float = 0.6

    name = "demo"
    model = MODEL
    engine_args = ("--dtype", "float32", "--max-model-len", "256")
    kv_cache_gib = 0.25
    trainings = (("fine-tune", "sft"), ("improve", "grpo"))
    moments = {"start": "random weights", "fine-tuned": "after fine-tuning", "improved": "after GRPO"}  # noqa: RUF012
    unit = "held-out sums, greedy"
    line_every = 20
    long_tokens = 240
    short_tokens = 4

    def build(self, run: Path) -> list[str]:
        return [sys.executable, "-m", "trainer.tiny_model", str(run / "model")]

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
            "eval": [{"every": self.sft_steps, "prompts": self.held_out}],
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
            "eval": [{"every": 20, "prompts": self.held_out}],
            "save_to": str(run / "final"),
        }

    def questions(self, run: Path, count: int) -> list[Question]:
        config = strict.build(ArithmeticData, self._data(noise=0.0))
        problems = Arithmetic(config, Tokenizer(run / "model"), self.seed).held_out[:count]
        return [Question(problem.prompt, problem.prompt, problem.answer) for problem in problems]

    def right(self, text: str, question: Question) -> bool:
        return text.strip() == question.answer

    def shortcoming(self, scene: Scene) -> str:
        if scene.gain >= LEAST_GAIN:
            return ""
        return f"GRPO brought {scene.gain:+.1f} points, fewer than {LEAST_GAIN:.0f}"

    def serve_again(self, run: Path) -> list[str]:
        return [f"hotswap up --model {run / 'final'} {' '.join(self.engine_args)}"]

    def _data(self, noise: float) -> dict[str, Any]:
        problem = {"kind": "arithmetic", "operands": 3, "largest": LARGEST_DIGIT, "held_out": self.held_out}
        return problem | {"noise": noise, "mistake": "off_by_one"}

    def _publish(self, every: int) -> dict[str, Any]:
        return {"model": MODEL, "dtype": "float32", "every": every, "timeout_s": 120.0}

    def _common(self, run: Path, url: str, phase: str) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "gateway": {"url": url, "retry_s": 240.0},  # the first training begins while the engine does
            "rollout": {"max_tokens": 4, "request": "group"},
            "metrics": str(run / f"{phase}.jsonl"),
        }


def prepare_environment() -> None:
    """Settings that the processes started later inherit; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
