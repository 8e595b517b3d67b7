"""What an algorithm is to the loop and to the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trainer.batch import Fields, Sequence
from trainer.data.records import Record
from trainer.rollout import Group


@dataclass
class LossOutput:
    """Loss of one micro-batch. `total` is summed over tokens; the step divides by the sum of `tokens` over all
    micro-batches and ranks, so that every token of a step weighs the same. `sums` are divided likewise (a mean over
    tokens), `maxima` are reduced with max."""

    total: torch.Tensor
    tokens: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One class and one config entry per algorithm; the loop asks only this.

    On rank 0: `sequences` turns records (and, if `samples_per_prompt` > 0, their scored rollouts) into sequences.
    On every rank: `loss` is called per micro-batch, where the log-probs are (the last pipeline stage).
    """

    samples_per_prompt: int  # rollouts wanted for each record; 0: none, records carry their targets
    minibatches: int  # optimizer steps each batch is split into
    needs_reference: bool  # whether `loss` wants the field `reference_logprobs` (of the initial weights)

    def sequences(self, records: Seq[Record], groups: Seq[Group]) -> list[Sequence]:
        """What to train on. `groups` is empty when no rollouts are wanted."""
        ...

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """`logprobs_BT` float32, of the tokens at t + 1 under the current weights, with gradient."""
        ...
