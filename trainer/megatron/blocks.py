"""Where the segments of packed rows lie, so that attention can be computed for each by itself.

A dense block-diagonal mask would cost T * T scores a row whatever is packed in it. Instead the segments are gathered
into right-padded batches, one for each power of two of their length, attended causally, and scattered back: at most
four times the scores of the segments alone, a handful of kernel calls, any backend of scaled dot-product attention, and
the very computation that unpacked sequences get.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SHORTEST_BITS = 4  # segments of up to 16 tokens share a bucket

_known = WeakTensorKeyDictionary()  # by the segments: all layers of a forward pass ask for the same


@dataclass(frozen=True)
class Bucket:
    """S segments of similar length, L tokens at most. `index` [S, L] are their places among all tokens, shorter ones
    filled up with their last; `kept` [n] are the places in [S * L] that are not such filling."""

    index: Tensor
    kept: Tensor

    def gather(self, tokens: Tensor) -> Tensor:
        """[N, ...] -> [S, L, ...]."""
        return tokens[self.index]


@dataclass(frozen=True)
class Blocks:
    """The segments of a micro-batch. `places` [n] are the tokens of all buckets, in their order."""

    buckets: tuple[Bucket, ...]
    places: Tensor

    @staticmethod
    def of(segments_BT: Tensor) -> Blocks:
        """`segments_BT` int64 [B, T]: equal neighbours in a row are a segment, 0 is padding."""
        if segments_BT not in _known:
            _known[segments_BT] = _blocks(segments_BT)
        found: Blocks = _known[segments_BT]
        return found

    def scatter(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """What was computed for each bucket, [S, L, ...] each, back to [N, ...]; zeros at padding."""
        result = like.new_zeros(like.shape[0], *parts[0].shape[2:])
        kept = [part.flatten(0, 1)[b.kept] for part, b in zip(parts, self.buckets, strict=True)]
        return result.index_copy(0, self.places, torch.cat(kept))


def _blocks(segments_BT: Tensor) -> Blocks:
    rows, width = segments_BT.shape
    numbers = torch.arange(rows, device=segments_BT.device)[:, None] * (width + 1) + segments_BT
    _, counts = numbers.flatten().unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    real = segments_BT.flatten()[ends - 1] > 0
    lengths, starts = counts[real].tolist(), (ends - counts)[real].tolist()
    by_size: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_size.setdefault(max(SHORTEST_BITS, (length - 1).bit_length()), []).append(number)
    device = segments_BT.device
    buckets = tuple(
        _bucket(
            torch.tensor([starts[n] for n in members], device=device),
            torch.tensor([lengths[n] for n in members], device=device),
        )
        for _, members in sorted(by_size.items())
    )
    places = [b.index.flatten()[b.kept] for b in buckets]
    return Blocks(buckets, torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=device))


def _bucket(starts: Tensor, lengths: Tensor) -> Bucket:
    offsets = torch.arange(int(lengths.max()), device=starts.device)
    index = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    return Bucket(index, (offsets < lengths[:, None]).flatten().nonzero()[:, 0])
