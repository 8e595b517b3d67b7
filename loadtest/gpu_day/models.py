"""The checkpoints of the phases with vLLM: random weights, made here, in the shapes of real models."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu_day.device import Device

TOKENIZED = 512  # words of the tokenizer: prompts are token ids
PROMPTS = [[(7 * i + 3 * j) % 400 + 3 for j in range(20 + 17 * i)] for i in range(4)]
WRITTEN = "generation_config.json"  # the last file of a checkpoint
SHARD = "model-{:05}-of-00002.safetensors"


@dataclass(frozen=True)
class Model:
    """A transformers configuration class and its sizes, and the sizes where there is no CUDA.

    `large`: its two checkpoints share the file of their matrices and differ in the rest alone. A version of it still
    costs its whole size to publish, to stage and to flip to.
    """

    name: str
    config: str
    shape: dict[str, Any]
    tiny: dict[str, Any]
    large: bool = False


TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": TOKENIZED}  # fmt: skip
QWEN = Model(
    "qwen3", "Qwen3Config",
    {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    {**TINY, "head_dim": 32},
)  # fmt: skip
"""Qwen3-0.6B."""
LLAMA = Model(
    "llama", "LlamaConfig",
    {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    TINY, large=True,
)  # fmt: skip
"""Llama-3.1-8B."""
MOE = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
}  # fmt: skip
"""About 0.1 B; every size a multiple of the blocks of 128."""


def checkpoints(model: Model, device: Device, work: Path, *, small: bool) -> list[Path]:
    """Two, which answer differently; made once in `work`."""
    paths = [work / f"{model.name}{'-tiny' if small else ''}-{seed}" for seed in (1, 2)]
    shape = {**model.shape, **(model.tiny if small else {})}
    for seed, path in enumerate(paths, 1):
        if not (path / WRITTEN).exists():
            _write(path, model.config, shape, seed, device, paths[0] if model.large and seed > 1 else None)
    return paths


def _write(path: Path, name: str, shape: dict[str, Any], seed: int, device: Device, shared: Path | None) -> None:
    """Random weights of the scale that keeps activations in bounds, drawn on the device; matrices and vectors in a
    file each. `shared`: the checkpoint whose matrices this one has."""
    import transformers
    from safetensors.torch import save_file

    from loadtest.models.checkpoints import write_tokenizer

    config = getattr(transformers, name)(**shape, eos_token_id=1, bos_token_id=1, pad_token_id=0, dtype="bfloat16")
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(skeleton).__name__]
    kept = {
        k: v for k, v in skeleton.state_dict().items() if not (config.tie_word_embeddings and k == "lm_head.weight")
    }
    generator = torch.Generator(device.torch).manual_seed(seed)

    def drawn(value: torch.Tensor) -> torch.Tensor:
        found = torch.randn(value.shape, generator=generator, dtype=torch.bfloat16, device=device.torch)
        return (found.mul_(0.1).add_(1) if value.ndim == 1 else found.mul_(2 * value.shape[-1] ** -0.5)).cpu()

    path.mkdir(parents=True, exist_ok=True)
    where = {key: SHARD.format(1 if value.ndim > 1 else 2) for key, value in kept.items()}
    for shard in sorted(set(where.values())):
        (path / shard).unlink(missing_ok=True)
        if shared is not None and shard == SHARD.format(1):
            os.link(shared / shard, path / shard)
        else:
            tensors = {key: drawn(value) for key, value in kept.items() if where[key] == shard}
            save_file(tensors, path / shard, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config.save_pretrained(path)
    write_tokenizer(path, TOKENIZED)
    if device.cuda:
        torch.cuda.empty_cache()  # engines in other processes look for what is free


def fp8_checkpoints(work: Path) -> list[Path]:
    """A mixture of experts whose matrices are e4m3 in blocks of 128 x 128; routers are left as they are."""
    from safetensors.torch import load_file, save_file

    from loadtest.models.kinds import make_kind
    from weightsync.publish.quantize import Quantizer

    paths = [work / f"moe-fp8-{seed}" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        described = path / "config.json"
        if described.exists() and "quantization_config" in described.read_text():
            continue
        make_kind(path, "moe", seed=seed, scale=2.0, **MOE)
        weights, quantizer = load_file(path / "model.safetensors"), Quantizer("fp8")
        tensors = {name: tensor.contiguous() for name, tensor in quantizer.tensors(weights.items())}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = {**json.loads(described.read_text()), "quantization_config": quantizer.config(weights)}
        described.write_text(json.dumps(config))
    return paths


def nbytes_of(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
