"""Batches for tests."""

from __future__ import annotations

import torch

from trainer.batch import MASK, TOKENS, Fields


def random_batch(vocab: int, rows: int = 6, width: int = 12, seed: int = 7) -> Fields:
    """Random tokens; rows of different lengths, the prompt's tokens masked out."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, width)
    for row in range(rows):
        mask[row, row % 3 : width - row % 4] = 1.0
    return {TOKENS: torch.randint(0, vocab, (rows, width + 1), generator=generator), MASK: mask}
