"""The interface of an algorithm to the loop and to the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from trainer.batch import Fields, Sequence
from trainer.data.records import Learns, Record
from trainer.trajectory import TrajectoryGroup

# Fields of a batch, all float32 [B, T] and about the token at t + 1, beside batch.MASK:
BEHAVIOUR_LOGPROBS = "behaviour_logprobs"  # the engine's, when it sampled: the behaviour policy
OLD_LOGPROBS = "old_logprobs"  # the actor's at the start of the step: the proximal policy
REFERENCE_LOGPROBS = "reference_logprobs"  # of the initial weights
VALUES = "values"  # the critic's at the start of the step
ADVANTAGES, RETURNS = "advantages", "returns"
REWARDS = "rewards"  # by token; what a whole trajectory is worth is on its last one
LIKELIEST = "likeliest"  # 1 where no token is likelier than the one at t + 1
ENTROPY = "entropy"  # of the whole distribution there, under the current weights, with gradient: what `loss` is given
VERSION_LAG = "version_lag"  # optimizer steps between the weights that sampled a token and the trainer's


@dataclass
class LossOutput:
    """Loss of one micro-batch. `total` is a sum; the step divides it by the sum of `denominator` (whole numbers: the
    trained tokens, or sequences, or pairs) over all micro-batches and ranks, so that the layout changes nothing.

    `tokens` counts the trained tokens, of which the mean of `sums` is taken; with `sums_like_loss` they are divided
    like the loss instead. `maxima` are reduced with max.
    """

    total: torch.Tensor
    tokens: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    over: torch.Tensor | None = None
    sums_like_loss: bool = False

    @property
    def denominator(self) -> torch.Tensor:
        return self.tokens if self.over is None else self.over

    def row(self) -> torch.Tensor:
        """[total, denominator, tokens, *sums], float64: what is added up over micro-batches and ranks."""
        values = (self.total, self.denominator, self.tokens, *self.sums.values())
        return torch.stack([value.detach().double() for value in values])


class Algorithm(Protocol):
    """One class and one config entry per algorithm; the loop and the engine ask only this.

    On rank 0, `sequences` turns records (and, if `samples_per_prompt` > 0, their scored rollouts) into sequences, and
    once the engine has filled in the fields of `needs`, `prepare` adds what is computed from the whole batch
    (advantages). Then, `epochs` times over `minibatches` parts of the batch, `loss` is called per micro-batch where its
    log-probs are (the last pipeline stage of its data-parallel rank). One that needs VALUES is an `ActorCritic`.
    """

    learns: Learns  # what each record must have
    samples_per_prompt: int  # rollouts wanted for each record; 0: none, records carry their targets
    minibatches: int  # optimizer steps each batch is split into
    epochs: int  # passes over each batch
    needs: frozenset[str]  # of OLD_LOGPROBS, REFERENCE_LOGPROBS, VALUES: what the engine computes before a step
    rows_together: int  # sequences that must stay in one micro-batch, in order (the two of a preference)
    critic_warmup: int  # steps at the start that train the critic alone
    resets_optimizer: bool  # whether each step begins with an optimizer that has seen no gradient

    def sequences(self, records: Seq[Record], groups: Seq[TrajectoryGroup], step: int = 0) -> list[Sequence]:
        """The sequences to train on. `groups` is empty when no rollouts are wanted; `step` counts the
        optimizer steps in the trainer's weights."""
        ...

    def keep_group(self, group: TrajectoryGroup) -> bool:
        """Whether a group is worth training on; the loop samples others in place of those that are not."""
        ...

    def prepare(self, fields: Fields) -> Fields:
        """The batch with what is computed from the whole of it. On rank 0."""
        ...

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """`logprobs_BT` float32, of the tokens at t + 1 under the current weights, with gradient, as has ENTROPY."""
        ...


@runtime_checkable
class ActorCritic(Algorithm, Protocol):
    """An algorithm whose critic is trained along: `critic_loss` is called per micro-batch where the values are."""

    def critic_loss(self, values_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """`values_BT` float32, of the states before the tokens at t + 1, with gradient."""
        ...


class AlgorithmBase:
    """The plain answers: one pass, nothing computed beforehand, every group kept, no critic."""

    learns: Learns = "samples"
    samples_per_prompt: int = 0
    minibatches: int = 1
    epochs: int = 1
    needs: frozenset[str] = frozenset()
    rows_together: int = 1
    critic_warmup: int = 0
    resets_optimizer: bool = False

    def keep_group(self, group: TrajectoryGroup) -> bool:
        return True

    def prepare(self, fields: Fields) -> Fields:
        return fields
