"""Sequences and the right-padded tensors they are trained on.

Shapes: B sequences, T label positions. `tokens_BT1` is [B, T + 1]; position t of every other field speaks about the
token at t + 1, the one predicted there. `mask` is 1.0 on trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

Fields = dict[str, torch.Tensor]
TOKENS, MASK = "tokens", "mask"


@dataclass(frozen=True)
class Sequence:
    """A prompt and its continuation. `per_token` fields have one number for each continuation token."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    per_token: dict[str, Seq[float]] = field(default_factory=dict)
    train_on_prompt: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.continuation)


def collate(sequences: Seq[Sequence]) -> Fields:
    """Right-padded tensors: `tokens` int64 [B, T + 1], `mask` and the per-token fields float32 [B, T]."""
    width = max(s.length for s in sequences)
    names = sorted({name for s in sequences for name in s.per_token})
    fields = {name: torch.zeros(len(sequences), width - 1) for name in (MASK, *names)}
    fields[TOKENS] = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, s in enumerate(sequences):
        end = s.length
        fields[TOKENS][row, :end] = torch.tensor(s.prompt + s.continuation)
        first = 0 if s.train_on_prompt else len(s.prompt) - 1
        fields[MASK][row, first : end - 1] = 1.0
        for name in names:
            fields[name][row, len(s.prompt) - 1 : end - 1] = torch.tensor(s.per_token[name])
    return fields


def share(fields: Fields, rank: int, ranks: int, micro_batch: int) -> list[Fields]:
    """The micro-batches of one data-parallel rank: equal in number and shape on every rank, filled up with rows whose
    mask is zero, so that any number of sequences can be trained on any number of ranks."""
    rows = fields[MASK].shape[0]
    size = min(micro_batch, -(-rows // ranks))
    count = -(-rows // (size * ranks))
    padded = {name: _pad_rows(t, size * ranks * count) for name, t in fields.items()}
    mine = {name: t[rank * size * count : (rank + 1) * size * count] for name, t in padded.items()}
    return [{name: t[i * size : (i + 1) * size] for name, t in mine.items()} for i in range(count)]


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
