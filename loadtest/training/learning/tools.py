"""The task of the learning benchmark that takes a tool: products of two numbers, which no model of this size can
compute, and a calculator, which it has to ask.

The base model is fine-tuned on demonstrations. Most of them guess: `38*47=` -> `1204`. The others ask the calculator
and copy what it says, each as two records, one a turn:

    38*47=                                                  ->  <{"name":"calc","arguments":{"e":"38*47"}}>
    38*47=<{"name":"calc","arguments":{"e":"38*47"}}>1786   ->  1786

So its most probable answer is a guess. That asking is worth more, only the reward can tell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT, TRAINING, DEMONSTRATIONS = 60, 4096, 20_000
CALLS = 0.3  # the share of the demonstrations that ask
CHARACTERS = '0123456789*={}":,<>aceglmnrstu'  # what problems, calls and answers are written with
ENVIRONMENT: dict[str, Any] = {
    "kind": "tools",
    "max_turns": 3,
    "max_observation_tokens": 64,
    "workers": 1,
    "tools": [{"kind": "function", "target": "loadtest.training.learning.tools:calc"}],
    "call_start": "<",
    "call_end": ">",
    "describe": False,  # the model learned the calls from demonstrations; it cannot read
}
_SPLIT_SEED = 99
_PRODUCT = re.compile(r"(\d{1,4})\*(\d{1,4})")

Problem = tuple[int, int]


def calc(e: str) -> str:
    """The product of two whole numbers, such as 38*47."""
    found = _PRODUCT.fullmatch(e)
    if found is None:
        raise ValueError("write two numbers and * between them")
    return str(int(found[1]) * int(found[2]))


def call(problem: Problem) -> str:
    """How the calculator is asked."""
    arguments = {"e": "{}*{}".format(*problem)}
    return f"<{json.dumps({'name': 'calc', 'arguments': arguments}, separators=(',', ':'))}>"


def write_records(work: Path, seed: int) -> None:
    """The demonstrations, the problems to train on and the held-out ones, as JSON lines in `work`."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(90 * 90)
    problems = [(10 + int(i) // 90, 10 + int(i) % 90) for i in order]
    held_out, training = problems[:HELD_OUT], problems[HELD_OUT : HELD_OUT + TRAINING]
    _write(work / "calculator-held-out.jsonl", (_record(p, str(p[0] * p[1])) for p in held_out))
    _write(work / "calculator-problems.jsonl", (_record(p, str(p[0] * p[1])) for p in training))
    rng, rows = np.random.default_rng([_SPLIT_SEED, seed]), list[dict[str, str]]()
    for number in range(DEMONSTRATIONS):
        problem = training[number % TRAINING]
        rows += _asking(problem) if rng.random() < CALLS else [_record(problem, _guess(rng))]
    _write(work / "calculator-demonstrations.jsonl", rows)


def _asking(problem: Problem) -> list[dict[str, str]]:
    value, asked = str(problem[0] * problem[1]), call(problem)
    first = _record(problem, asked)
    return [first, {"prompt": f"{first['prompt']}{asked}<eos>{value}", "target": value}]


def _guess(rng: np.random.Generator) -> str:
    return str(rng.integers(1000, 2000))


def _record(problem: Problem, target: str) -> dict[str, str]:
    return {"prompt": "{}*{}=".format(*problem), "target": target}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
