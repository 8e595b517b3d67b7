"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's column- and row-parallel linear layers.

Beside a linear layer `linear_fc1` stands its adapter `linear_fc1_lora`, with a pair of matrices A [r, in] and B
[out, r] for each Hugging Face projection that Megatron has fused into the layer. A forward hook adds
alpha / r * B A x to what the layer returns; Megatron's modules stay as they are, and their weights are frozen.

A and B are cut as their layer is, so that the result is the same in every layout:

    column-parallel (qkv, fc1)   A whole on every rank, B cut over its rows; what A makes is shared before B
    row-parallel (proj, fc2)     A cut over its columns, B whole; what A makes is summed before B
    experts                      the dispatcher sums over the ranks that cut an expert, outputs as well as the gradients
                                 of inputs: only the gradient of the whole matrix is summed here

The output of A has r numbers for each token and projection, so that this is all the traffic there is. Applying A
first also saves the memory of B A, which is never formed except to merge.

Dropout is on the input of the adapter, drawn once for the projections of a fused layer.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as tp_random
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from trainer.config import Dtype, LoraConfig
from trainer.megatron.convert import (
    ADAPTER_SUFFIX,
    Placement,
    adapter_name,
    fuse_heads,
    global_name,
    is_adapter,
    parameters,
    placement,
    shard,
    unwrap,
    whole,
)
from trainer.megatron.hf_config import ModelShape

_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class Switch:
    """Whether the adapters of a model count, and whether their inputs drop out: shared by all of them."""

    on: bool = True
    dropout: bool = True

    @contextlib.contextmanager
    def set(self, *, on: bool, dropout: bool) -> Iterator[None]:
        """Within the body."""
        before = self.on, self.dropout
        self.on, self.dropout = on, dropout
        try:
            yield
        finally:
            self.on, self.dropout = before


class Pair(torch.nn.Module):
    """This rank's part of A and B of one projection."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.A, self.B = torch.nn.Parameter(a), torch.nn.Parameter(b)


class Adapter(torch.nn.ModuleDict):
    """The pairs of one linear layer, by the last part of the projection's name (`q_proj`). Registered as the layer's
    sibling, under its name and `_lora`; Megatron then finds it for checkpoints."""

    def __init__(
        self, linear: Any, place: Placement, pairs: dict[str, Pair], shape: ModelShape, lora: LoraConfig, switch: Switch
    ) -> None:
        super().__init__(pairs)
        self._place, self._shape, self._lora, self._switch = place, shape, lora, switch
        self.column, self.expert, self.group = place.cut != "row", place.expert, place.group
        self.sequence = bool(linear.sequence_parallel) and not place.expert
        self._rows = {name: n // dist.get_world_size(self.group) for name, n in _projections(shape, place, linear)}
        for pair in pairs.values():
            self._mark(pair, linear.weight)
        self.hook: Any = None  # what has the layer add this adapter to its output, while it does

    def _mark(self, pair: Pair, weight: Tensor) -> None:
        """Tell Megatron how to reduce the gradients and which ranks count in their norm."""
        cut, replicated = (pair.B, pair.A) if self.column else (pair.A, pair.B)
        set_tensor_model_parallel_attributes(cut, True, 0 if self.column else 1, 1)
        replicated.sequence_parallel = self.sequence  # each rank has the gradient of its part of the sequence
        if self.expert:
            # The norm counts what is whole once for the ranks that cut everything else; experts are cut over others.
            set_tensor_model_parallel_attributes(replicated, True, 0, 1)
            replicated.shared = dist.get_rank(self.group) > 0
        for matrix in (cut, replicated):
            matrix.allreduce = getattr(weight, "allreduce", True)  # False: replicas are the expert's, not everybody's

    def add(self, _linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> Any:
        if not self._switch.on:
            return None
        return output[0] + self._delta(inputs[0]), output[1]

    def _delta(self, x: Tensor) -> Tensor:
        hidden = self._hidden(self._dropped(x)).split(self._lora.rank, dim=-1)
        made = {name: self._last(h, pair.B) for h, (name, pair) in zip(hidden, self.items(), strict=True)}
        return self._fused(made) * (self._lora.alpha / self._lora.rank)

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self._lora.dropout and self._switch.dropout):
            return x
        tracker = tp_random.get_cuda_rng_tracker()
        if self.expert:
            generator = tracker.fork(tp_random.get_expert_parallel_rng_tracker_name())
        elif self.column and not self.sequence:  # the ranks that cut the layer have the same input
            generator = tracker.fork(tp_random.get_data_parallel_rng_tracker_name())
        else:
            generator = tracker.fork()
        with generator:
            return F.dropout(x, self._lora.dropout)

    def _hidden(self, x: Tensor) -> Tensor:
        """A x of every projection, one after the other."""
        a = torch.cat([pair.A for pair in self.values()])
        if self.expert:
            return F.linear(x, _SumGradient.apply(a, self.group) if self.column else a)
        hidden = F.linear(x, a)
        if self.column and self.sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.group)
        if self.column:
            return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.group)
        if self.sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden, group=self.group)

    def _last(self, hidden: Tensor, b: Tensor) -> Tensor:
        return F.linear(hidden, _SumGradient.apply(b, self.group) if self.expert and not self.column else b)

    def _fused(self, made: dict[str, Tensor]) -> Tensor:
        """[..., the layer's outputs] from those of each projection; zeros for one without an adapter."""
        some = next(iter(made.values()))
        parts = [made[n] if n in made else some.new_zeros(*some.shape[:-1], rows) for n, rows in self._rows.items()]
        if self._place.cut != "qkv":
            return torch.cat(parts, dim=-1)
        return fuse_heads(self._shape.kv_heads // dist.get_world_size(self.group), parts, dim=-1)

    def product(self) -> Tensor:
        """alpha / r * B A in float32, in the form of this rank's part of the layer's weight. Collective only under
        `shard: full`."""
        made = {name: (whole(pair.B).float() @ whole(pair.A).float()).T for name, pair in self.items()}
        return self._fused(made).T * (self._lora.alpha / self._lora.rank)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The shards that Megatron asks a module for when a checkpoint is made."""
        axes = {f"{name}.{'B' if self.column else 'A'}": 0 if self.column else 1 for name in self}
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets, **groups)
        return made


class _SumGradient(torch.autograd.Function):
    """A matrix that is whole on every rank of a group, each of which has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def attach(model: Any, shape: ModelShape, lora: LoraConfig, seed: int, switch: Switch) -> None:
    """Freeze a GPTModel's weights and put adapters on the targets: A random as PEFT's, the same in every layout, and B
    zero, so that nothing changes yet. Call it before Megatron's wrappers are there."""
    freeze(model)
    put(model, build(model, shape, lora, seed, switch))


def freeze(model: Any) -> None:
    """Train none of a GPTModel's weights, and let gradients reach what is put on it later."""
    model.requires_grad_(False)
    if model.pre_process and model.config.recompute_granularity == "full":
        # A checkpointed layer has gradients only if its input has one, and no trained weight lies before it.
        model.embedding.register_forward_hook(_require_gradient)


def build(model: Any, shape: ModelShape, lora: LoraConfig, seed: int, switch: Switch) -> dict[str, Adapter]:
    """New adapters for a GPTModel, by the names of their layers. They count once they are `put` there."""
    found = {}
    for name, linear in model.named_modules():
        if name.rpartition(".")[2] not in _LINEARS:
            continue
        place = placement(shape, global_name(model, name) + ".weight")
        pairs = {
            _leaf(hf_name): _pair(shape, hf_name, place, rows, linear, lora, seed)
            for hf_name, (_, rows) in zip(place.hf_names, _projections(shape, place, linear), strict=True)
            if _leaf(hf_name) in shape.module_names(lora.target_modules)
        }
        if pairs:
            found[name] = Adapter(linear, place, pairs, shape, lora, switch)
    return found


def put(model: Any, adapters: Mapping[str, Adapter]) -> None:
    """Have the layers of a GPTModel that has no adapters add these."""
    modules = dict(model.named_modules())
    for name, adapter in adapters.items():
        parent, _, leaf = name.rpartition(".")
        modules[parent].add_module(leaf + ADAPTER_SUFFIX, adapter)
        adapter.hook = modules[name].register_forward_hook(adapter.add)


def take(model: Any, adapters: Mapping[str, Adapter]) -> None:
    """Take what was `put` off again: others can take the place, and these come back as they were."""
    modules = dict(model.named_modules())
    for name, adapter in adapters.items():
        parent, _, leaf = name.rpartition(".")
        delattr(modules[parent], leaf + ADAPTER_SUFFIX)
        adapter.hook.remove()


def _require_gradient(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _pair(
    shape: ModelShape, hf_name: str, place: Placement, rows: int, linear: Any, lora: LoraConfig, seed: int
) -> Pair:
    digest = hashlib.sha256(f"{seed} {hf_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(lora.rank, linear.input_size).uniform_(-1, 1, generator=generator) / linear.input_size**0.5
    both = (full, torch.zeros(rows, lora.rank))
    names = [adapter_name(hf_name, matrix) for matrix in "AB"]
    ranks, rank = dist.get_world_size(place.group), dist.get_rank(place.group)
    cut = [
        shard(shape, place.of_adapter(matrix, name), [tensor], ranks, rank)
        for matrix, name, tensor in zip("AB", names, both, strict=True)
    ]
    a, b = (t.to(linear.weight.dtype).contiguous() for t in cut)
    return Pair(a, b)


def _projections(shape: ModelShape, place: Placement, linear: Any) -> list[tuple[str, int]]:
    """(last part of the name, rows) of each projection in a layer, over all ranks that cut it."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = [q, kv, kv] if place.cut == "qkv" else [linear.output_size // len(place.hf_names)] * len(place.hf_names)
    return [(_leaf(name), n) for name, n in zip(place.hf_names, rows, strict=True)]


def _leaf(hf_name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return hf_name.split(".")[-2]


def adapters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(global Megatron name, this rank's parameter) of the adapters alone."""
    return ((name, parameter) for name, parameter in parameters(model) if is_adapter(name))


def merged(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(global Megatron name, this rank's part) of the model's own weights with the adapters added to them."""
    model = unwrap(model)
    found = {
        global_name(model, name).removesuffix(ADAPTER_SUFFIX) + ".weight": module
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    }
    for name, parameter in parameters(model):
        if name in found:
            yield name, whole(parameter).float() + found[name].product()
        elif not is_adapter(name):
            yield name, parameter


def adapter_schema(shape: ModelShape, lora: LoraConfig, dtype: Dtype) -> list[tuple[str, Dtype, tuple[int, ...]]]:
    """(PEFT's name, dtype, shape) of every tensor of an adapter."""
    targets = shape.module_names(lora.target_modules)
    found: list[tuple[str, Dtype, tuple[int, ...]]] = []
    for name, _, size in shape.schema(dtype):
        if name.endswith(".weight") and len(size) == 2 and _leaf(name) in targets:
            found.append((adapter_name(name, "A"), dtype, (lora.rank, size[1])))
            found.append((adapter_name(name, "B"), dtype, (size[0], lora.rank)))
    return found


def adapter_config(shape: ModelShape, lora: LoraConfig, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(shape.module_names(lora.target_modules)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
