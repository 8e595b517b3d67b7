"""Megatron-Core's GPTModel in the shape of a Hugging Face checkpoint, and the critic made of it.

The critic is the language model's trunk with one number for every token in place of the vocabulary. The value at
position t is that of the state before the token at t + 1, so it lines up with the labels and every other field of a
batch. The head starts at zero: untrained values are zero in every layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.config import ModelConfig, ParallelConfig
from trainer.megatron.attention import block_spec, follow_positions
from trainer.megatron.convert import load_hf, parameters
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors
from trainer.megatron.logprobs import logprobs_and_entropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def transformer_config(shape: ModelShape, parallel: ParallelConfig, model: ModelConfig) -> TransformerConfig:
    """Megatron's configuration. Fused kernels stay off: they need TransformerEngine or Apex."""
    dtype = DTYPES[model.dtype]
    config = TransformerConfig(
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        fp8=None if model.fp8 == "none" else model.fp8,
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **_layout(parallel),
        **_mixture(shape, model),
        **_recompute(model),
    )
    config.fp32_head = model.fp32_head  # ours, which LanguageModel reads
    return config


def build_model(shape: ModelShape, config: TransformerConfig, chunk: int | None = None) -> GPTModel:
    """This rank's part of the model, with Megatron's initial weights. `chunk` counts the chunks of layers of a pipeline
    stage under the interleaved schedule, None without it."""
    tensor_parallel = config.tensor_model_parallel_size
    model = LanguageModel(
        config,
        block_spec(config, chunk),
        vocab_size=shape.padded_vocab(tensor_parallel),
        max_sequence_length=shape.max_positions,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
        vp_stage=chunk,
    )
    model.vp_stage, model.real_vocab = chunk, shape.vocab
    follow_positions(model)
    return model


class LanguageModel(GPTModel):  # type: ignore[misc]
    """GPTModel that answers to labels [B, T] with their log-probs, the entropies, and whether each is the likeliest
    token, [B, T, 3], and never holds the logits of the whole vocabulary for all tokens. Without labels it is
    Megatron's."""

    real_vocab: int  # without what pads the vocabulary for the layout

    def _postprocess(self, hidden_states: torch.Tensor, *, labels: torch.Tensor | None, **given: Any) -> torch.Tensor:
        if labels is None or not self.post_process:
            output: torch.Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **given)
            return output
        tied, group = self.share_embeddings_and_output_weights, ps.get_tensor_model_parallel_group()
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if self.config.sequence_parallel:
            hidden_TBH = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_TBH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        labels_TB = labels.t()
        found = logprobs_and_entropy(
            hidden_TBH.flatten(0, 1),
            weight,
            labels_TB.flatten(),
            self.real_vocab,
            group,
            exact=self.config.fp32_head,
        )
        return found.reshape(*labels_TB.shape, 3).transpose(0, 1).contiguous()


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        "sequence_parallel": parallel.sequence,
    }
    if parallel.virtual_pipeline > 1:
        values["virtual_pipeline_model_parallel_size"] = parallel.virtual_pipeline
        # Batched sends and receives pair up per peer, and two neighbours here are each other's both.
        values |= {"overlap_p2p_comm": False, "batch_p2p_comm": False}
    return values


def _mixture(shape: ModelShape, model: ModelConfig) -> dict[str, Any]:
    """Routing as Hugging Face's modeling code does it: softmax in fp32, no capacity limit. Auxiliary losses (router.py)
    as the configuration says."""
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.normalize_router,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if model.router_balance_loss else "none",
        "moe_aux_loss_coeff": model.router_balance_loss,
        "moe_z_loss_coeff": model.router_z_loss or None,
        "moe_token_dispatcher_type": "alltoall",
    }


def _recompute(model: ModelConfig) -> dict[str, Any]:
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class ValueHead(torch.nn.Linear):  # type: ignore[misc]
    """hidden [T, B, H] -> values [T, B, 1] float32. Whole on every tensor-parallel rank; called like Megatron's
    output layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        torch.nn.init.zeros_(self.weight)
        self.sequence_parallel = config.sequence_parallel
        # Each rank sees its own part of the sequence: gradients are summed over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        values = super().forward(hidden).float()
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def load_critic(shape: ModelShape, transformer: TransformerConfig, tensors: HfTensors, chunk: int | None = None) -> Any:
    """This rank's part: the checkpoint's trunk, and a new head on the last stage.

    Nothing is tied to the embedding, whose second copy the value head replaces.
    """
    untied = dataclasses.replace(shape, tied=False)
    model = build_model(untied, transformer, chunk)
    tensors.check(shape.schema("float32"))
    get = tensors.get
    load_hf(parameters(model), untied, lambda name: get(_EMBEDDING if shape.tied and name == _HEAD else name))
    if model.post_process:
        model.output_layer = ValueHead(transformer)
    return model
