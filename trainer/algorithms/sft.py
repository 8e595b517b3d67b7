"""Supervised fine-tuning: cross-entropy on the records' targets."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trainer.algorithms.base import AlgorithmBase, LossOutput
from trainer.batch import MASK, Fields, Sequence
from trainer.config import SftConfig
from trainer.data.records import Record
from trainer.errors import DataError
from trainer.rollout import Group


class Sft(AlgorithmBase):
    """Maximum likelihood of the target given the prompt, averaged over tokens."""

    def __init__(self, config: SftConfig) -> None:
        self.config = config

    def sequences(self, records: Seq[Record], groups: Seq[Group], version: int = 0) -> list[Sequence]:
        """One sequence per record. Raises DataError for a record without a target."""
        for record in records:
            if not record.target_ids:
                raise DataError(f"record {record.index} has no target to learn. Give every SFT record one.")
        return [Sequence(r.prompt_ids, r.target_ids, train_on_prompt=self.config.on_prompt) for r in records]

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """Negative log-likelihood."""
        return LossOutput(-(logprobs_BT * fields[MASK]).sum(), fields[MASK].sum())
