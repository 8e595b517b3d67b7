"""Hugging Face <-> Megatron-Core names and layouts for Llama, Qwen2, Qwen3, Mixtral and Qwen3-MoE.

A Megatron parameter is made of one or more Hugging Face tensors, cut over tensor-parallel ranks in one of six ways:

    replicated   the same everywhere (norms)
    column       rows cut (B of an adapter of a column-parallel layer)
    row          columns cut (the input dimension of o_proj, down_proj)
    vocab        rows cut, padded to a multiple of the ranks (embedding, output layer)
    gate_up      gate and up cut apart, then concatenated on each rank
    qkv          interleaved by key-value group: [q of group 0, k 0, v 0, q of group 1, ...], groups cut

Both directions are exact copies. Pipeline stages hold disjoint sets of layers, expert-parallel ranks disjoint sets of
experts, so no tensor crosses either. Experts are cut over the expert-tensor-parallel ranks, everything else over the
tensor-parallel ones; of the replicas of a part, the first speaks for it.

The matrices of low-rank adapters (lora.py) have PEFT's names there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.megatron.hf_config import ModelShape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_ADAPTER = re.compile(r"(.+)_lora\.(\w+)\.([AB])")
ADAPTER_SUFFIX = "_lora"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Placement:
    """The Hugging Face tensors behind one Megatron parameter, and how ranks cut them."""

    cut: Literal["replicated", "column", "row", "vocab", "gate_up", "qkv"]
    hf_names: tuple[str, ...]
    expert: bool = False

    @property
    def group(self) -> Any:
        """The ranks that cut it."""
        return ps.get_expert_tensor_parallel_group() if self.expert else ps.get_tensor_model_parallel_group()

    @property
    def first_replica(self) -> bool:
        """Whether this rank's copy is the one to export."""
        if self.expert:
            return int(ps.get_expert_data_parallel_rank()) == 0
        return int(ps.get_data_parallel_rank(with_context_parallel=True)) == 0

    def of_adapter(self, matrix: str, hf_name: str) -> Placement:
        """Placement of A or B of an adapter of this weight: one is whole everywhere, the other cut as the weight is."""
        if self.cut == "row":
            return replace(self, cut="row" if matrix == "A" else "replicated", hf_names=(hf_name,))
        return replace(self, cut="column" if matrix == "B" else "replicated", hf_names=(hf_name,))


class Slice(NamedTuple):
    """Rows (`dim` 0) or columns (1) of a Hugging Face tensor from `start` on; the whole of it if nothing is cut."""

    name: str
    tensor: Tensor
    dim: int
    start: int


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


def placement(shape: ModelShape, megatron_name: str) -> Placement:
    """Placement of a Megatron parameter, by its global name. KeyError: a parameter no supported model has."""
    if (match := _ADAPTER.fullmatch(megatron_name)) is not None:
        weight = placement(shape, match[1] + ".weight")
        (hf_name,) = (name for name in weight.hf_names if name.endswith(f".{match[2]}.weight"))
        return weight.of_adapter(match[3], adapter_name(hf_name, match[3]))
    match = _LAYER.fullmatch(megatron_name)
    if match is None:
        return _OUTSIDE_LAYERS[megatron_name]
    inner = _mixture_placement(shape, match[2]) if shape.experts else None
    inner = inner or _IN_LAYER[match[2]]
    return replace(inner, hf_names=tuple(f"model.layers.{match[1]}.{name}" for name in inner.hf_names))


def _mixture_placement(shape: ModelShape, name: str) -> Placement | None:
    names = shape.expert_names
    if name == "mlp.router.weight":
        return Placement("replicated", (names.router,))
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    parts = (names.gate, names.up) if match[2] == "1" else (names.down,)
    hf_names = tuple(f"{names.experts}.{match[1]}.{part}.weight" for part in parts)
    return Placement("gate_up" if match[2] == "1" else "row", hf_names, expert=True)


def is_adapter(megatron_name: str) -> bool:
    return _ADAPTER.fullmatch(megatron_name) is not None


def adapter_name(hf_name: str, matrix: str) -> str:
    """PEFT's name of A or B for a weight."""
    return f"base_model.model.{hf_name.removesuffix('.weight')}.lora_{matrix}.weight"


def shard(shape: ModelShape, place: Placement, full: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
    """Full Hugging Face tensors -> the Megatron parameter of one tensor-parallel rank."""
    if place.cut == "replicated":
        return full[0]
    if place.cut in ("row", "column"):
        return full[0].chunk(ranks, dim=1 if place.cut == "row" else 0)[rank]
    if place.cut == "gate_up":
        return torch.cat([t.chunk(ranks, dim=0)[rank] for t in full])
    if place.cut == "qkv":
        return fuse_heads(shape.kv_heads, full).chunk(ranks, dim=0)[rank]
    padding = shape.padded_vocab(ranks) - shape.vocab
    return torch.nn.functional.pad(full[0], (0, 0, 0, padding)).chunk(ranks, dim=0)[rank]


def cut(shape: ModelShape, place: Placement, local: Tensor, ranks: int, rank: int) -> list[Slice]:
    """One rank's Megatron parameter -> its slices of the Hugging Face tensors: the inverse of `shard`."""
    if place.cut == "replicated":
        return [Slice(place.hf_names[0], local, 0, 0)] if rank == 0 else []
    if place.cut in ("row", "column"):
        dim = 1 if place.cut == "row" else 0
        return [Slice(place.hf_names[0], local, dim, rank * local.shape[dim])]
    if place.cut == "vocab":
        first = rank * local.shape[0]
        rows = local[: max(shape.vocab - first, 0)]
        return [Slice(place.hf_names[0], rows, 0, first)] if len(rows) else []
    parts = local.chunk(2, dim=0) if place.cut == "gate_up" else _split_qkv(shape, local, ranks)
    return [Slice(n, part, 0, rank * part.shape[0]) for n, part in zip(place.hf_names, parts, strict=True)]


def join(slices: Sequence[Slice]) -> list[tuple[str, Tensor]]:
    """Full tensors from the slices of all ranks, in rank order."""
    by_name: dict[str, list[Slice]] = {}
    for piece in slices:
        by_name.setdefault(piece.name, []).append(piece)
    return [(n, p[0].tensor if len(p) == 1 else torch.cat([s.tensor for s in p], p[0].dim)) for n, p in by_name.items()]


def fuse_heads(kv_heads: int, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """q, k and v along `dim`, interleaved by key-value group: the inverse of `_split_qkv`."""
    dim %= parts[0].ndim
    grouped = [t.unflatten(dim, (kv_heads, -1)) for t in parts]
    return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)


def _split_qkv(shape: ModelShape, fused: Tensor, ranks: int) -> list[Tensor]:
    tail, d = fused.shape[1:], shape.head_dim
    grouped = fused.reshape(shape.kv_heads // ranks, -1, *tail)
    sizes = [shape.heads // shape.kv_heads * d, d, d]
    return [t.reshape(-1, *tail) for t in grouped.split(sizes, dim=1)]


def unwrap(model: Any) -> Any:
    """The GPTModel inside Megatron's data-parallel and half-precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(global Megatron name, this rank's parameter)."""
    model = unwrap(model)
    return ((global_name(model, name), parameter) for name, parameter in model.named_parameters())


def global_name(model: Any, name: str) -> str:
    """The name of a module or parameter of a GPTModel with layer numbers that count over all pipeline stages and
    chunks, and expert numbers over all expert-parallel ranks."""
    first = model.decoder.layers[0].layer_number - 1
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda m: str(int(m[0]) + first), name)
    return re.sub(r"(?<=local_experts\.)\d+", lambda m: str(int(m[0]) + _first_expert(model)), name)


def whole(parameter: Tensor) -> Tensor:
    """The tensor-parallel rank's part of a parameter. Collective if it is sharded over data-parallel ranks too."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def _first_expert(model: Any) -> int:
    ranks, rank = ps.get_expert_model_parallel_world_size(), ps.get_expert_model_parallel_rank()
    return int(model.config.num_moe_experts // ranks * rank)


def load_hf(named: Iterable[tuple[str, Tensor]], shape: ModelShape, get: Callable[[str], Tensor]) -> None:
    """Copy a Hugging Face checkpoint into this rank's `parameters`. `get(name)` gives a full tensor. No
    communication."""
    for name, parameter in named:
        place = placement(shape, name)
        names = (_EMBEDDING,) if shape.tied and place.hf_names == (_HEAD,) else place.hf_names
        ranks, rank = dist.get_world_size(place.group), dist.get_rank(place.group)
        parameter.data.copy_(shard(shape, place, [get(n) for n in names], ranks, rank))


def export_slices(
    named: Iterable[tuple[str, Tensor]], shape: ModelShape, together: Container[str] = frozenset()
) -> Iterator[Slice]:
    """The parameters that this rank speaks for, as slices of Hugging Face tensors. The slices of all ranks cover
    every tensor exactly once. Without communication, but for tensors that are named in `together`: one of the ranks
    that cut them gets all of them, each in turn, one parameter at a time; and under `shard: full`, where one parameter
    at a time is gathered."""
    for turn, (place, local) in enumerate(_exported(named, shape)):
        ranks = dist.get_world_size(place.group)
        if place.cut != "replicated" and any(name in together for name in place.hf_names):
            yield from (
                Slice(n, tensor, 0, 0) for n, tensor in _joined(shape, place, _gather(local, place, turn % ranks))
            )
        else:
            yield from cut(shape, place, local, ranks, dist.get_rank(place.group))


def export_hf(named: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of the parameters that this pipeline stage, or expert-parallel rank, has; on one
    rank of those that cut it. Collective over these ranks: all must exhaust it. One parameter is gathered at a time.
    """
    for place, local in _exported(named, shape):
        yield from _joined(shape, place, _gather(local, place))


def _joined(shape: ModelShape, place: Placement, parts: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The full tensors of a parameter from what the ranks that cut it have; none from none."""
    return join([piece for r, part in enumerate(parts) for piece in cut(shape, place, part, len(parts), r)])


def _exported(named: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[Placement, Tensor]]:
    """Parameters of which this rank holds the copy to export."""
    for name, parameter in named:
        place = placement(shape, name)
        local = whole(parameter)
        if place.first_replica and not (shape.tied and place.hf_names == (_HEAD,)):  # the last stage's copy
            yield place, local


def _gather(local: Tensor, place: Placement, to: int = 0) -> list[Tensor]:
    """The parts of all ranks that cut a parameter, on the one that is `to` among them; of a replicated one its own."""
    group = place.group
    here = dist.get_rank(group) == to
    if dist.get_world_size(group) == 1 or place.cut == "replicated":
        return [local] if here else []
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))] if here else None
    dist.gather(local.contiguous(), parts, dst=dist.get_global_rank(group, to), group=group)
    return parts or []
