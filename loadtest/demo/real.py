"""The demo with a real model: SmolLM2-135M-Instruct learns to answer sums, as an adapter, by GRPO.

The model can add, but it talks: of its sampled answers to a chat message few give the right number. GRPO trains a
LoRA adapter on a task of reasoning-gym until the held-out accuracy has doubled, and greedy answers are no worse.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.demo.recipe import Course, Question
from loadtest.demo.scene import HELD_OUT, Scene
from trainer.config import ReasoningGymData, strict
from trainer.data.gym import ReasoningGym
from trainer.data.tokenizer import Tokenizer

ADAPTER = "sums"
RANK = 8
GREEDY = "greedy"  # the evaluation set of greedy answers
TIMES = 2.0  # held-out accuracy at the end, against that at the start
LEAST = 0.10  # of accuracy: a small start doubles by luck
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class RealRecipe(Course):
    """Sizes for two CPU cores. `held_out` problems are never trained on: accuracy is what `samples` answers to each,
    sampled at temperature 1, get right of them."""

    steps: int = 40
    batch: int = 4
    group: int = 8
    held_out: int = 64
    samples: int = 4
    eval_every: int = 5

    name = "demo-real"
    model = "smollm2"
    # A step of the engine takes few tokens of prompts, so that the streams go on while a rollout begins.
    engine_args = (
        "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-batched-tokens", "512",
        "--enable-lora", "--max-lora-rank", str(RANK),
    )  # fmt: skip
    kv_cache_gib = 0.5
    trainings = (("improve", "grpo"),)
    moments = {"start": "as it came", "improved": "after GRPO"}  # noqa: RUF012
    unit = "held-out sums, sampled"
    line_every = 1
    long_tokens = 96
    short_tokens = 16

    def build(self, run: Path) -> list[str]:
        return [sys.executable, "-m", "loadtest.models.smollm", str(run / "model")]

    def grpo(self, run: Path, url: str) -> dict[str, Any]:
        """An adapter of the two layers that LoRA's authors chose, published after every step."""
        sets = {"every": self.eval_every, "prompts": self.held_out}
        return {
            "model": {"path": str(run / "model"), "dtype": "float32"},
            "lora": {"name": ADAPTER, "rank": RANK, "alpha": 2 * RANK, "target_modules": ["q_proj", "v_proj"]},
            "data": self._data(),
            "algorithm": {"name": "grpo", "samples_per_prompt": self.group},
            "rewards": [{"kind": "math"}],
            "steps": self.steps,
            "batch": self.batch,
            "micro_batch": 16,
            "seed": self.seed,
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_tokens": self.short_tokens},
            "gateway": {"url": url, "retry_s": 300.0},
            "publish": {"model": self.model, "dtype": "bfloat16", "timeout_s": 300.0},
            "eval": [{**sets, "samples": self.samples}, {**sets, "name": GREEDY}],
            "save_to": str(run / "adapter"),
            "save_best": True,
            "faults": {"grace_s": 900.0},
            "metrics": str(run / "grpo.jsonl"),
        }

    def questions(self, run: Path, count: int) -> list[Question]:
        config = strict.build(ReasoningGymData, self._data())
        problems = ReasoningGym(config, Tokenizer(run / "model"), self.seed).held_out[:count]
        return [Question(_sum(problem.messages[0]["content"]), problem.prompt, problem.answer) for problem in problems]

    def right(self, text: str, question: Question) -> bool:
        return NUMBER.findall(text)[-1:] == [question.answer]

    def asked(self, scene: Scene) -> str:
        return ADAPTER if scene.evals else self.model  # it is there when it has been evaluated

    def enough(self, scene: Scene) -> bool:
        return "improved" in scene.accuracy and not self.shortcoming(scene)

    def shortcoming(self, scene: Scene) -> str:
        start, improved = scene.accuracy["start"], scene.accuracy["improved"]
        if improved < max(TIMES * start, start + LEAST):
            return f"held-out accuracy went from {start:.1%} to {improved:.1%}, which is not {TIMES:g} times as much"
        greedy = [event["accuracy"] for event in scene.evals if event["set"] == GREEDY]
        if len(greedy) < sum(event["set"] == HELD_OUT for event in scene.evals):
            return "the greedy answers of the last evaluation are still to come"
        if greedy[-1] < greedy[0]:
            return f"the accuracy of greedy answers fell from {greedy[0]:.1%} to {greedy[-1]:.1%}"
        return ""

    def serve_again(self, run: Path) -> list[str]:
        return [
            f"hotswap up --model {run / 'model'} --name {self.model} {' '.join(self.engine_args)}",
            f"hotswap weights push {run / 'adapter/best'} --part lora/{ADAPTER}",
        ]

    def _data(self) -> dict[str, Any]:
        options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        return {
            "kind": "reasoning_gym",
            "tasks": [{"name": "chain_sum", "options": options}],
            "instructions": "Answer with one number.",
            "held_out": self.held_out,
        }


def _sum(question: str) -> str:
    """`4 - 1 =` of the whole text of a question."""
    return question.partition("\n")[0].rpartition(": ")[2]
