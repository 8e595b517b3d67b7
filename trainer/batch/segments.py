"""Sums over sequences and back to their tokens, for packed and unpacked rows alike.

B rows, T label positions, S the most sequences in a row (1 when rows are not packed).
"""

from __future__ import annotations

import torch

from trainer.batch.sequence import MASK, SEGMENTS, Fields


def label_segments(fields: Fields) -> torch.Tensor:
    """int64 [B, T]: which sequence of the row, from 1, the predicted token belongs to; 0 where the mask is 0."""
    trained = fields[MASK] > 0
    if SEGMENTS not in fields:
        return trained.long()
    return fields[SEGMENTS][:, 1:] * trained


def sequence_sum(values_BT: torch.Tensor, fields: Fields) -> torch.Tensor:
    """[B, S]: the sum over each sequence's trained tokens; 0 for an empty slot. Differentiable."""
    ids = label_segments(fields)
    slots = int(fields[SEGMENTS].max()) if SEGMENTS in fields else 1
    sums = values_BT.new_zeros(values_BT.shape[0], max(slots, 1) + 1)
    return sums.scatter_add(1, ids, values_BT)[:, 1:]


def to_tokens(values_BS: torch.Tensor, fields: Fields) -> torch.Tensor:
    """[B, T]: each sequence's value on its trained tokens, 0 elsewhere. Differentiable."""
    return torch.nn.functional.pad(values_BS, (1, 0)).gather(1, label_segments(fields))
