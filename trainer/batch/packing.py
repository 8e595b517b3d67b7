"""Sequences packed end to end into rows of at most so many tokens, so that little is computed on padding.

1. Best fit, longest first (Johnson 1974): every unit goes into the fullest row that still takes it. It says how many
   rows are needed.
2. That number is rounded up to a multiple of the data-parallel ranks, and the units are dealt anew over so many rows,
   longest first, each to the emptiest (LPT, Graham 1969): rows come out nearly equal, hence the ranks do, and the
   widest row, which all are padded to, is as narrow as it can be. Where dealing overflows a row, step 1's rows stay.

The number of rows depends on the ranks; which sequences are trained in which optimizer step does not.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence as Seq

from trainer.batch.collate import Rows, lay_out
from trainer.batch.sequence import Fields, Sequence, units
from trainer.errors import DataError


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
