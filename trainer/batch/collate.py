"""Sequences laid out in tensors, and what was computed there taken back.

Shapes: B rows, T label positions. `tokens` is int64 [B, T + 1]; position t of every other field speaks about the token
at t + 1, the one predicted there. `mask` is float32 [B, T], 1.0 on trained tokens; so are the per-token fields, 0.0
elsewhere. Per-sequence fields are float32 [B, S], S being the most sequences in a row.

Unpacked, a row is one sequence, padded on the right (S = 1). Packed, a row is several sequences end to end, and two
more int64 fields [B, T + 1] say which: `segments` numbers the sequences of a row from 1 (0 is padding) and `positions`
counts the tokens of each from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from trainer.batch.sequence import MASK, POSITIONS, SEGMENTS, TOKENS, Fields, Sequence

Rows = list[list[int]]


def collate(sequences: Seq[Sequence]) -> Fields:
    """One row a sequence."""
    return lay_out(sequences, [[i] for i in range(len(sequences))], packed=False)


def lay_out(sequences: Seq[Sequence], rows: Rows, *, packed: bool) -> Fields:
    """The fields of `rows`, each the indices of its sequences; an empty row is all padding."""
    width = max(sum(sequences[i].length for i in row) for row in rows)
    fields = _empty(sequences, rows, width, packed)
    for number, row in enumerate(rows):
        start = 0
        for slot, index in enumerate(row):
            _place(fields, sequences[index], number, start, slot)
            start += sequences[index].length
    return fields


def take_back(values_BT: torch.Tensor, sequences: Seq[Sequence], rows: Rows) -> list[torch.Tensor]:
    """For each sequence its continuation's values, out of a tensor in the layout of `lay_out(sequences, rows)`."""
    found: dict[int, torch.Tensor] = {}
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            sequence = sequences[index]
            first = start + len(sequence.prompt) - 1
            found[index] = values_BT[number, first : first + len(sequence.continuation)]
            start += sequence.length
    return [found[index] for index in range(len(sequences))]


def _empty(sequences: Seq[Sequence], rows: Rows, width: int, packed: bool) -> Fields:
    count, slots = len(rows), max(1, *(len(row) for row in rows))
    fields = {name: torch.zeros(count, width - 1) for name in (MASK, *_names(s.per_token for s in sequences))}
    fields |= {name: torch.zeros(count, slots) for name in _names(s.per_sequence for s in sequences)}
    for name in (TOKENS, SEGMENTS, POSITIONS) if packed else (TOKENS,):
        fields[name] = torch.zeros(count, width, dtype=torch.int64)
    return fields


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({name for mapping in mappings for name in mapping})


def _place(fields: Fields, s: Sequence, row: int, start: int, slot: int) -> None:
    end, answer = start + s.length, start + len(s.prompt) - 1
    fields[TOKENS][row, start:end] = torch.tensor(s.prompt + s.continuation)
    fields[MASK][row, start if s.train_on_prompt else answer : end - 1] = 1.0
    for name, values in s.per_token.items():
        fields[name][row, answer : end - 1] = torch.as_tensor(values, dtype=torch.float32)
    for name, value in s.per_sequence.items():
        fields[name][row, slot] = value
    if SEGMENTS in fields:
        fields[SEGMENTS][row, start:end] = slot + 1
        fields[POSITIONS][row, start:end] = torch.arange(s.length)
