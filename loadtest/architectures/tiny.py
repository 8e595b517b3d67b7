"""Tiny checkpoints of any architecture that transformers knows, by the names of the fields of its configuration.

Sizes go down by rules for names (`RULES`), in nested configurations too; what a rule cannot know is in `FIELDS`.
Weights are random, under the names that a published checkpoint has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from loadtest.models.checkpoints import write_tokenizer

HIDDEN, HEADS, HEAD, LAYERS, VOCAB = 128, 4, 32, 2, 512
MOST = 200_000_000  # parameters: a trial holds some six copies of them
SCALAR = (bool, int, float, str)
NESTED = ("text_config", "vision_config")  # some configurations have none until one is given
DERIVED = {"transformers_version", "architectures", "model_type", "id2label", "label2id", "_name_or_path", "dtype"}

# (name of the field, its size): the first that matches. A negative size is an upper bound.
RULES: list[tuple[str, int]] = [
    (r"(mel|num_channels|in_channels|patch_size|stride|kernel|temporal|merge_size|conv_dim|expand|period|offset)", 0),
    (r"max_.*position|max_position|_positions$|n_positions|max_seq|n_ctx|seq_length|model_max", -2048),
    (r"first_k_dense|num_dense_layers|nextn|mtp|moe_layer_start", 0),
    (r"type_vocab", -2),
    (r"vocab", -VOCAB),
    (r"kv_lora_rank", 512),
    (r"qk_rope_head_dim", 64),
    (r"q_lora_rank", 64),
    (r"qk_head_dim", 96),
    (r"head_dim|d_head|head_size|d_kv|channels_per_head|per_head", HEAD),
    (r"moe.*(intermediate|ffn|hidden)|expert.*(intermediate|ffn|hidden)|router_hidden", 64),
    (r"intermediate|ffn|inner|mlp_dim|mlp_hidden|feed_?forward|d_ff$|lru_width", 256),
    (r"hidden_layers|^n_layers?$|^num_layers$|^depth$|_layers$|num_blocks", LAYERS),
    (r"top_k|experts_per_tok|moe_k|topk", -2),
    (r"num_shared_experts|n_shared_experts|shared_expert_num", -1),
    (r"n_group|num_expert_group", -2),
    (r"experts|num_slots", -8),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"n_groups|num_groups", -1),
    (r"(key_value|kv|query_groups|linear_num_key)", -2),
    (r"heads?$|^num_.*_heads$|num_head", HEADS),
    (r"hidden_size|^d_model$|n_embd|embed_dim|hidden_dim$|^dim$|projection_dim|projector_dim|out_dim", HIDDEN),
    (
        r"input_dim|_width$|embedding_size|emb_dim|model_dim|output_dim|output_size|attention_dim|query_dim|proj_dim",
        HIDDEN,
    ),
    (r"sliding_window|window_size|chunk_size", -64),
    (r"state_size|d_state|ssm_state", -16),
    (r"image_size|img_size", -64),
    (r"num_queries|num_query_tokens|per_image|num_latents|latents", -16),
]

# Values that field names do not tell, by model type. Some are of fields that published configurations have and vLLM
# reads, and that transformers' class does not know.
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "n_group": 1, "topk_group": 1, "route_norm": True, "num_dense_layers": 1},
    "axk1": {"first_k_dense_replace": 1},
    "clip_text_model": {"max_position_embeddings": 256},
    "deepseek_v3": {"first_k_dense_replace": 1, "head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "falcon": {"ffn_hidden_size": 4 * HIDDEN},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 8},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [256] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4_moe": {"head_dim": HEAD},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_ocr_text": {"intermediate_size": 3 * HIDDEN},  # vLLM gives the merger of images this width, too
    "glm4v_moe_text": {"head_dim": HEAD, "use_qk_norm": False},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "gte": {"position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "hunyuan_vl_text": {"head_dim": HEAD},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "inkling_text": {"padded_vocab_size": VOCAB},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"block_dim": HIDDEN, "conv_dim": HIDDEN, "block_ff_dim": 256, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"mla_scale_q_lora": False, "mla_scale_kv_lora": False, "zero_expert_type": "identity"},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 64,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_head_dim": HEAD,
        "swa_v_head_dim": HEAD,
    },
    "minimax_m2": {"rotary_dim": HEAD, "scoring_func": "sigmoid", "use_routing_bias": True},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 8},
    "nomic_bert": {
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-5,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "n_embd": HIDDEN,
        "n_inner": 256,
        "n_layer": LAYERS,
        "qkv_proj_bias": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
    },
    "phimoe": {"lm_head_bias": True, "attention_bias": True},
    "qwen3_omni_moe_talker": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "siglip_text_model": {"max_position_embeddings": 256},
    "voxtral_encoder": {"downsample_factor": 4},
    "xlm-roberta": {"position_embedding_type": "absolute"},
    "zamba2": {"attention_hidden_size": 256, "attention_head_dim": 64, "mamba_headdim": HEAD},
}

# By architecture, for the outermost configuration.
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "MiniCPMForCausalLM": {"dim_model_base": 64, "num_experts": 0, "scale_depth": 1.4, "scale_emb": 12},
    "TeleFLMForCausalLM": {"use_mup": False},
    "LlamaBidirectionalForSequenceClassification": {"pooling": "avg"},
    "LlamaBidirectionalModel": {"pooling": "avg"},
}

# Architectures that have the checkpoints of another one.
SAME_AS: dict[str, str] = {
    "BertSpladeSparseEmbeddingModel": "BertForMaskedLM",
    "BgeM3EmbeddingModel": "XLMRobertaModel",
    "ColBERTLfm2Model": "Lfm2Model",
    "ColBERTModernBertModel": "ModernBertModel",
    "DeepseekV3BidirectionalModel": "DeepseekV3ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LlamaBidirectionalForSequenceClassification": "LlamaForSequenceClassification",
    "LlamaBidirectionalModel": "LlamaModel",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "MiniCPMForCausalLM": "LlamaForCausalLM",
    "MistralLarge3ForCausalLM": "DeepseekV3ForCausalLM",
    "NanbeigeForCausalLM": "LlamaForCausalLM",
    "PanguEmbeddedForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Qwen2ForProcessRewardModel": "Qwen2ForCausalLM",
    "Qwen2ForRewardModel": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
    "SolarForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "TeleFLMForCausalLM": "LlamaForCausalLM",
    "TransformersEmbeddingModel": "LlamaModel",
    "TransformersForCausalLM": "LlamaForCausalLM",
    "TransformersMoEEmbeddingModel": "Qwen3MoeModel",
    "TransformersMoEForCausalLM": "Qwen3MoeForCausalLM",
}
MORE: dict[str, dict[str, tuple[int, ...]]] = {
    "BertSpladeSparseEmbeddingModel": {
        "cls.predictions.decoder.bias": (VOCAB,),
        "cls.predictions.decoder.weight": (VOCAB, HIDDEN),
    },
    "BgeM3EmbeddingModel": {
        "colbert_linear.bias": (HIDDEN,),
        "colbert_linear.weight": (HIDDEN, HIDDEN),
        "sparse_linear.bias": (1,),
        "sparse_linear.weight": (1, HIDDEN),
    },
    **{
        name: {
            "score.0.weight": (HIDDEN, HIDDEN),
            "score.0.bias": (HIDDEN,),
            "score.2.weight": (n, HIDDEN),
            "score.2.bias": (n,),
        }
        for name, n in (("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2))
    },
}
"""Tensors that such a checkpoint has besides."""
OLD_TOWERS = ("clip_vision_model", "siglip_vision_model")


NO_CLASS = "transformers has no class of this name"


class NoCheckpoint(Exception):
    """transformers makes no tiny checkpoint of this architecture; the message says why."""


def shrink(config: Any) -> dict[str, Any]:
    """The arguments that make a configuration like this one, but tiny."""
    before = {k: v for k, v in config.to_dict().items() if k not in DERIVED}
    own = FIELDS.get(config.model_type, {})
    layers = _layers_of(before)
    fields: dict[str, Any] = {}
    for name, value in before.items():
        nested = vars(config).get(name)
        if nested is None and name in NESTED:
            nested = getattr(type(config), "sub_configs", {}).get(name, type(None))()
        if name in own:
            fields[name] = own[name]
        elif nested is not None and hasattr(nested, "to_dict"):
            # With what stays as it is: the outer configuration has other defaults than the nested one's class.
            same = {k: v for k, v in nested.to_dict().items() if k not in DERIVED and isinstance(v, SCALAR)}
            fields[name] = {**same, **shrink(nested), "model_type": nested.model_type}
        elif name == "per_layer_config" and value:
            (one, *_) = value.values()
            fields[name] = {layers - 1: {k: 2 * HEAD if "head_dim" in k else v for k, v in one.items()}}
        elif name == "image_size" and isinstance(before.get("patch_size"), int):
            fields[name] = 4 * before["patch_size"]
        elif isinstance(value, dict):
            fields[name] = _rope(value)
        elif isinstance(value, list):
            if (short := _list(name, value, before, layers)) is not None:
                fields[name] = short
        elif (size := _size(name, value, before)) is not None:
            fields[name] = layers if size == LAYERS and _rule(name) == LAYERS else size
    return {**fields, **own}


def _layers_of(fields: dict[str, Any]) -> int:
    """Enough for one layer of every kind."""
    kinds = [list(dict.fromkeys(v)) for v in fields.values() if _by_layer(v)]
    return max([LAYERS, *map(len, kinds)])


def _by_layer(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 4 and all(isinstance(v, str) for v in value)


def _list(name: str, value: list[Any], fields: dict[str, Any], layers: int) -> list[Any] | None:
    if _by_layer(value):
        kinds = list(dict.fromkeys(value))
        return [kinds[i % len(kinds)] for i in range(layers)]
    if value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        if re.search(r"index|layers|layer_ids|blocks", name):
            return list(range(min(len(value), layers)))
        if re.search(r"token_id", name):
            return [v % VOCAB for v in value]
    if len(value) > 4 and len(value) == _count(fields):
        return value[:layers]
    return None


def _count(fields: dict[str, Any]) -> int:
    return next((v for k, v in fields.items() if isinstance(v, int) and _rule(k) == LAYERS), 0)


def _rule(name: str) -> int | None:
    return next((size for pattern, size in RULES if re.search(pattern, name)), None)


def _size(name: str, value: Any, fields: dict[str, Any]) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if re.search(r"token_(id|index)$|_token$|^(bos|eos|pad|sep|cls)_", name):
        return value if value < VOCAB else 3 + sum(map(ord, name)) % (VOCAB - 8)
    size = _rule(name)
    if not size:
        return None
    if re.search(r"key_value|kv_head", name) and value == fields.get("num_attention_heads"):
        return HEADS
    return size if size > 0 else min(value, -size)


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Rotary sections must add up to half of a head."""
    found = dict(value)
    for key, item in value.items():
        if isinstance(item, dict):
            found[key] = _rope(item)
        elif key == "mrope_section":
            found[key] = [HEAD // 8, *[HEAD * 3 // 16] * 2] if len(item) == 3 else item
    return found


def make_config(architecture: str) -> tuple[Any, Any]:
    """(transformers' model class, tiny configuration). Raises NoCheckpoint."""
    import transformers

    model = getattr(transformers, SAME_AS.get(architecture, architecture), None)
    if model is None:
        raise NoCheckpoint(NO_CLASS)
    kind = model.config_class
    try:
        config = kind(**{**shrink(kind()), **OWN_FIELDS.get(architecture, {})})
    except Exception as error:
        raise NoCheckpoint(f"its configuration: {type(error).__name__}: {error}") from error
    config.architectures = [architecture]
    return model, config


def make_versions(path: Path, architecture: str, seeds: tuple[int, ...] = (0, 1)) -> list[dict[str, torch.Tensor]]:
    """Write the directory of a tiny checkpoint, and return its tensors for each seed. Raises NoCheckpoint."""
    from safetensors.torch import load_file

    kind, config = make_config(architecture)
    try:
        torch.manual_seed(0)
        model = kind._from_config(config, dtype=torch.bfloat16)
        if (size := sum(p.numel() for p in model.parameters())) > MOST:
            raise ValueError(f"{size / 1e6:,.0f} M parameters, whose number no field of the configuration sets")
        model.save_pretrained(path)
    except Exception as error:
        raise NoCheckpoint(f"its model: {type(error).__name__}: {error}") from error
    tensors = {n: t for file in sorted(path.glob("*.safetensors")) for n, t in load_file(file).items()}
    for file in path.glob("*.safetensors"):
        file.unlink()
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    write_tokenizer(path, VOCAB)
    tensors = _published(tensors, config)
    tensors |= {n: torch.zeros(shape, dtype=torch.bfloat16) for n, shape in MORE.get(architecture, {}).items()}
    return [randomised(tensors, seed) for seed in seeds]


def _published(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """With the names and forms that published checkpoints have, where transformers writes others."""
    inner = getattr(config, "vlm_config", config)
    old_tower = getattr(getattr(inner, "vision_config", None), "model_type", "") in OLD_TOWERS
    found = {}
    for name, tensor in tensors.items():
        if old_tower:
            name = re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
        if config.model_type == "qwen3_vl_moe" and re.search(r"experts\.(gate_up|down)_proj", name):
            tensor = tensor.transpose(1, 2).contiguous()
        found[name.replace("language_model.model.model.", "language_model.model.")] = tensor
    return found


def randomised(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Every floating tensor with noise of its own. Integers are positions and maps: those stay."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            noise = torch.randn(tensor.shape, generator=generator) * 0.1
            found[name] = (tensor.float() + noise).to(tensor.dtype).contiguous()
        else:
            found[name] = tensor.contiguous()
    return found
