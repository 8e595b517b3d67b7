"""Algorithms that learn from records alone: supervised fine-tuning, and direct preference optimisation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import torch
from torch.nn.functional import logsigmoid, pad

from trainer.algorithms.base import REFERENCE_LOGPROBS, AlgorithmBase, LossOutput
from trainer.batch import MASK, SEGMENTS, Fields, Sequence, sequence_sum
from trainer.config import DpoConfig, SftConfig
from trainer.data.records import Learns, Record
from trainer.errors import DataError
from trainer.trajectory import TrajectoryGroup


class Sft(AlgorithmBase):
    """Supervised fine-tuning: cross-entropy on the records' targets, averaged over tokens."""

    learns: Learns = "target"

    def __init__(self, config: SftConfig) -> None:
        self.config = config

    def sequences(self, records: Seq[Record], groups: Seq[TrajectoryGroup], step: int = 0) -> list[Sequence]:
        """One sequence per record. Raises DataError for a record without a target."""
        for record in records:
            if not record.target_ids:
                raise DataError(f"record {record.index} has no target to learn. Give every SFT record one.")
        if self.config.on_prompt:
            return [Sequence(r.prompt_ids, r.target_ids, train_on_prompt=True) for r in records]
        return [Sequence(r.prompt_ids, r.target_ids, mask=r.mask or None) for r in records]

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """Negative log-likelihood."""
        return LossOutput(-(logprobs_BT * fields[MASK]).sum(), fields[MASK].sum())


class Dpo(AlgorithmBase):
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290): makes the chosen answer more probable than
    the rejected one, relative to the reference.

    With s = sum over an answer's tokens of (logprob - reference logprob) and d = s(chosen) - s(rejected), a pair's loss
    is

        sigmoid   -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), e = label_smoothing
        robust    ((1 - e) -log sigmoid(beta d) - e -log sigmoid(-beta d)) / (1 - 2 e)        (arXiv 2403.00409)
        ipo       (d' - 1 / (2 beta))^2, d' from means over tokens in place of sums           (arXiv 2310.12036)

    and a step's the mean over pairs.
    """

    learns: Learns = "preference"
    needs = frozenset({REFERENCE_LOGPROBS})
    rows_together = 2

    def __init__(self, config: DpoConfig) -> None:
        self.config = config
        self.minibatches = config.minibatches
        self._number = itertools.count()

    def sequences(self, records: Seq[Record], groups: Seq[TrajectoryGroup], step: int = 0) -> list[Sequence]:
        """Two sequences per record, chosen first. Raises DataError for a record that is no preference."""
        result = []
        for r in records:
            if not (r.chosen_ids and r.rejected_ids):
                raise DataError(f"record {r.index} has no chosen and rejected answer. Give every DPO record both.")
            pair = next(self._number)
            for ids, mask in ((r.chosen_ids, r.chosen_mask), (r.rejected_ids, r.rejected_mask)):
                result.append(Sequence(r.prompt_ids, ids, together=pair, mask=mask or None))
        return result

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """The formula above. Metrics are means over pairs."""
        beta, mask = self.config.beta, fields[MASK]
        scores = _pairs(sequence_sum((logprobs_BT - fields[REFERENCE_LOGPROBS]) * mask, fields), fields)
        lengths = _pairs(sequence_sum(mask, fields), fields)
        real = (lengths > 0).all(-1)
        per_pair = self._per_pair(scores, lengths)
        rewards = beta * scores.detach()
        margin = rewards[..., 0] - rewards[..., 1]
        sums = {
            "preference_accuracy": ((margin > 0) * real).sum(),
            "reward_margin": (margin * real).sum(),
            "chosen_reward": (rewards[..., 0] * real).sum(),
            "rejected_reward": (rewards[..., 1] * real).sum(),
        }
        return LossOutput((per_pair * real).sum(), mask.sum(), sums, over=real.sum(), sums_like_loss=True)

    def _per_pair(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        c = self.config
        if c.loss == "ipo":
            means = scores / lengths.clamp(min=1)
            return (means[..., 0] - means[..., 1] - 1 / (2 * c.beta)).square()
        difference = c.beta * (scores[..., 0] - scores[..., 1])
        right, wrong = -logsigmoid(difference), -logsigmoid(-difference)
        if c.loss == "robust":
            return ((1 - c.label_smoothing) * right - c.label_smoothing * wrong) / (1 - 2 * c.label_smoothing)
        return (1 - c.label_smoothing) * right + c.label_smoothing * wrong


def _pairs(values_BS: torch.Tensor, fields: Fields) -> torch.Tensor:
    """[pairs, 2]: (chosen, rejected), which are rows that follow each other, or sequences of a packed row."""
    if SEGMENTS in fields:
        values_BS = pad(values_BS, (0, values_BS.shape[1] % 2))
    return values_BS.reshape(-1, 2)
