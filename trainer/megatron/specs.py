"""Layer specification without TransformerEngine: torch's RMSNorm and scaled dot-product attention.

Megatron-Core's own local modules would do for tensor, pipeline and data parallelism, but not for sequence parallelism
(`WrappedTorchNorm` refuses it), and its `DotProductAttention` materialises the score matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.megatron.attention import CausalAttention


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """torch's RMSNorm with Megatron's constructor; its gradient is reduced over tensor-parallel ranks under SP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers this pipeline stage builds, and the final norm."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
