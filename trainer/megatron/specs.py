"""Layer specification without TransformerEngine: torch's RMSNorm and scaled dot-product attention.

Megatron-Core's own local modules would do for tensor, pipeline and data parallelism, but not for sequence parallelism
(`WrappedTorchNorm` refuses it) nor for context parallelism (`DotProductAttention` refuses it and materialises the score
matrix). Only the linear layers of an fp8 model are TransformerEngine's; they carry the same parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.megatron.attention import CausalAttention
from trainer.megatron.context import ContextParallelAttention


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
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ContextParallelAttention if config.context_parallel_size > 1 else CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.fp8:
        _fp8_linears(attention, layer.submodules.mlp.submodules)
    layers = [layer] * get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _fp8_linears(attention: Any, feed_forward: Any) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    attention.linear_qkv = feed_forward.linear_fc1 = TEColumnParallelLinear
    attention.linear_proj = feed_forward.linear_fc2 = TERowParallelLinear
