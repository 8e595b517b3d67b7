"""Addition problems, `3+4=` -> `07`, with targets that can be wrong on purpose.

A model that is fine-tuned on wrong targets learns the mistake; a reward that checks the sum unlearns it. The kinds of
mistake, made in a share `noise` of the training targets:

    random       any number up to the largest sum
    off_by_one   one too many: a systematic mistake, which greedy decoding repeats once it is the majority
    carry        the tens digit forgotten

Every record is a preference too, of the right answer over a mistaken one, whatever its target.

Held-out problems are the same for every seed, are never trained on, and have right answers.
"""

from __future__ import annotations

import itertools

import numpy as np

from trainer.config import ArithmeticData
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer

COPIES = 64  # of every problem, each with its own chance of a wrong target
_SPLIT_SEED = 99


class Arithmetic:
    """`COPIES` records of every training problem. Record i is a pure function of (seed, i)."""

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
