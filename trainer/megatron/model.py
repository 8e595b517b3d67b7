"""Megatron-Core's GPTModel in the shape of a Hugging Face checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.config import ParallelConfig
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.specs import block_spec


def transformer_config(shape: ModelShape, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration. Fused kernels stay off: they need TransformerEngine or Apex."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def build_model(shape: ModelShape, config: TransformerConfig) -> GPTModel:
    """This rank's part of the model, with Megatron's initial weights."""
    tensor_parallel = config.tensor_model_parallel_size
    model = GPTModel(
        config,
        block_spec(config),
        vocab_size=shape.padded_vocab(tensor_parallel),
        max_sequence_length=shape.max_positions,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
    )
    padding = shape.padded_vocab(tensor_parallel) - shape.vocab
    if model.post_process and padding and ps.get_tensor_model_parallel_rank() == tensor_parallel - 1:
        model.output_layer.register_forward_hook(_MaskPadding(padding))
    return model


class _MaskPadding:
    """Takes the vocabulary's padding out of the softmax: no tokens are there, yet a zero logit is not improbable."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, _module: Any, _inputs: Any, output: tuple[Any, Any]) -> tuple[Any, Any]:
        logits_TBV, bias = output
        is_padding = torch.arange(logits_TBV.shape[-1], device=logits_TBV.device) >= logits_TBV.shape[-1] - self.columns
        return logits_TBV.masked_fill(is_padding, torch.finfo(logits_TBV.dtype).min), bias
