"""Tasks of reasoning-gym (PyPI): over a hundred generators of problems, each with its own verifier.

The package generates an entry from a task's name, its options, a seed and a number, so nothing is stored: a record
carries these, and the reward (trainer/rewards/gym.py) makes the entry again to ask its verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from trainer.config import GymTask, ReasoningGymData
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError

HELD_OUT_SEED = 99  # the same problems whatever the run's seed
TRIES = 100  # to find a problem that is not held out
KEY = "reasoning_gym"  # in a record's extra


class ReasoningGym:
    """`config.records` problems, of the tasks by their weights. Record i is a pure function of (seed, i). No question
    that is held out is trained on."""

    def __init__(self, config: ReasoningGymData, tokenizer: Tokenizer, seed: int) -> None:
        """Raises ConfigError when the package is missing, or a task cannot be made."""
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        weights = np.array([task.weight for task in config.tasks])
        self._shares = weights / weights.sum()
        self._makers: dict[tuple[str, int], Any] = {}
        entries = [self._entry(HELD_OUT_SEED, i) for i in range(config.held_out)]
        self._tested = {entry["question"] for _, _, entry in entries}
        self.held_out: Sequence[Record] = [self._record(i, *entry) for i, entry in enumerate(entries)]

    def __len__(self) -> int:
        return self._config.records

    def __getitem__(self, index: int) -> Record:
        for again in range(TRIES):
            found = self._entry(self._seed + HELD_OUT_SEED + 1, index + again * len(self))
            if found[2]["question"] not in self._tested:
                return self._record(index, *found)
        problem = f"{found[0].name} has too few problems: {TRIES} in a row are among the {len(self.held_out)} held out"
        raise ConfigError("data.held_out", problem, "Lower it, or make the task's options wider")

    def _entry(self, seed: int, number: int) -> tuple[GymTask, dict[str, int], dict[str, Any]]:
        """The task of a place, where its problem is found, and the problem."""
        chosen = int(np.random.default_rng([seed, number]).choice(len(self._shares), p=self._shares))
        task, place = self._config.tasks[chosen], {"seed": seed, "number": number}
        return task, place, problem_of(msgspec.structs.asdict(task), place)

    def _record(self, index: int, task: GymTask, place: dict[str, int], entry: dict[str, Any]) -> Record:
        text = f"{entry['question']}\n{self._config.instructions}" if self._config.instructions else entry["question"]
        messages = ({"role": "user", "content": text},)
        if self._tokenizer.has_chat_template and self._config.chat_template:
            prompt, ids = self._tokenizer.chat(messages)
        else:
            prompt, ids = text, self._tokenizer.prompt(text)
        extra = {KEY: {"name": task.name, "options": task.options, **place}}
        return Record(index, prompt, str(entry["answer"]), ids, (), extra=extra, messages=messages)


def problem_of(task: dict[str, Any], place: dict[str, int]) -> dict[str, Any]:
    """The entry of a task (`name`, `options`) at a place (`seed`, `number`). Raises ConfigError."""
    found: dict[str, Any] = maker(task, place["seed"], place["number"])[place["number"]]
    return found


def package() -> Any:
    """The package reasoning-gym. Raises ConfigError when it is missing."""
    try:
        import reasoning_gym
    except ImportError:
        advice = "Install it: pip install reasoning-gym"
        raise ConfigError("data.kind", "the package reasoning-gym is missing", advice) from None
    return reasoning_gym


def maker(task: dict[str, Any], seed: int, number: int) -> Any:
    """The package's data set that makes the entry. Raises ConfigError when it is missing or refuses the options."""
    reasoning_gym = package()
    try:
        return reasoning_gym.create_dataset(task["name"], seed=seed, size=number + 1, **task["options"])
    except (ValueError, TypeError, AssertionError) as error:
        advice = "See reasoning-gym's gallery of tasks for names and options"
        raise ConfigError("data.tasks", f"{task['name']} {task['options']}: {error}", advice) from None
