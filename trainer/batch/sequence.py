"""A sequence to train on, and the names of the tensors that a batch of them becomes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

Fields = dict[str, torch.Tensor]
TOKENS, MASK, SEGMENTS, POSITIONS = "tokens", "mask", "segments", "positions"


@dataclass(frozen=True)
class Sequence:
    """A prompt and its continuation. `per_token` fields have one number for each continuation token, `per_sequence`
    fields one for the whole. Sequences that follow each other with the same `together` (a preference's two answers)
    are never parted: they are trained in one micro-batch."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    per_token: dict[str, Seq[float]] = field(default_factory=dict)
    train_on_prompt: bool = False
    per_sequence: dict[str, float] = field(default_factory=dict)
    together: int | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.continuation)


def units(sequences: Seq[Sequence]) -> list[list[int]]:
    """Indices of the sequences that stay together, in order; most are alone."""
    result: list[list[int]] = []
    last: int | None = None
    for index, sequence in enumerate(sequences):
        if sequence.together is not None and sequence.together == last:
            result[-1].append(index)
        else:
            result.append([index])
        last = sequence.together
    return result
