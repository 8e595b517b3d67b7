"""Checkpoints of the kinds of model that are swapped on the emulated GPU: those of `loadtest/models/kinds.py`, and some
in sizes that only GPUs' kernels take. Kinds that vLLM's own kernels pack or quantise on the device are not here: those
kernels compute nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loadtest.models.kinds import make_kind
from weightsync.publish.quantize import Quantizer

Tensors = dict[str, torch.Tensor]
MLA = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {**BLOCKS, "moe_intermediate_size": 128, "num_experts": 4, "head_dim": 64}


def _plain(kind: str, **shape: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        make_kind(path, kind, seed=1, **shape)

    return make


def _fp8(kind: str, shape: dict[str, int]) -> Callable[[Path], None]:
    """In blocks of 128."""

    def make(path: Path) -> None:
        make_kind(path, kind, seed=1, scale=2.0, **shape)
        quantizer, weights = Quantizer("fp8"), load_file(path / "model.safetensors")
        named = {name: tensor.contiguous() for name, tensor in quantizer.tensors(weights.items())}
        save_file(named, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantizer.config(weights)}))

    return make


KINDS: dict[str, Callable[[Path], None]] = {
    "dense": _plain("dense"),
    "dense-tied": _plain("dense-tied"),
    "dense-fp8": _fp8("llama", BLOCKS),
    "moe": _plain("moe"),
    "moe-fp8": _fp8("moe", EXPERTS),
    "mixtral": _plain("mixtral"),
    "gpt-oss": _plain("gpt-oss"),
    "mla": _plain("mla", **MLA),
    "mla-v3": _plain("mla-v3", **MLA),
    "w8a8": _plain("w8a8"),
}


def versions_of(checkpoint: Path) -> list[Tensors]:
    """Three: what the checkpoint has, and twice the same numbers in other places, which leaves them in their range."""
    first = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}

    def moved(change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        return {name: change(t).contiguous() if t.ndim > 1 else t for name, t in first.items()}

    return [first, moved(lambda t: t.flip(0)), moved(lambda t: t.roll(1, 0))]
