"""Context parallelism: every rank holds a part of each sequence.

A sequence of T positions is cut into 2N chunks for N ranks; rank r holds chunks r and 2N - 1 - r, in that order, so
that causal attention is as much work on every rank (Megatron-Core's rotary embedding expects this order). Attention
gathers the keys and values of the whole sequence and answers for the rank's own queries: one all-gather a layer in
place of a ring (Llama 3, arXiv:2407.21783, section 3.3.2); grouped keys and values are small next to the queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


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


class ContextParallelAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of this rank's queries over the keys and values of the whole sequence."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, **_: Any) -> Any:
        """query [T / N, B, heads, D], key and value [T / N, B, groups, D] -> [T / N, B, heads * D].

        `attention_mask` is None, or int64 [B, T] for packed rows: the segments of the whole row (see attention.py).
        """
        key, value = whole_sequence(torch.stack([key, value]), 1, copies=False)
        mine = local_positions(len(key), key.device)
        visible = mine[:, None] >= torch.arange(len(key), device=key.device)
        if attention_mask is not None:
            visible = visible & (attention_mask[:, None, mine, None] == attention_mask[:, None, None])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)
