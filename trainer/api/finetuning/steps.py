"""Examples that a job's steps take, and the gradient of their loss.

The gradient of a loss goes by log-probs, as the tinker SDK does it for losses of a client's own:

    supervised    cross_entropy, whose weights are one by the batch's learned tokens: the loss is their mean
    dpo           a forward pass of the policy and of the reference; the loss's derivatives by the policy's log-probs
                  are the weights of cross_entropy

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trainer.algorithms.offline import Dpo, Sft
from trainer.batch import Fields
from trainer.data.records import shuffled


@dataclass(frozen=True)
class Plan:
    """The steps of a job with `rows` examples. `seed` decides the order of the examples in each epoch."""

    rows: int
    epochs: int
    batch: int
    learning_rate: float
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows / self.batch)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def of_step(self, step: int) -> tuple[list[int], float]:
        """The examples of a step, counted from 0, and its learning rate."""
        epoch, within = divmod(step, self.steps_per_epoch)
        rows = shuffled(self.rows, self.seed, epoch, within * self.batch, self.batch)
        return rows, self.learning_rate * (1 - step / self.steps)


def derivatives(algorithm: Sft | Dpo, logprobs_BT: Tensor, fields: Fields) -> tuple[dict[str, float], Tensor]:
    """The loss at some log-probs with the algorithm's metrics, and its derivatives by them, negated: [B, T]."""
    leaf_BT = logprobs_BT.clone().requires_grad_()
    found = algorithm.loss(leaf_BT, fields)
    loss = found.total / found.denominator
    loss.backward()
    assert leaf_BT.grad is not None
    sums = {name: float(value / found.denominator) for name, value in found.sums.items()}
    return {"loss": float(loss.detach()), **sums}, -leaf_BT.grad
