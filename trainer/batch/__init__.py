"""Sequences and the tensors they are trained on, one a row or packed."""

from collections.abc import Sequence as Seq

from trainer.batch.collate import Rows, collate, lay_out, take_back
from trainer.batch.packing import pack, plan_rows
from trainer.batch.segments import label_segments, sequence_sum, to_tokens
from trainer.batch.sequence import MASK, POSITIONS, SEGMENTS, TOKENS, Fields, Sequence
from trainer.batch.shares import share
from trainer.config.packing import PackingConfig

__all__ = [
    "MASK",
    "POSITIONS",
    "SEGMENTS",
    "TOKENS",
    "Fields",
    "Rows",
    "Sequence",
    "assemble",
    "collate",
    "label_segments",
    "lay_out",
    "pack",
    "plan_rows",
    "sequence_sum",
    "share",
    "take_back",
    "to_tokens",
]


def assemble(
    sequences: Seq[Sequence], packing: PackingConfig | None = None, *, ranks: int = 1, minibatches: int = 1
) -> Fields:
    """The fields of a step's sequences: packed if the configuration says so, else one sequence a row."""
    if packing is None:
        return collate(sequences)
    return pack(sequences, packing.max_tokens, ranks=ranks, minibatches=minibatches)
