"""Layers without TransformerEngine: torch's RMSNorm and scaled dot-product attention, causal, for rows of any kind.

Megatron-Core's own local modules refuse sequence parallelism (`WrappedTorchNorm`) and context parallelism
(`DotProductAttention`, which also materialises the score matrix). Only the linear layers of an fp8 model are
TransformerEngine's; they carry the same parameters.

Packed rows: on a GPU, in half precision, the tokens of all segments follow each other, and torch's variable-length
flash attention is told where each begins (`Ragged`). Elsewhere the segments are gathered into right-padded batches, one
for each power of two of their length, attended causally, and scattered back: at most four times the scores of the
segments alone, a handful of kernel calls, and the very computation that unpacked sequences get. Rotary positions count
from the start of each segment.

Context parallelism: a sequence of T positions is cut into 2N chunks for N ranks; rank r holds chunks r and 2N - 1 - r,
in that order (Megatron-Core's rotary embedding expects it), so that causal attention is as much work on every rank.
Attention gathers the keys and values of the whole sequence, one all-gather a layer in place of a ring (Llama 3,
arXiv:2407.21783, section 3.3.2), and answers for the rank's own queries. Each chunk is attended by itself, over the
keys up to its end: its queries are the last of them, so the mask is causal from the lower right corner. Of packed rows,
the segments that begin in a chunk go the way of other packed rows; the one that began before sees its own earlier keys.
To variable-length attention both chunks are more segments, of which some have more keys than queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary

from trainer.megatron.releases import feed_forward
from trainer.megatron.router import Router

SHORTEST_BITS = 4  # segments of up to 16 tokens share a bucket


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """torch's RMSNorm with Megatron's constructor; its gradient is reduced over tensor-parallel ranks under SP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def block_spec(config: TransformerConfig, chunk: int | None = None) -> TransformerBlockSubmodules:
    """The layers this pipeline stage (or this chunk of it) builds, and the final norm."""
    experts = config.num_moe_experts
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    parts = feed_forward(layer)
    if experts:
        parts.router = Router
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ContextParallelAttention if config.context_parallel_size > 1 else CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.fp8:
        _fp8_linears(attention, parts)
    layers = [layer] * get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _fp8_linears(attention: Any, parts: Any) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    attention.linear_qkv = parts.linear_fc1 = TEColumnParallelLinear
    attention.linear_proj = parts.linear_fc2 = TERowParallelLinear


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal scaled dot-product attention over the local heads. Padding goes to the right, where causality hides it."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any) -> Any:
        """query [T, B, heads, D], key and value [T, B, groups, D] -> [T, B, heads * D].

        `attention_mask` is None, or int64 [B, T] for packed rows: the segment of each token, 0 for padding. Tokens
        then attend within their segment only, and padding gets zeros. (Megatron-Core hands this argument through to
        here unread, also under activation recompute.)
        """
        if attention_mask is None:
            out = self._causal(*(t.transpose(0, 1) for t in (query, key, value)))
        elif takes_ragged(query):
            out = self._ragged(query, key, value, Ragged.of(attention_mask, (0,), len(query)))
        else:
            out = self._block_diagonal(query, key, value, Blocks.of(attention_mask))
        return out.transpose(0, 1).flatten(2)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, T, heads, D], key and value [B, S, groups, D] -> [B, T, heads, D]; the queries are the last T of S
        positions."""
        if query.is_cuda and query.dtype is torch.float32:
            key, value = (_for_each_head(t, query.shape[2]) for t in (key, value))
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        seen, keys = q.shape[2], k.shape[2]
        mask: Any = None
        if seen != keys and q.is_cuda:
            mask = causal_lower_right(seen, keys)
        elif seen != keys:
            mask = torch.ones(seen, keys, dtype=torch.bool).tril(keys - seen)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    def _block_diagonal(self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
        if not blocks.buckets:  # all padding: no constant, so that every parameter has a gradient, of zero
            return (query + key.sum() + value.sum()).transpose(0, 1) * 0
        parts = [self._causal(*(b.gather(t) for t in (q, k, v))) for b in blocks.buckets]
        return blocks.scatter(parts, like=q).unflatten(0, (query.shape[1], query.shape[0]))

    def _ragged(self, query: Tensor, key: Tensor, value: Tensor, ragged: Ragged) -> Tensor:
        """[B, T, heads, D], zeros at padding."""
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
        if not ragged.longest:  # all padding: see `_block_diagonal`
            return (query + key.sum() + value.sum()).transpose(0, 1) * 0
        out = varlen_attn(
            q[ragged.queries],
            k[ragged.keys],
            v[ragged.keys],
            ragged.query_ends,
            ragged.key_ends,
            *ragged.longest,
            scale=self.scale,
            window_size=(-1, 0),  # causal, from the lower right corner of each segment
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return q.new_zeros(q.shape).index_copy(0, ragged.queries, out).unflatten(0, (query.shape[1], query.shape[0]))


def _for_each_head(groups: Tensor, heads: int) -> Tensor:
    """[B, S, groups, D] -> [B, S, heads, D]. In float32 a GPU has one kernel that does not write out the scores, and
    that takes no groups."""
    return groups.repeat_interleave(heads // groups.shape[2], 2)


def takes_ragged(query: Tensor) -> bool:
    """Whether flash attention has kernels for it: half precision, on Ampere or later."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return (
        query.is_cuda and half and query.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8,)
    )


@dataclass(frozen=True)
class Ragged:
    """The pieces of segments that a rank answers for, one after the other. Of piece i, the queries are
    `query_ends[i]` to `query_ends[i + 1]` of `queries`, which are places among the rank's tokens, and the keys in the
    same way places among those of whole rows: from the start of the segment to the piece's last token. Ends are int32
    [pieces + 1]; `longest` are the most queries and the most keys of a piece, or nothing where all is padding."""

    queries: Tensor
    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest: tuple[int, ...]

    @staticmethod
    def of(segments_BT: Tensor, chunks: tuple[int, ...], size: int) -> Ragged:
        """`chunks` are the rank's, in its order: the numbers of chunks of `size` tokens."""
        found: dict[tuple[int, ...], Ragged] = _known_ragged.setdefault(segments_BT, {})
        if chunks not in found:
            found[chunks] = _pieces(segments_BT, chunks, size)
        return found[chunks]


_known_ragged = WeakTensorKeyDictionary()  # by the segments: all layers of a forward pass ask for the same


def _pieces(segments_BT: Tensor, chunks: tuple[int, ...], size: int) -> Ragged:
    (_, width), device = segments_BT.shape, segments_BT.device
    queries, keys = [], []
    for row, segments in enumerate(segments_BT.cpu()):
        numbers, counts = segments.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        spans = [(e - c, e) for n, c, e in zip(numbers.tolist(), counts.tolist(), ends, strict=True) if n]
        for place, chunk in enumerate(chunks):
            first, last = chunk * size, (chunk + 1) * size
            moved = (row * len(chunks) + place) * size - first
            for start, end in spans:
                if start < last and end > first:
                    queries.append(torch.arange(max(start, first) + moved, min(end, last) + moved))
                    keys.append(torch.arange(row * width + start, row * width + min(end, last)))
    if not queries:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Ragged(nothing, nothing, nothing.int(), nothing.int(), ())
    return Ragged(
        torch.cat(queries).to(device),
        torch.cat(keys).to(device),
        _ends(queries).to(device),
        _ends(keys).to(device),
        (max(map(len, queries)), max(map(len, keys))),
    )


def _ends(pieces: list[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, pieces)]).cumsum(0).int()


_known = WeakTensorKeyDictionary()  # as `_known_ragged`


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
        """The results of all buckets, [S, L, ...] each, back to [N, ...]; zeros at padding."""
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


def local_positions(width: int, device: torch.device) -> Tensor:
    """The positions [T / N] of a sequence of T = `width` that this rank holds, in its order. T is a multiple of 2N."""
    ranks, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    chunks = torch.arange(width, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) if ranks > 1 else torch.arange(width, device=device)


def whole_sequence(part: Tensor, dim: int, *, copies: bool) -> Tensor:
    """Every rank's part, joined along `dim` in the sequence's order, differentiably.

    `copies`: what follows is computed alike on every rank, so the gradient of this rank's part is already whole.
    Otherwise every rank goes on with something else, and the gradients of all are summed.
    """
    if ps.get_context_parallel_world_size() == 1:
        return part
    result: Tensor = _Gather.apply(part.movedim(dim, 0), copies)
    return result.movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, copies: bool) -> Tensor:
        group = ps.get_context_parallel_group()
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        ctx.copies, width = copies, part.shape[0] * len(parts)
        ctx.mine = local_positions(width, part.device)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if not ctx.copies:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=ps.get_context_parallel_group())
        return gradient[ctx.mine], None


class ContextParallelAttention(CausalAttention):
    """Causal attention of this rank's queries over the keys and values of the whole sequence."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, **_: Any) -> Any:
        """query [T / N, B, heads, D], key and value [T / N, B, groups, D] -> [T / N, B, heads * D].

        `attention_mask` is None, or int64 [B, T] for packed rows: the segments of the whole row (see
        `CausalAttention`).
        """
        key, value = whole_sequence(torch.stack([key, value]), 1, copies=False)
        ranks, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
        size, chunks = len(key) // (2 * ranks), (rank, 2 * ranks - 1 - rank)
        if attention_mask is not None and takes_ragged(query):
            return self._ragged(query, key, value, Ragged.of(attention_mask, chunks, size)).transpose(0, 1).flatten(2)
        out = []
        for chunk, mine in zip(chunks, query.chunk(2), strict=True):
            end = (chunk + 1) * size
            if attention_mask is None:
                out.append(self._causal(*(t.transpose(0, 1) for t in (mine, key[:end], value[:end]))))
            else:
                out.append(self._cut_off(mine, key, value, Chunk.of(attention_mask, chunk, size)))
        return torch.cat(out, 1).transpose(0, 1).flatten(2)

    def _cut_off(self, query: Tensor, key: Tensor, value: Tensor, chunk: Chunk) -> Tensor:
        """[B, T / 2N, heads, D] of one chunk of packed rows."""
        own = slice(chunk.start, chunk.start + len(query))
        out = self._block_diagonal(query, key[own], value[own], chunk.blocks)
        if not chunk.begun:
            return out
        rows = list(out.unbind(0))
        for row, first, count in chunk.begun:
            keys = slice(first, chunk.start + count)
            parts = (query[:count, row], key[keys, row], value[keys, row])
            rows[row] = torch.cat([self._causal(*(t[None] for t in parts))[0], rows[row][count:]])
        return torch.stack(rows)


@dataclass(frozen=True)
class Chunk:
    """A chunk of packed rows, from `start` on. `blocks` are the segments that begin in it; `begun` are those that began
    before: (row, where it began, how many of its tokens the chunk begins with)."""

    start: int
    blocks: Blocks
    begun: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(segments_BT: Tensor, number: int, size: int) -> Chunk:
        """`number` counts chunks of `size` tokens."""
        chunks: dict[int, Chunk] = _known_chunks.setdefault(segments_BT, {})
        if number not in chunks:
            chunks[number] = _chunk(segments_BT, number * size, size)
        return chunks[number]


_known_chunks = WeakTensorKeyDictionary()  # as `_known`, by number


def _chunk(segments_BT: Tensor, start: int, size: int) -> Chunk:
    inside = segments_BT[:, start : start + size].clone()
    begun = []
    for row, segments in enumerate(segments_BT.tolist() if start else ()):
        segment = segments[start]
        if segment and segments[start - 1] == segment:
            count = next((i for i in range(size) if segments[start + i] != segment), size)
            begun.append((row, segments.index(segment), count))
            inside[row, :count] = 0
    return Chunk(start, _blocks(inside), tuple(begun))


_positions: ContextVar[Tensor | None] = ContextVar("rotary_positions", default=None)


@contextmanager
def rotary_positions(positions_BT: Tensor | None) -> Iterator[None]:
    """Within the body, models that `follow_positions` rotate by `positions_BT` (int64; None: by the place in the row).
    Activation recompute is safe outside it: the rotation's angles are among what is kept."""
    token = _positions.set(positions_BT)
    try:
        yield
    finally:
        _positions.reset(token)


def follow_positions(model: Any) -> None:
    """Megatron-Core's GPTModel does not read its position ids when it rotates; afterwards it does."""
    model.rotary_pos_emb.register_forward_hook(_follow)


def _follow(rotary: Any, inputs: tuple[Any, ...], angles_T11D: Tensor) -> Tensor:
    positions_BT = _positions.get()
    if positions_BT is None:
        return angles_T11D
    # Not from `angles`: under context parallelism they are this rank's part of the row already.
    whole: Tensor = rotary.get_emb(inputs[0])
    return whole[positions_BT.t(), 0]  # [T, B, 1, D]
