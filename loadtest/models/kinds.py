"""Tiny checkpoints of every kind of model that Hotswap swaps: experts, quantised weights, MLA, and more.

Weights are random and scaled so that two seeds answer differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.models.checkpoints import BENCH_SHAPE, TINY_SHAPE, write_tokenizer

GROUP = 64
Tensors = Iterable[tuple[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of model: its transformers configuration class and shape, and what is done to its checkpoint."""

    config: str
    shape: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    edit: Callable[[Tensors, int], Iterator[tuple[str, Any]]] | None = None
    quantization: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine that this kind needs."""


def _int8(tensors: Tensors, _seed: int) -> Iterator[tuple[str, Any]]:
    from weightsync.publish.quantize import Quantizer

    return Quantizer("int8").tensors(tensors)


def _int8_config(tensors: Mapping[str, Any]) -> dict[str, Any]:
    from weightsync.publish.quantize import Quantizer

    return Quantizer("int8").config(tensors)


def _int8_kv(tensors: Tensors, seed: int) -> Iterator[tuple[str, Any]]:
    import torch

    yield from _int8(tensors, seed)
    for layer in range(TINY_SHAPE["num_hidden_layers"]):
        yield f"model.layers.{layer}.self_attn.k_scale", torch.tensor([0.02 + 0.05 * seed])
        yield f"model.layers.{layer}.self_attn.v_scale", torch.tensor([0.03 + 0.04 * seed])


def _int8_kv_config(tensors: Mapping[str, Any]) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return {**_int8_config(tensors), "kv_cache_scheme": scheme}


def _w4a16(tensors: Tensors, _seed: int) -> Iterator[tuple[str, Any]]:
    from weightsync.publish.quantize import Quantizer

    return Quantizer("w4a16", group_size=GROUP).tensors(tensors)


def _w4a16_config(tensors: Mapping[str, Any]) -> dict[str, Any]:
    from weightsync.publish.quantize import Quantizer

    return Quantizer("w4a16", group_size=GROUP).config(tensors)


def _nibbles(weight: Any, *, symmetric: bool) -> tuple[Any, Any, Any]:
    """(values 0..15 [out, in], scales [out, groups], zero points [out, groups])."""
    import torch

    grouped = weight.float().view(weight.shape[0], -1, GROUP)
    if symmetric:
        scale = (grouped.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-6)
        zero = torch.full_like(scale, 8)
    else:
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-6)
        zero = (-low / scale).round().clamp(0, 15)
    values = (grouped / scale + zero).round().clamp(0, 15)
    return values.view(weight.shape).int(), scale[..., 0], zero[..., 0].int()


def _awq(tensors: Tensors, _seed: int) -> Iterator[tuple[str, Any]]:
    from weightsync.publish.quantize import Quantizer, pack_nibbles

    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for name, tensor in tensors:
        if not Quantizer("int8").quantizes(name, tensor):
            yield name, tensor
            continue
        values, scale, zero = _nibbles(tensor, symmetric=False)
        stem = name.removesuffix("weight")
        yield f"{stem}qweight", pack_nibbles(values.t().contiguous(), order)
        yield f"{stem}qzeros", pack_nibbles(zero.t().contiguous(), order)
        yield f"{stem}scales", scale.t().contiguous().to(tensor.dtype)


def _awq_config(_tensors: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return {**kind, "modules_to_not_convert": []}


def _gptq(tensors: Tensors, _seed: int) -> Iterator[tuple[str, Any]]:
    import torch

    from weightsync.publish.quantize import Quantizer, pack_nibbles

    for name, tensor in tensors:
        if not Quantizer("int8").quantizes(name, tensor):
            yield name, tensor
            continue
        values, scale, zero = _nibbles(tensor, symmetric=True)
        stem = name.removesuffix("weight")
        yield f"{stem}qweight", pack_nibbles(values).t().contiguous()
        yield f"{stem}qzeros", pack_nibbles((zero - 1).t().contiguous())
        yield f"{stem}scales", scale.t().contiguous().to(tensor.dtype)
        yield f"{stem}g_idx", torch.arange(tensor.shape[1], dtype=torch.int32) // GROUP


def _gptq_config(_tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False}


MOE = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
V2 = {**DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy"}
V3 = {**DEEPSEEK, "q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}

KINDS = {
    "dense": Kind("Qwen2Config"),
    "llama": Kind("LlamaConfig"),
    "dense-tied": Kind("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 32}),
    "moe": Kind("Qwen3MoeConfig", MOE),
    "moe-fp32": Kind("Qwen3MoeConfig", MOE, "float32"),
    "mixtral": Kind("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt-oss": Kind("GptOssConfig", GPT_OSS),
    "mla": Kind("DeepseekV2Config", V2),
    "mla-v3": Kind("DeepseekV3Config", V3),
    "w8a8": Kind("LlamaConfig", {}, edit=_int8, quantization=_int8_config),
    "w8a8-bias": Kind("Qwen2Config", {}, edit=_int8, quantization=_int8_config),
    "w8a8-kv": Kind("LlamaConfig", {}, edit=_int8_kv, quantization=_int8_kv_config, vllm={"kv_cache_dtype": "fp8"}),
    "awq": Kind("LlamaConfig", {}, edit=_awq, quantization=_awq_config),
    "gptq": Kind("LlamaConfig", {}, edit=_gptq, quantization=_gptq_config),
    "w4a16": Kind("LlamaConfig", {}, edit=_w4a16, quantization=_w4a16_config),
    "fp8-online": Kind("LlamaConfig", {}, vllm={"quantization": "fp8_per_channel"}),
}


BENCH_MOE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_experts": 16,
    "moe_intermediate_size": 512,
    "head_dim": 64,
}
"""About 0.3 B parameters, most of them in experts."""
BENCH_MLA = {
    **{key: value for key, value in BENCH_MOE.items() if key not in ("num_experts", "head_dim")},
    "n_routed_experts": 16,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
BENCHED = {"dense": BENCH_SHAPE, "moe": BENCH_MOE, "w8a8": BENCH_SHAPE, "awq": BENCH_SHAPE, "mla": BENCH_MLA}
"""The kinds that benchmarks take, and their shapes there."""


def bench_checkpoints(work: Path, kind: str, *, small: bool, count: int = 2) -> list[Path]:
    """The checkpoints that a benchmark swaps, made once in `work`. Raises ValueError for a kind that has no shape."""
    if kind not in BENCHED:
        raise ValueError(f"no model kind {kind!r}; choose one of {', '.join(BENCHED)}")
    paths = [work / f"{'small-' if small else ''}{kind}-{i}" for i in range(count)]
    for seed, path in enumerate(paths):
        if not (path / "config.json").exists():
            make_kind(path, kind, seed=seed, scale=1.0, **({} if small else BENCHED[kind]))
    return paths


def make_kind(path: Path, kind: str, *, seed: int = 0, scale: float = 4.0, **shape: Any) -> Path:
    """Write a checkpoint of `kind`, a key of KINDS, into `path` and return it. `shape` overrides the kind's own."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    chosen = KINDS[kind]
    sizes = {**TINY_SHAPE, **chosen.shape, **shape}
    config = getattr(transformers, chosen.config)(**sizes, eos_token_id=1, bos_token_id=1, pad_token_id=0)
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, chosen.dtype))
    _scatter(model, scale)
    model.save_pretrained(path)
    write_tokenizer(path, config.vocab_size)
    file, about = path / "model.safetensors", path / "config.json"
    tensors = load_file(file) if chosen.edit is not None else {}
    if chosen.edit is not None:
        edited = {name: tensor.contiguous() for name, tensor in chosen.edit(tensors.items(), seed)}
        save_file(edited, file, metadata={"format": "pt"})
    if chosen.quantization is not None:
        described = {**json.loads(about.read_text()), "quantization_config": chosen.quantization(tensors)}
        about.write_text(json.dumps(described))
    return path


def _scatter(model: Any, scale: float) -> None:
    """Weights far enough apart that two seeds answer differently."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.02)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.1)


IMAGE_SIZE, QUERIES = 32, 4
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_blip2(path: Path, *, seed: int = 0, scale: float = 4.0) -> Path:
    """Write a tiny BLIP-2 into `path` and return it: a vision tower, a Q-Former, and an OPT that reads images and text.

    Of the models of images it is one that stock vLLM starts without torchvision.
    """
    import torch
    import transformers

    words = TINY_SHAPE["vocab_size"] - 1
    text = {key: TINY_SHAPE[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    text |= {"ffn_dim": 256, "word_embed_proj_dim": TINY_SHAPE["hidden_size"], "tie_word_embeddings": False}
    config = transformers.Blip2Config(
        vision_config={**TOWER, "image_size": IMAGE_SIZE, "patch_size": 8, "initializer_range": 0.02},
        qformer_config={**TOWER, "encoder_hidden_size": TOWER["hidden_size"], "vocab_size": 16},
        text_config={**text, "model_type": "opt"},
        num_query_tokens=QUERIES,
        image_token_index=words,
    )
    torch.manual_seed(seed)
    model = transformers.Blip2ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    _scatter(model, scale)
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(path)
    write_tokenizer(path, words)
    pixels = transformers.BlipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)  # the processor adds the word of an image to it
    transformers.Blip2Processor(pixels, tokenizer, num_query_tokens=QUERIES).save_pretrained(path)
    return path
