"""Attention without TransformerEngine: torch's scaled dot-product, causal; block-diagonal for packed rows."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trainer.megatron.blocks import Blocks


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
        else:
            out = self._block_diagonal(query, key, value, Blocks.of(attention_mask))
        return out.transpose(0, 1).flatten(2)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, T, heads, D] all through."""
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    def _block_diagonal(self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
        if not blocks.buckets:  # all padding: no constant, so that every parameter has a gradient, of zero
            return (query + key.sum() + value.sum()).transpose(0, 1) * 0
        parts = [self._causal(*(b.gather(t) for t in (q, k, v))) for b in blocks.buckets]
        return blocks.scatter(parts, like=q).unflatten(0, (query.shape[1], query.shape[0]))
