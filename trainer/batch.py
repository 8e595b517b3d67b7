"""Sequences, and the tensors they are trained on: one sequence a row, or packed.

Shapes: B rows, T label positions, S the most sequences in a row. `tokens` is int64 [B, T + 1]; position t of every
other field speaks about the token at t + 1, the one predicted there. `mask` is float32 [B, T], 1.0 on trained tokens,
which need not follow each other; the per-token fields are float32 [B, T] too, 0.0 on other tokens. Per-sequence fields
are float32 [B, S].

Unpacked, a row is one sequence, padded on the right (S = 1). Packed, a row is several sequences end to end, and two
more int64 fields [B, T + 1] say which: `segments` numbers the sequences of a row from 1 (0 is padding) and `positions`
counts the tokens of each from 0.

`labels`, int64 [B, T], where a batch has it, are the tokens that log-probs are asked of in place of those at t + 1.

`routing` [B, T, layers, k], where a sequence brings it, are the experts that each layer of a mixture sent the token at
t to, plus 1; 0 where that is not known.

Packing takes two steps, so that little is computed on padding:

1. Best fit, longest first (Johnson 1974): every unit goes into the fullest row that still takes it. This says how many
   rows are needed.
2. That number is rounded up to a multiple of the data-parallel ranks, and the units are dealt anew over so many rows,
   longest first, each to the emptiest (LPT, Graham 1969). Rows come out nearly equal, hence the ranks do, and the
   widest row, which all are padded to, is as narrow as it can be. Where dealing overflows a row, step 1's rows stay.

The number of rows depends on the ranks; which sequences are trained in which optimizer step does not.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.config.sections import PackingConfig
from trainer.errors import DataError

Fields = dict[str, torch.Tensor]
TOKENS, MASK, SEGMENTS, POSITIONS, ROUTING = "tokens", "mask", "segments", "positions", "routing"
LABELS = "labels"


@dataclass(frozen=True)
class Sequence:
    """A prompt and its continuation. `per_token` fields have one number for each continuation token, `per_sequence`
    fields one for the whole. `mask` says which continuation tokens are trained on (1) and which only read (0); left
    out, all are trained. Sequences that follow each other with the same `together` (a preference's two answers) are
    never parted: they are trained in one micro-batch. `routing`, int [length - 1, layers, k], are the experts that each
    layer of a mixture sent each token but the last to (-1: not known): training does the same."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    per_token: dict[str, Seq[float]] = field(default_factory=dict)
    train_on_prompt: bool = False
    per_sequence: dict[str, float] = field(default_factory=dict)
    together: int | None = None
    mask: tuple[float, ...] | None = None
    routing: torch.Tensor | None = None

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


def assemble(
    sequences: Seq[Sequence], packing: PackingConfig | None = None, *, ranks: int = 1, minibatches: int = 1
) -> Fields:
    """The fields of a step's sequences: packed if the configuration says so, else one sequence a row."""
    if packing is None:
        return collate(sequences)
    return pack(sequences, packing.max_tokens, ranks=ranks, minibatches=minibatches)


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
    recorded = [s.routing for s in sequences if s.routing is not None]
    if recorded:
        small = max(int(r.max()) for r in recorded) < 255
        shape = (count, width - 1, *recorded[0].shape[1:])
        fields[ROUTING] = torch.zeros(shape, dtype=torch.uint8 if small else torch.int32)
    return fields


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({name for mapping in mappings for name in mapping})


def _place(fields: Fields, s: Sequence, row: int, start: int, slot: int) -> None:
    end, answer = start + s.length, start + len(s.prompt) - 1
    fields[TOKENS][row, start:end] = torch.tensor(s.prompt + s.continuation)
    fields[MASK][row, start if s.train_on_prompt else answer : end - 1] = 1.0
    if s.mask is not None:
        fields[MASK][row, answer : end - 1] = torch.as_tensor(s.mask)
    for name, values in s.per_token.items():
        fields[name][row, answer : end - 1] = torch.as_tensor(values, dtype=torch.float32)
    for name, value in s.per_sequence.items():
        fields[name][row, slot] = value
    if s.routing is not None:
        fields[ROUTING][row, start : end - 1] = s.routing + 1
    if SEGMENTS in fields:
        fields[SEGMENTS][row, start:end] = slot + 1
        fields[POSITIONS][row, start:end] = torch.arange(s.length)


def pack(sequences: Seq[Sequence], max_tokens: int, *, ranks: int = 1, minibatches: int = 1) -> Fields:
    """Packed fields of `plan_rows`: at most `max_tokens` tokens a row, rows a multiple of `ranks * minibatches`."""
    return lay_out(sequences, plan_rows(sequences, max_tokens, ranks=ranks, minibatches=minibatches), packed=True)


def plan_rows(sequences: Seq[Sequence], max_tokens: int, *, ranks: int = 1, minibatches: int = 1) -> Rows:
    """The indices of the sequences in each row. The rows of minibatch i are the i-th of `minibatches` equal parts, and
    hold the i-th part of the sequences. Raises DataError for a sequence (or a pair) longer than a row."""
    whole = units(sequences)
    pieces = min(minibatches, len(whole))
    cuts = [len(whole) * i // pieces for i in range(pieces + 1)]
    parts = [_rows(sequences, whole[a:b], max_tokens, ranks) for a, b in itertools.pairwise(cuts)]
    most = max(len(part) for part in parts)
    return [row for part in parts for row in part + [[] for _ in range(most - len(part))]]


def best_fit(lengths: Seq[int], capacity: int) -> Rows:
    """Bins of indices whose lengths sum to at most `capacity` each, by best fit decreasing. O(n log n)."""
    bins: Rows = []
    room: list[tuple[int, int]] = []  # (free, bin), ascending: the first that is large enough fits best
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place == len(room):
            bins.append([])
            free, number = capacity, len(bins) - 1
        else:
            free, number = room.pop(place)
        bins[number].append(index)
        bisect.insort(room, (free - lengths[index], number))
    return bins


def deal(lengths: Seq[int], bins: int) -> Rows:
    """Exactly `bins` bins of indices with nearly equal sums: longest first, each to the emptiest."""
    result: Rows = [[] for _ in range(bins)]
    totals = [(0, number) for number in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total, number = totals[0]
        result[number].append(index)
        heapq.heapreplace(totals, (total + lengths[index], number))
    return result


def _rows(sequences: Seq[Sequence], whole: Rows, max_tokens: int, ranks: int) -> Rows:
    lengths = [sum(sequences[i].length for i in unit) for unit in whole]
    if lengths and max(lengths) > max_tokens:
        what = "a sequence" if len(whole[lengths.index(max(lengths))]) == 1 else "a pair of sequences"
        raise DataError(
            f"{what} has {max(lengths)} tokens, a packed row takes {max_tokens}. Raise packing.max_tokens, or "
            "shorten the records (data.max_length) or the answers (rollout.max_tokens)."
        )
    bins = best_fit(lengths, max_tokens)
    count = -(-len(bins) // ranks) * ranks
    dealt = deal(lengths, count)
    if max(sum(lengths[u] for u in row) for row in dealt) <= max_tokens:
        bins = dealt
    bins += [[] for _ in range(count - len(bins))]
    return [[i for unit in sorted(row) for i in whole[unit]] for row in bins]


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
