"""TRL's GRPOTrainer on the benchmark's task, a process of its own: `python -m loadtest.training.rl_step.trl_run JSON`.

It generates with transformers: its vLLM modes want CUDA (the server mode moves weights over NCCL, the colocated one
asks for a GPU's memory share). Gradient checkpointing, on by default there, is off, since ours does not recompute
either. The reward is a coroutine over the whole batch, as its documentation advises for rewards that wait.
Prints one JSON line a step: seconds, its phases in milliseconds, and how many tokens were sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from loadtest.training.rl_step import task as tasks
from loadtest.training.rl_step.task import Task
from trainer.config import LINEAR_LAYERS, ArithmeticData, strict
from trainer.data.problems import Arithmetic
from trainer.data.tokenizer import Tokenizer


class Steps(TrainerCallback):  # type: ignore[misc]
    """Prints what a step took; the phases are added to by the wrapped methods."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.tokens = 0
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        ms = {name: round(value, 3) for name, value in self.ms.items()}
        ms["train_ms"] = round(seconds * 1e3 - sum(ms.values()), 3)
        print(json.dumps({"seconds": seconds, "tokens": self.tokens, **ms}), flush=True)
        self.ms, self.tokens = {}, 0

    def timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose time counts as `phase`."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            self.ms[phase] = self.ms.get(phase, 0.0) + (time.perf_counter() - began) * 1e3
            return result

        return run


def reward(kind: str) -> Callable[..., Any]:
    """TRL's form of a reward: lists of a batch in, values out."""
    one = getattr(tasks, kind)

    async def rewards(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        triples = zip(prompts, completions, answer, strict=True)
        return list(await asyncio.gather(*(one(*triple) for triple in triples)))

    return rewards


def records(model: Path, task: Task) -> Dataset:
    """The prompts and answers that our trainer gets from its arithmetic data set."""
    data = Arithmetic(strict.build(ArithmeticData, tasks.DATA), Tokenizer(model), task.seed)
    rows = [data[i] for i in range(len(data))]
    return Dataset.from_dict({"prompt": [row.prompt for row in rows], "answer": [row.answer for row in rows]})


def adapter(task: Task) -> Any:
    """The adapter that ours trains, as PEFT's configuration; None where all weights are trained."""
    from peft import LoraConfig

    layers: list[str] = list(LINEAR_LAYERS)
    return LoraConfig(r=task.rank, lora_alpha=2 * task.rank, target_modules=layers) if task.rank else None


def main(model: Path, kind: str, task: Task, work: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    batch = task.prompts * task.samples
    config = GRPOConfig(
        output_dir=str(work),
        use_cpu=True,
        bf16=False,
        max_steps=task.steps,
        per_device_train_batch_size=batch,
        num_generations=task.samples,
        max_completion_length=task.max_tokens,
        temperature=1.0,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=task.seed,
    )
    steps = Steps()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward(kind),
        args=config,
        train_dataset=records(model, task),
        peft_config=adapter(task),
        callbacks=[steps],
    )
    generate, score = trainer._generate, trainer._calculate_rewards

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        steps.tokens += sum(len(ids) for ids in result[1])
        return result

    trainer._generate = steps.timed("rollout_ms", counted)
    trainer._calculate_rewards = steps.timed("reward_ms", score)
    trainer.train()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    fields = {field.name for field in dataclasses.fields(Task)}
    main(
        Path(asked["model"]),
        asked["reward"],
        Task(**{k: v for k, v in asked["task"].items() if k in fields}),
        Path(asked["work"]),
    )
