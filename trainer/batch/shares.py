"""A batch cut into the micro-batches of each data-parallel rank."""

from __future__ import annotations

import torch

from trainer.batch.sequence import MASK, SEGMENTS, Fields


def share(fields: Fields, rank: int, ranks: int, micro_batch: int, unit: int = 1, group: int = 1) -> list[Fields]:
    """The micro-batches of one data-parallel rank: equal in number and shape on every rank, filled up with rows whose
    mask is zero, so that any number of sequences can be trained on any number of ranks.

    Packed rows go one at a time: their width is the budget of a forward pass, and `micro_batch` counts sequences.
    Unpacked, `unit` rows that follow each other (the answers of a preference) stay in one micro-batch. The number of
    micro-batches is a multiple of `group`.
    """
    rows = fields[MASK].shape[0]
    if SEGMENTS in fields:
        micro_batch = unit = 1
    enough = -(-rows // (ranks * unit)) * unit
    size = min(max(micro_batch // unit, 1) * unit, enough)
    count = -(-rows // (size * ranks * group)) * group
    padded = {name: _pad_rows(t, size * ranks * count) for name, t in fields.items()}
    mine = {name: t[rank * size * count : (rank + 1) * size * count] for name, t in padded.items()}
    return [{name: t[i * size : (i + 1) * size] for name, t in mine.items()} for i in range(count)]


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
