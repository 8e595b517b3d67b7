"""A model's Hugging Face `config.json`, reduced to what Megatron-Core needs. No torch.

An option that would change the numbers and is not converted is refused by name: a model is trained exactly or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import LINEAR_LAYERS, Dtype, ParallelConfig
from trainer.errors import ConfigError, ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class ExpertNames(NamedTuple):
    """The names of a family's router and experts, below `model.layers.N.`."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


_EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe.gate.weight", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3_moe": ExpertNames("mlp.gate.weight", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder. `rope_factor` is Llama 3's frequency scaling (None: plain RoPE).

    `experts` is 0 for a dense model. In a mixture every layer has `experts` of `expert_ffn`, of which each token takes
    `experts_per_token`, weighted by the router's softmax over those (`normalize_router`) or over all.
    """

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
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_router: bool = True

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def expert_names(self) -> ExpertNames:
        """KeyError for a dense family."""
        return _EXPERT_NAMES[self.family]

    def module_names(self, targets: Container[str]) -> frozenset[str]:
        """The family's names of linear layers that are called by Llama's (`gate_proj`); Mixtral has others."""
        names = self.expert_names if self.experts else None
        own = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down} if names is not None else {}
        return frozenset(own.get(name, name) for name in LINEAR_LAYERS if name in targets)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(shape) for _, _, shape in self.schema("float32"))

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding so that every tensor-parallel rank holds as many."""
        return -(-self.vocab // tensor_parallel) * tensor_parallel

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError when the model cannot be cut that way."""
        cuts = [("tensor", parallel.tensor, self.heads, "attention heads")]
        cuts += [("tensor", parallel.tensor, self.kv_heads, "key-value heads")]
        cuts += [("pipeline", parallel.pipeline, self.layers, "layers")]
        if self.experts:
            cuts += [("expert_tensor", parallel.expert_tensor_size, self.expert_ffn, "expert FFN")]
            cuts += [("expert", parallel.expert, self.experts, "experts")]
        else:
            cuts += [("tensor", parallel.tensor, self.ffn, "FFN")]
        if parallel.virtual_pipeline > 1:
            chunks = parallel.pipeline * parallel.virtual_pipeline
            cuts += [("virtual_pipeline", chunks, self.layers, "layers, over all stages")]
        for key, ranks, size, what in cuts:
            if size % ranks:
                problem = f"{ranks} does not divide the model's {size} ({what})"
                raise ConfigError(f"parallel.{key}", problem, "Choose a divisor")
        self._check_mixture(parallel)

    def _check_mixture(self, parallel: ParallelConfig) -> None:
        if parallel.expert > 1 and not self.experts:
            raise ConfigError("parallel.expert", f"{self.family} has no experts", "Set it to 1")
        if self.experts and parallel.tensor > 1 and not parallel.sequence:
            # Without it every tensor-parallel rank would send the same tokens to the experts.
            problem = "a mixture of experts trains with tensor parallelism only if activations are cut as well"
            raise ConfigError("parallel.sequence", problem, "Set it to true")
        if self.experts and parallel.shard == "full":
            raise ConfigError("parallel.shard", "full does not shard experts", "Set it to optimizer and raise expert")

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
            shapes |= {p + name: shape for name, shape in self._feed_forward()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return [(name, dtype, shape) for name, shape in shapes.items()]

    def _feed_forward(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name below the layer, shape) of one layer's feed-forward weights."""
        if not self.experts:
            up, down = (self.ffn, self.hidden), (self.hidden, self.ffn)
            return [("mlp.gate_proj.weight", up), ("mlp.up_proj.weight", up), ("mlp.down_proj.weight", down)]
        names, up, down = self.expert_names, (self.expert_ffn, self.hidden), (self.hidden, self.expert_ffn)
        found: list[tuple[str, tuple[int, ...]]] = [(names.router, (self.experts, self.hidden))]
        for expert in range(self.experts):
            for name, shape in ((names.gate, up), (names.up, up), (names.down, down)):
                found.append((f"{names.experts}.{expert}.{name}.weight", shape))
        return found


def load_shape(directory: str | Path) -> ModelShape:
    """Read `config.json`. Raises ModelError: it is unreadable, incomplete or not supported."""
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
        **_mixture(config, path),
    )


def _mixture(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of ModelShape that only a mixture of experts has."""
    family = ARCHITECTURES[config["architectures"][0]]
    if family not in _EXPERT_NAMES:
        return {}
    experts = config.get("num_local_experts") or config.get("num_experts")
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    chosen = config.get("num_experts_per_tok")
    if not (isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen <= experts):
        raise ModelError(f"{path}: {chosen} of {experts} experts per token. Use the config.json of the checkpoint.")
    if chosen == 1:
        raise ModelError(f"{path}: one expert per token is not converted. Use a model with at least two.")
    normalize = family == "mixtral" or bool(config.get("norm_topk_prob", False))
    return {"experts": experts, "experts_per_token": chosen, "expert_ffn": ffn, "normalize_router": normalize}


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    names = config.get("architectures") or [config.get("model_type", "none named")]
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"{path}: {names[0]} is not supported. Supported: {', '.join(ARCHITECTURES)}.")
    if config.get("quantization_config"):
        advice = "Train the checkpoint that it was made of, and set publish.quantize.scheme to served"
        raise ModelError(f"{path}: the weights are quantised. {advice}.")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"{path}: {key} is set, which is not converted. Use a model without it.")
    mixtral_window = "sliding_window" if names[0] == "MixtralForCausalLM" else "use_sliding_window"
    for key in (mixtral_window, "router_jitter_noise", "mlp_only_layers"):
        if config.get(key):
            raise ModelError(f"{path}: {key} is {config[key]}, which is not converted. Use a model without it.")
    if config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(f"{path}: decoder_sparse_step must be 1: mixtures in some layers are not converted.")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {config['hidden_act']!r} is not supported. Supported: silu.")


def _rope(config: dict[str, Any], path: Path) -> tuple[float, float | None]:
    """Base frequency and Llama 3 scaling factor, in either spelling (transformers 5 has both in rope_parameters)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items()):
        return theta, float(rope["factor"])
    raise ModelError(f"{path}: RoPE scaling {rope} is not supported. Supported: default, and llama3 as released.")
