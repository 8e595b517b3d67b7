"""Attention without TransformerEngine: torch's scaled dot-product, causal."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal scaled dot-product attention over the local heads. Padding goes to the right, where causality hides it."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, **_: Any) -> Any:
        """query [T, B, heads, D], key and value [T, B, groups, D] -> [T, B, heads * D]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)
