"""Fully sharded data parallelism (ZeRO-3, arXiv:1910.02054): torch's FSDP2 around Megatron's layers.

Every weight is cut over the data-parallel (and context-parallel) ranks; a layer's are gathered before it runs and
dropped afterwards, and its gradients are reduced into shards as soon as they are there. Megatron-Core's own wrapper of
FSDP2 names the CUDA device and divides by the number of ranks, where a mean over tokens is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.megatron.parallel import device


class FullySharded(_BaseDataParallel):  # type: ignore[misc]
    """A model whose parameters have become DTensors; what Megatron's schedule and optimizer ask of a wrapper."""

    def __init__(self, config: TransformerConfig, module: Any) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig()
        mesh = DeviceMesh.from_group(ps.get_data_parallel_group(with_context_parallel=True), device().type)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        attributes = {name: dict(vars(p)) for name, p in module.named_parameters()}
        layers = [part for part in module.modules() if isinstance(part, TransformerLayer)]
        # The embedding stays with the root, which is whole for as long as the pass lasts: the output layer may use it.
        for part in (*layers, module):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # a sum, which `scale_gradients` divides by the tokens
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        for name, parameter in module.named_parameters():
            vars(parameter).update(attributes[name])  # Megatron's marks (sequence_parallel, allreduce, ...)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing is left to do: gradients were reduced during the backward pass."""

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient. Called once all micro-batches are in, with one over the number of tokens."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)
