"""The memory that versions on a GPU take from the KV cache: `hotswap doctor --plan`.

Everything is arithmetic from a checkpoint's headers, its config.json and the functions that a worker counts with
(weightsync/vllm_engine/device/room.py); nothing is measured. Sequences are a lower bound for models that attend to a
window in some layers: every layer is counted with all tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from weightsync.errors import CheckpointError
from weightsync.format.manifest import Schema
from weightsync.publish.checkpoint import Checkpoint, read_config
from weightsync.vllm_engine.device.room import MOST_COPIES, SCRATCH, Room

EXPERTS = "experts"  # in the names of weights that vLLM processes after loading, whatever their type
BYTES = {"float32": 4}  # of an element of the KV cache, else 2


@dataclass(frozen=True)
class Model:
    """Bytes on each rank: of the weights, of what a staging takes besides, and of one token in the KV cache."""

    weights: int
    scratch: int
    token: int

    @staticmethod
    def of(directory: Path, ranks: int) -> Model:
        """Of a checkpoint that so many ranks share. Raises CheckpointError where it does not say its shape."""
        schema = Checkpoint(directory).schema
        config = json.loads(read_config(directory) or "{}")
        try:
            token = token_nbytes(config, ranks)
        except (KeyError, TypeError) as error:
            raise CheckpointError(str(directory), f"its config.json does not say {error} of the attention") from None
        return Model(-(-schema.nbytes // ranks), scratch_of(schema, config) // ranks, token)


def scratch_of(schema: Schema, config: Mapping[str, Any]) -> int:
    """The bytes that the largest layer that vLLM processes takes while it is staged: of all weights if they are
    quantised, else of the experts."""
    layers: dict[str, int] = {}
    for name, spec in schema.tensors.items():
        if EXPERTS in name or "quantization_config" in config:
            layer = layer_of(name)
            layers[layer] = layers.get(layer, 0) + spec.nbytes
    return SCRATCH * max(layers.values(), default=0)


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up.weight`; "" outside of the layers."""
    words = name.split(".")
    index = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[: index + 1]) if index is not None else ""


def token_nbytes(config: Mapping[str, Any], ranks: int) -> int:
    """The bytes of one token in the KV cache of each rank. Raises KeyError for a field that the configuration lacks."""
    text = config.get("text_config", config)
    quantised = config.get("quantization_config") or {}
    scheme = quantised.get("kv_cache_scheme") or {}
    element = int(scheme["num_bits"]) // 8 if "num_bits" in scheme else BYTES.get(_dtype(text), 2)
    layers = int(text["num_hidden_layers"])
    if kinds := text.get("layer_types"):
        layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    if text.get("kv_lora_rank"):  # one latent, which every rank has
        return layers * (int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])) * element
    heads = int(text["num_attention_heads"])
    size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    shared = max(1, int(text.get("num_key_value_heads") or heads) // ranks)
    return layers * 2 * shared * size * element


def _dtype(text: Mapping[str, Any]) -> str:
    return str(text.get("dtype") or text.get("torch_dtype") or "")


@dataclass(frozen=True)
class Row:
    """`copies` of the weights on the device beside the live ones. `kv_cache`: the bytes that are left to the KV cache,
    negative if they do not fit; `sequences` of the length that was asked for lie there; `host`: bytes of pinned host
    memory on each rank, for versions that wait there. `chosen`: with HOTSWAP_DEVICE_COPIES=auto."""

    copies: int
    kv_cache: int
    sequences: int
    host: int
    chosen: bool


def rows(model: Model, room: Room, tokens: int) -> list[Row]:
    """From no copies to all three. `tokens` of each sequence."""
    chosen = room.copies(model.weights, model.scratch)
    found = []
    for copies in range(MOST_COPIES + 1):
        left = room.left(model.weights, copies, model.scratch)
        cache = left if room.kv_cache is None or left < 0 else min(left, room.kv_cache)
        sequences = max(0, cache) // (model.token * tokens) if model.token else 0
        found.append(Row(copies, cache, sequences, (MOST_COPIES - copies) * model.weights, copies == chosen))
    return found


def table(found: Iterable[Row], tokens: int) -> Table:
    """For people: GB are of 1e9 bytes."""
    shown = Table("copies", "KV cache, GB", f"sequences of {tokens:,}", "pinned host memory, GB per rank", "")
    for row in found:
        fits = row.kv_cache > 0
        cells = (f"{row.kv_cache / 1e9:.1f}", f"{row.sequences:,}") if fits else ("does not fit", "0")
        shown.add_row(str(row.copies), *cells, f"{row.host / 1e9:.1f}", "auto" if row.chosen else "")
    return shown
