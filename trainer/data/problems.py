"""Problems that are made up, with targets that can be wrong on purpose: additions, and small programs to write.

A model that is fine-tuned on wrong targets learns the mistake; a reward that checks the answer unlearns it. Every
record is a preference too, of the right answer over a mistaken one, whatever its target. Held-out problems are the same
for every seed, are never trained on, and have right targets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from trainer.config import ArithmeticData, CodeTasksData
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer

COPIES = 64  # of every problem, each with its own chance of a wrong target
_SPLIT_SEED = 99


class Arithmetic:
    """Addition problems, `3+4=` -> `07`: `COPIES` records of each training problem. Record i is a pure function of
    (seed, i). A share `noise` of the training targets has a mistake:

        random       any number up to the largest sum
        off_by_one   one too many: a systematic mistake, which greedy decoding repeats once it is the majority
        carry        the tens digit forgotten
    """

    def __init__(self, config: ArithmeticData, tokenizer: Tokenizer, seed: int) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        problems = list(itertools.product(range(config.largest + 1), repeat=config.operands))
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(problems))
        shuffled = [problems[i] for i in order]
        self._training = shuffled[config.held_out :]
        held_out = enumerate(shuffled[: config.held_out])
        self.held_out = [self._record(i, p, sum(p), self._mistake(sum(p), _rng(0, i))) for i, p in held_out]

    def __len__(self) -> int:
        return COPIES * len(self._training)

    def __getitem__(self, index: int) -> Record:
        problem = self._training[index % len(self._training)]
        rng = _rng(self._seed, index)
        wrong = rng.random() < self._config.noise
        mistake = self._mistake(sum(problem), rng)
        return self._record(index, problem, mistake if wrong else sum(problem), mistake)

    def _mistake(self, total: int, rng: np.random.Generator) -> int:
        if self._config.mistake == "off_by_one":
            return total + 1
        if self._config.mistake == "carry":
            return total % 10
        return int(rng.integers(0, self._config.largest * self._config.operands + 1))

    def _record(self, index: int, problem: tuple[int, ...], target: int, mistake: int) -> Record:
        prompt = "+".join(str(n) for n in problem) + "="
        rejected = mistake if mistake != sum(problem) else mistake + 1  # a random mistake may be right
        return Record(
            index=index,
            prompt=prompt,
            answer=f"{sum(problem):02d}",
            prompt_ids=self._tokenizer.prompt(prompt),
            target_ids=self._tokenizer.continuation(f"{target:02d}"),
            chosen_ids=self._tokenizer.continuation(f"{sum(problem):02d}"),
            rejected_ids=self._tokenizer.continuation(f"{rejected:02d}"),
        )


def _rng(*numbers: int) -> np.random.Generator:
    return np.random.default_rng(list(numbers))


CHARACTERS = "0123456789+-*/%()=:, abdfilmosuvx"  # what prompts and programs are written with
INPUTS = (0, 1, 2, 5, 11)

Step = tuple[str, int]
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "//", "mod": "%"}
_APPLY: dict[str, Callable[[int, int], int]] = {
    "add": int.__add__,
    "sub": int.__sub__,
    "mul": int.__mul__,
    "div": int.__floordiv__,
    "mod": int.__mod__,
}


class CodeTasks:
    """Small programs to write, `add 3, mul 2:` -> `f=lambda x:(x+3)*2`, judged by running them: `COPIES` records of
    each training problem. Record i is a pure function of (seed, i).

    In a share `noise` of the training targets the parentheses are forgotten, a mistake that reads well and computes
    something else: a model that is fine-tuned on it repeats it, and only a reward that runs the tests tells it
    otherwise. `extra["tests"]` are assertions about `f`; at least one of them tells the mistake from the right program.
    """

    def __init__(self, config: CodeTasksData, tokenizer: Tokenizer, seed: int) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        problems = all_problems()
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(problems))
        shuffled = [problems[i] for i in order]
        self._training = shuffled[config.held_out :]
        held_out = enumerate(shuffled[: config.held_out])
        self.held_out = [self._record(i, problem, mistaken=False) for i, problem in held_out]

    def __len__(self) -> int:
        return COPIES * len(self._training)

    def __getitem__(self, index: int) -> Record:
        mistaken = np.random.default_rng([self._seed, index]).random() < self._config.noise
        return self._record(index, self._training[index % len(self._training)], bool(mistaken))

    def _record(self, index: int, problem: tuple[Step, Step], mistaken: bool) -> Record:
        prompt = ", ".join(f"{name} {number}" for name, number in problem) + ":"
        right, wrong = program(problem, parentheses=True), program(problem, parentheses=False)
        chosen_ids, rejected_ids = self._tokenizer.continuation(right), self._tokenizer.continuation(wrong)
        return Record(
            index=index,
            prompt=prompt,
            answer=right,
            prompt_ids=self._tokenizer.prompt(prompt),
            target_ids=rejected_ids if mistaken else chosen_ids,
            chosen_ids=chosen_ids,
            rejected_ids=rejected_ids,
            extra={"tests": [f"assert f({x})=={expected(problem, x)}" for x in INPUTS]},
        )


def all_problems() -> list[tuple[Step, Step]]:
    """An addition or subtraction, then a multiplication, division or remainder: where parentheses matter."""
    firsts = itertools.product(("add", "sub"), range(1, 10))
    seconds = itertools.product(("mul", "div", "mod"), range(2, 10))
    return list(itertools.product(firsts, seconds))


def program(problem: tuple[Step, Step], parentheses: bool) -> str:
    """The source of `f`, right with parentheses."""
    (first, a), (second, b) = problem
    inner = f"x{_SIGNS[first]}{a}"
    return f"f=lambda x:{f'({inner})' if parentheses else inner}{_SIGNS[second]}{b}"


def expected(problem: tuple[Step, Step], x: int) -> int:
    """The value that the right program returns."""
    for name, number in problem:
        x = _APPLY[name](x, number)
    return x
