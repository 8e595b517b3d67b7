"""What a Hugging Face `config.json` says about a model, reduced to what Megatron-Core needs. No torch.

An option that would change the numbers and is not converted is refused by name: a model is trained exactly or not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Dtype, ParallelConfig
from trainer.errors import ConfigError, ModelError, UnsupportedModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one dense decoder. `rope_factor` is Llama 3's frequency scaling (None: plain RoPE)."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    tied: bool

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(shape) for _, _, shape in self.schema("float32"))

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding so that every tensor-parallel rank holds as many."""
        return -(-self.vocab // tensor_parallel) * tensor_parallel

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError when the model cannot be cut that way."""
        tensor = parallel.tensor
        for what, size in (("attention heads", self.heads), ("key-value heads", self.kv_heads), ("FFN", self.ffn)):
            if size % tensor:
                raise ConfigError(
                    "parallel.tensor", f"{tensor} does not divide the model's {size} ({what})", "Choose a divisor"
                )
        if self.layers % parallel.pipeline:
            raise ConfigError(
                "parallel.pipeline",
                f"{parallel.pipeline} does not divide the model's {self.layers} layers",
                "Choose a divisor",
            )

    def schema(self, dtype: Dtype) -> list[tuple[str, Dtype, tuple[int, ...]]]:
        """(Hugging Face name, dtype, shape) of every tensor an export yields. Every rank computes the same list."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (self.hidden,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[p + f"self_attn.{name}_proj.weight"] = (rows, self.hidden)
                if self.qkv_bias:
                    shapes[p + f"self_attn.{name}_proj.bias"] = (rows,)
            if self.qk_norm:
                shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[p + "self_attn.o_proj.weight"] = (self.hidden, q)
            shapes[p + "mlp.gate_proj.weight"] = shapes[p + "mlp.up_proj.weight"] = (self.ffn, self.hidden)
            shapes[p + "mlp.down_proj.weight"] = (self.hidden, self.ffn)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return [(name, dtype, shape) for name, shape in shapes.items()]


def load_shape(directory: str | Path) -> ModelShape:
    """Read `config.json`. Raises ModelError (unreadable, incomplete) or UnsupportedModel (says what is supported)."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}. Set model.path to a Hugging Face directory.") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}. Copy the checkpoint again.") from None
    if missing := [name for name in _SIZES if not isinstance(config.get(name), int)]:
        raise ModelError(f"{path} lacks {', '.join(missing)}. It must be the config of a decoder-only language model.")
    _refuse_unsupported(config, path)
    theta, factor = _rope(config, path)
    return ModelShape(
        family=ARCHITECTURES[config["architectures"][0]],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    names = config.get("architectures") or [config.get("model_type", "none named")]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModel(f"{path}: {names[0]} is not supported. Supported: {', '.join(ARCHITECTURES)}.")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            raise UnsupportedModel(f"{path}: {key} is set, which is not converted. Use a model without it.")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{path}: hidden_act {config['hidden_act']!r} is not supported. Supported: silu.")


def _rope(config: dict[str, Any], path: Path) -> tuple[float, float | None]:
    """Base frequency and Llama 3 scaling factor, in either spelling (transformers 5 has both in rope_parameters)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items()):
        return theta, float(rope["factor"])
    raise UnsupportedModel(f"{path}: RoPE scaling {rope} is not supported. Supported: default, and llama3 as released.")
