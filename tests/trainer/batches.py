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


def sampled_batch(vocab: int, rows: int = 8, seed: int = 0) -> Fields:
    """`random_batch` with what algorithms are told of rollouts: rewards by token, an advantage for each row."""
    fields, generator = random_batch(vocab, rows=rows, seed=seed), torch.Generator().manual_seed(seed)
    fields["rewards"] = torch.randn(fields[MASK].shape, generator=generator) * fields[MASK]
    fields["behaviour_logprobs"] = -3 + 0.3 * torch.randn(fields[MASK].shape, generator=generator)
    fields["advantages"] = torch.randn(rows, 1, generator=generator).expand_as(fields[MASK]) * fields[MASK]
    return fields
