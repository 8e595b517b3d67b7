"""Hugging Face <-> Megatron-Core names and layouts for Llama, Qwen2 and Qwen3 (dense).

A Megatron parameter is made of one or more Hugging Face tensors, cut over tensor-parallel ranks in one of five ways:

    replicated   the same everywhere (norms)
    row          columns cut (the input dimension of o_proj, down_proj)
    vocab        rows cut, padded to a multiple of the ranks (embedding, output layer)
    gate_up      gate and up cut apart, then concatenated on each rank
    qkv          interleaved by key-value group: [q of group 0, k 0, v 0, q of group 1, ...], groups cut

Both directions are exact copies. Pipeline stages hold disjoint sets of layers, so no tensor crosses stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from trainer.megatron.hf_config import ModelShape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Placement:
    """The Hugging Face tensors behind one Megatron parameter, and how ranks cut them."""

    cut: Literal["replicated", "row", "vocab", "gate_up", "qkv"]
    hf_names: tuple[str, ...]


_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": Placement("vocab", (_EMBEDDING,)),
    "output_layer.weight": Placement("vocab", (_HEAD,)),
    "decoder.final_layernorm.weight": Placement("replicated", ("model.norm.weight",)),
}
_IN_LAYER = {
    "input_layernorm.weight": Placement("replicated", ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Placement("replicated", ("post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": Placement("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Placement("replicated", ("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": Placement("qkv", tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": Placement("qkv", tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": Placement("row", ("self_attn.o_proj.weight",)),
    "mlp.linear_fc1.weight": Placement("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Placement("row", ("mlp.down_proj.weight",)),
}


def placement(megatron_name: str) -> Placement:
    """Placement of a Megatron parameter, by its global name. KeyError: a parameter no supported model has."""
    match = _LAYER.fullmatch(megatron_name)
    if match is None:
        return _OUTSIDE_LAYERS[megatron_name]
    inner = _IN_LAYER[match[2]]
    return Placement(inner.cut, tuple(f"model.layers.{match[1]}.{name}" for name in inner.hf_names))


def shard(shape: ModelShape, place: Placement, full: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
    """Full Hugging Face tensors -> the Megatron parameter of one tensor-parallel rank."""
    if place.cut == "replicated":
        return full[0]
    if place.cut == "row":
        return full[0].chunk(ranks, dim=1)[rank]
    if place.cut == "gate_up":
        return torch.cat([t.chunk(ranks, dim=0)[rank] for t in full])
    if place.cut == "qkv":
        return _fuse_qkv(shape, *full).chunk(ranks, dim=0)[rank]
    padding = shape.padded_vocab(ranks) - shape.vocab
    return torch.nn.functional.pad(full[0], (0, 0, 0, padding)).chunk(ranks, dim=0)[rank]


def unshard(shape: ModelShape, place: Placement, parts: Sequence[Tensor]) -> list[Tensor]:
    """The Megatron parameters of all tensor-parallel ranks -> full Hugging Face tensors, in `hf_names` order."""
    if place.cut == "replicated":
        return [parts[0]]
    if place.cut == "row":
        return [torch.cat(list(parts), dim=1)]
    if place.cut == "gate_up":
        halves = [part.chunk(2, dim=0) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    joined = torch.cat(list(parts))
    return _split_qkv(shape, joined) if place.cut == "qkv" else [joined[: shape.vocab]]


def _fuse_qkv(shape: ModelShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tail = q.shape[1:]
    grouped = [t.reshape(shape.kv_heads, -1, *tail) for t in (q, k, v)]
    return torch.cat(grouped, dim=1).reshape(-1, *tail)


def _split_qkv(shape: ModelShape, fused: Tensor) -> list[Tensor]:
    tail, d = fused.shape[1:], shape.head_dim
    grouped = fused.reshape(shape.kv_heads, -1, *tail)
    sizes = [shape.heads // shape.kv_heads * d, d, d]
    return [t.reshape(-1, *tail) for t in grouped.split(sizes, dim=1)]


def parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(global Megatron name, this rank's parameter): layer numbers count over all pipeline stages."""
    while hasattr(model, "module"):
        model = model.module
    first = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        yield re.sub(r"(?<=decoder\.layers\.)\d+", lambda m: str(int(m[0]) + first), name), parameter


def load_hf(model: Any, shape: ModelShape, get: Callable[[str], Tensor]) -> None:
    """Copy a Hugging Face checkpoint into this rank's part. `get(name)` gives a full tensor. No communication."""
    ranks, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    for name, parameter in parameters(model):
        place = placement(name)
        names = (_EMBEDDING,) if shape.tied and place.hf_names == (_HEAD,) else place.hf_names
        parameter.data.copy_(shard(shape, place, [get(n) for n in names], ranks, rank))


def export_hf(model: Any, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of this pipeline stage, on its first tensor-parallel rank; none on the others.

    Collective over the tensor-parallel group: all its ranks must exhaust it. One tensor is gathered at a time.
    """
    for name, parameter in parameters(model):
        place = placement(name)
        if shape.tied and place.hf_names == (_HEAD,):
            continue  # the copy that a last pipeline stage keeps of the embedding
        parts = _gather(parameter.data, place)
        if parts:
            yield from zip(place.hf_names, unshard(shape, place, parts), strict=True)


def _gather(local: Tensor, place: Placement) -> list[Tensor]:
    group = ps.get_tensor_model_parallel_group()
    first = ps.get_tensor_model_parallel_rank() == 0
    if dist.get_world_size(group) == 1 or place.cut == "replicated":
        return [local] if first else []
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))] if first else None
    dist.gather(local.contiguous(), parts, dst=dist.get_global_rank(group, 0), group=group)
    return parts or []
