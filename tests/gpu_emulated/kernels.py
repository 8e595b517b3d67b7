"""Operators that only CUDA has kernels for, computed on the CPU; and how CUDA's kernels refuse tensors of the host."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

MIXING = {
    aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default, aten.slice_scatter.default,
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip
"""They take tensors of the host beside those of a device."""
NEVER_NUMBERS = {
    aten.cat, aten.stack, aten.linear, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.embedding, aten.gather,
    aten.scatter_add_, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_, aten.index_select,
}  # fmt: skip
"""They refuse even a tensor of the host that has no dimension, which other kernels take for a number."""


def refuse_mixed(func: Any, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError where a kernel of CUDA does: its tensors lie on two devices, or one of them on the host."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    devices = {x.device for x in given if x.is_cuda}
    if not devices or func in MIXING:
        return
    numbers = func.overloadpacket not in NEVER_NUMBERS
    strays = [x for x in given if x.device.type == "cpu" and (x.dim() or not numbers)]
    if strays or len(devices) > 1 or any(x.device.type == "cpu" for x in _written(func, args)):
        found = ", ".join(f"{x.device}{list(x.shape)}" for x in given)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {found}")


def _written(func: Any, args: Any) -> list[torch.Tensor]:
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [x for a, x in pairs if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves(written) if isinstance(x, torch.Tensor)]


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: list[int], rstd: torch.Tensor, weight: torch.Tensor | None, mask: Any
) -> tuple[torch.Tensor | None, ...]:
    """In the order in which autograd goes through what a CPU computes, for the same bits."""
    dims, wide = tuple(range(-len(shape), 0)), x.to(rstd.dtype)
    by_normed = grad.to(rstd.dtype) if weight is None else grad.to(rstd.dtype) * weight
    by_mean = -0.5 * (by_normed * wide).sum(dims, keepdim=True) * rstd.pow(3)
    by_x = by_normed * rstd + by_mean.expand_as(x) / math.prod(shape) * (2 * wide)
    by_weight = (grad * (wide * rstd)).flatten(0, -len(shape) - 1).sum(0)
    return by_x.to(x.dtype) if mask[0] else None, by_weight.to(x.dtype) if mask[1] else None


ON_CPU = {aten._fused_rms_norm_backward.default: _rms_norm_backward}
"""By operator."""


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch 2.13's, of flash attention: [tokens, heads, D], causal from the lower right corner of each segment. Refuses
    what the kernel refuses."""
    for tensor in (query, key, value, query_ends, key_ends):
        if not tensor.is_cuda:
            raise RuntimeError(f"varlen_attn: a tensor lies on {tensor.device}")
    half = query.dtype in (torch.float16, torch.bfloat16)
    if not half or query_ends.dtype is not torch.int32 or key_ends.dtype is not torch.int32:
        raise RuntimeError("varlen_attn: FlashAttention takes half precision, and ends as int32")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError("varlen_attn: fewer heads of keys than of queries")
    assert window_size == (-1, 0), "no other is computed here"
    found = []
    for queries, keys in zip(_spans(query_ends, longest_query), _spans(key_ends, longest_key), strict=True):
        q, k, v = (t.transpose(0, 1)[None] for t in (query[queries], key[keys], value[keys]))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def _spans(ends: torch.Tensor, longest: int) -> list[slice]:
    found = ends.tolist()
    spans = [slice(a, b) for a, b in itertools.pairwise(found)]
    if max(s.stop - s.start for s in spans) > longest:
        raise RuntimeError("varlen_attn: a segment is longer than the longest")
    return spans
