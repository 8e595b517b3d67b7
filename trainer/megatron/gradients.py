"""Gradients that add up over any number of passes, in float32 and apart from the model, and are reduced when all are
in.

Megatron's wrappers have one optimizer step in mind: their buffers are zeroed before it, and reduced at the end of its
one pass. Here a gradient is somebody's own: it outlives the pass, others come in between, and the ranks add theirs up
once, however many passes it took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

Gradient = dict[str, Tensor]
"""By the parameter's name, float32."""


class Apart(_BaseDataParallel):  # type: ignore[misc]
    """A wrapper around a chunk of a model, as Megatron asks for it. The parameters have their gradients in `main_grad`
    while they are reduced."""

    def __init__(self, config: TransformerConfig, module: Any) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Add up the replicas' gradients: an expert's has fewer replicas than the rest."""
        for parameter in self.module.parameters():
            if (gradient := getattr(parameter, "main_grad", None)) is not None:
                spread, everywhere = _is_spread(parameter), ps.get_data_parallel_group(with_context_parallel=True)
                _add_up(gradient, group=ps.get_expert_data_parallel_group() if spread else everywhere)


@contextmanager
def adding(parameters: Mapping[str, Any], gradient: Gradient) -> Iterator[None]:
    """Every backward pass within the body adds to `gradient`, which has a tensor for each parameter."""

    def add(name: str, parameter: Any) -> None:
        gradient[name] += parameter.grad
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: add(name, p))
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters.values():
            parameter.grad = None


def reduce(chunks: list[Apart], parameters: Mapping[str, Any], gradient: Gradient) -> float:
    """Add up the ranks' parts of the gradient, in place; the norm of the whole. Collective."""
    for name, parameter in parameters.items():
        parameter.main_grad = gradient[name]
    try:
        finalize_model_grads(chunks)
    finally:
        for parameter in parameters.values():
            del parameter.main_grad
    return _norm(parameters, gradient)


def _norm(parameters: Mapping[str, Any], gradient: Gradient) -> float:
    """Over all ranks, each number once."""
    squares = torch.zeros(2, dtype=torch.float64, device=next(iter(gradient.values())).device)
    for name, parameter in parameters.items():
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            squares[int(_is_spread(parameter))] += gradient[name].double().square().sum()
    groups = (ps.get_model_parallel_group(), ps.get_expert_tensor_model_pipeline_parallel_group())
    for square, group in zip(squares, groups, strict=True):
        _add_up(square, group)
    return math.sqrt(float(squares.sum()))


def _add_up(tensor: Tensor, group: Any) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def _is_spread(parameter: Any) -> bool:
    """Whether other ranks have other experts."""
    return not getattr(parameter, "allreduce", True)
