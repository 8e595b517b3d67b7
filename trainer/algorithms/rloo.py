"""REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740).

A = R - mean of R over the prompt's other samples, with R = reward - kl_coef * sum over tokens of (old - reference).
Being linear, the two parts are computed apart: the rewards' on rank 0, the KL's once the log-probs are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace

from trainer.algorithms.advantages import leave_one_out, normalized_by_sequence, over_group
from trainer.algorithms.base import ADVANTAGES
from trainer.algorithms.policy import PolicyGradient
from trainer.batch import MASK, Fields, Sequence, sequence_sum, to_tokens
from trainer.config import RlooConfig
from trainer.data.records import Record
from trainer.rollout import Group

GROUP = "group"
_EXACT = 1 << 24  # whole numbers below are exact in float32


class Rloo(PolicyGradient[RlooConfig]):
    """Clipped policy gradient with leave-one-out advantages."""

    def __init__(self, config: RlooConfig, max_tokens: int | None = None) -> None:
        super().__init__(config, max_tokens)
        self._number = itertools.count()

    def credit(self, rewards: list[float]) -> list[float]:
        return leave_one_out(rewards)

    def sequences(self, records: Seq[Record], groups: Seq[Group], version: int = 0) -> list[Sequence]:
        """As every policy gradient's, and numbered by group where KL needs to know."""
        if self.config.kl_coef == 0:
            return super().sequences(records, groups, version)
        result: list[Sequence] = []
        for group in groups:
            number = float(next(self._number) % _EXACT)
            sampled = super().sequences([], [group], version)
            result += [replace(s, per_sequence={GROUP: number}) for s in sampled]
        return result

    def prepare(self, fields: Fields) -> Fields:
        advantages = fields[ADVANTAGES]
        if GROUP in fields:
            real = sequence_sum(fields[MASK], fields) > 0
            penalties = sequence_sum(self._kl_penalty(fields), fields)
            advantages = advantages - to_tokens(over_group(penalties, fields[GROUP], real), fields)
        if self.config.normalize_advantages:
            advantages = normalized_by_sequence(advantages, fields)
        return super().prepare(fields | {ADVANTAGES: advantages})
