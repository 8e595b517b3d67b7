"""Muon (Jordan et al. 2024; with weight decay and AdamW's scale of updates: Liu et al., arXiv 2502.16982): a matrix W
moves by its momentum M, made orthogonal. With the gradient G,

    M <- m M + (1 - m) G
    O  = NS((1 - m) G + m M)    some steps of Newton and Schulz, X <- a X + (b X X^T + c (X X^T)^2) X
    W <- W - lr (weight_decay W + 0.2 sqrt(max(rows, columns)) O)

docs/trainer/parallelism.md says which matrices are Muon's, and why this is not Megatron-Core's. It stands where AdamW
stands inside Megatron's distributed optimizer: a rank holds the weights and momentum of its part of a buffer. For a
step the parts of a matrix come together, one matrix at a time (algorithm 1 of 2502.16982): every rank that has some of
it makes the whole orthogonal and takes its own part, so that the numbers are the same in every layout. Where AdamW has
a second moment, Muon has none: a number stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import OptimizerConfig
from trainer.megatron.convert import Placement, cut, join, parameters, placement, shard
from trainer.megatron.hf_config import ModelShape

A, B, C = 3.4445, -4.7750, 2.0315  # Jordan's: steep at 0, so that few steps suffice, and near 1 elsewhere
SMALLEST_NORM = 1e-7
RMS = 0.2  # of AdamW's updates


@dataclass(frozen=True)
class Matrix:
    """One Megatron parameter of two dimensions: which Hugging Face tensors it holds, and which part of this
    tensor-parallel rank's piece of them, `local`, is this data-parallel rank's: from `start` on the parameter `order`
    of the optimizer's group number `group`. None: no part of it."""

    place: Placement
    local: torch.Size
    device: torch.device
    group: int | None = None
    order: int = 0
    start: int = 0


class Muon(torch.optim.AdamW):  # type: ignore[misc]
    """Takes the place of AdamW inside a `DistributedOptimizer`. Its step is collective over the ranks that share a
    matrix."""

    def __init__(self, part: Any, chunks: list[Any], shape: ModelShape, config: OptimizerConfig) -> None:
        """`part`: Megatron's distributed optimizer over parameters of `chunks`."""
        super().__init__([torch.nn.Parameter(torch.zeros(0))])
        self.param_groups = part.optimizer.param_groups  # shards of a buffer are no leaves, which Adam would refuse
        for group in self.param_groups:
            for name, value in self.defaults.items():  # where TransformerEngine's Adam made them, some are missing
                group.setdefault(name, value)
        self._replicas, self._shape, self._config = part.data_parallel_group, shape, config
        self._matrices = list(_matrices(part, chunks, shape))

    @property
    def matrices(self) -> frozenset[tuple[int, int]]:
        """Parameters that are parts of matrices, by number of the group and place in it."""
        return frozenset((m.group, m.order) for m in self._matrices if m.group is not None)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """AdamW's update of what is no matrix of a layer, then one matrix after the other, in the same order on every
        rank."""
        gradients = [self._taken(matrix) for matrix in self._matrices]
        super().step()
        for matrix, gradient in zip(self._matrices, gradients, strict=True):
            self._update(matrix, gradient)
        for group in self.param_groups:  # where TransformerEngine is installed, Megatron keeps the number of steps here
            group["step"] = max((int(self.state[p]["step"]) for p in group["params"] if p in self.state), default=0)

    def writable(self) -> None:
        """Give every state memory of its own, for a loader that copies into it."""
        for state in self.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()

    def _taken(self, matrix: Matrix) -> Tensor | None:
        """The gradient of this rank's part, which AdamW then does not see."""
        if matrix.group is None:
            return None
        main = self.param_groups[matrix.group]["params"][matrix.order]
        gradient, main.grad = main.grad, None
        return gradient

    def _update(self, matrix: Matrix, gradient: Tensor | None) -> None:
        found = torch.zeros(matrix.local.numel(), device=matrix.device)
        mine = slice(matrix.start, matrix.start + (0 if gradient is None else gradient.numel()))
        if gradient is not None:
            assert matrix.group is not None
            group = self.param_groups[matrix.group]
            main = group["params"][matrix.order]
            found[mine] = self._moved(main, gradient)
        if dist.get_world_size(self._replicas) > 1:
            dist.all_reduce(found, group=self._replicas)  # everything else is zero: the parts come together
        pieces = _everyones(found.view(matrix.local), matrix.place)
        if gradient is None:
            return
        ranks, rank = len(pieces), dist.get_rank(matrix.place.group) if len(pieces) > 1 else 0
        slices = [s for r, piece in enumerate(pieces) for s in cut(self._shape, matrix.place, piece, ranks, r)]
        whole = [scaled(orthogonal(tensor, self._config.ns_steps)) for _, tensor in join(slices)]
        update = shard(self._shape, matrix.place, whole, ranks, rank).flatten()[mine]
        main.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _moved(self, main: Tensor, gradient: Tensor) -> Tensor:
        """The momentum after this gradient, as Nesterov looks ahead."""
        state = self.state[main]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(main)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        state["exp_avg_sq"] = torch.zeros(1, device=main.device).expand(main.shape)  # for Megatron's checkpoints
        state["step"] += 1
        momentum = self._config.momentum
        state["exp_avg"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["exp_avg"], momentum)


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of the matrix U S V^T: singular values between 0.7 and 1.2. Products are in bfloat16 on a GPU."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


def scaled(matrix: Tensor) -> Tensor:
    """An orthogonal matrix with the size of AdamW's updates."""
    return RMS * math.sqrt(max(matrix.shape)) * matrix


def _matrices(part: Any, chunks: list[Any], shape: ModelShape) -> Iterator[Matrix]:
    names = {parameter: name for chunk in chunks for name, parameter in parameters(chunk)}
    for buffer in part.buffers:
        for parameter in buffer.params:
            if not is_muons(names[parameter], parameter):
                continue
            about = (placement(shape, names[parameter]), parameter.shape, parameter.device)
            if (index := part.model_param_group_index_map.get(parameter)) is None:
                yield Matrix(*about)
            else:
                group, order = index
                yield Matrix(*about, group, order, part._get_model_param_range_map(parameter)["param"].start)


def is_muons(name: str, parameter: Tensor) -> bool:
    """Whether a Megatron parameter is a matrix of a layer."""
    return name.startswith("decoder.layers.") and parameter.ndim == 2


def _everyones(local: Tensor, place: Placement) -> list[Tensor]:
    """The pieces of all ranks that cut a parameter, in rank order; of a replicated one its own."""
    if place.cut == "replicated" or dist.get_world_size(place.group) == 1:
        return [local]
    pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(place.group))]
    dist.all_gather(pieces, local, group=place.group)
    return pieces
