"""The models of one run, by role: the actor that is trained and published, its critic, the frozen reference.

    actor      the policy: model, gradients, optimizer, learning-rate schedule
    critic     a value for every token: the same, with its own optimizer; for algorithms that need `values`
    reference  the initial policy, only ever evaluated; for algorithms that need `reference_logprobs`

With low-rank adapters (lora.py), actor and critic train these alone (the critic its head too), and the reference is no
model of its own: it is the actor with its adapters switched off.

Each model has its own TransformerConfig: Megatron hangs the optimizer's loss scale on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.algorithms.base import REFERENCE_LOGPROBS, VALUES, Algorithm
from trainer.config import OptimizerConfig as OptimizerSection
from trainer.config import TrainerConfig
from trainer.megatron.convert import load_hf, parameters
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors
from trainer.megatron.lora import Switch, attach
from trainer.megatron.model import DTYPES, ValueHead, build_model, load_critic, transformer_config
from trainer.megatron.optimizer import build_optimizer, build_scheduler
from trainer.megatron.parallel import device

RoleName = Literal["actor", "critic", "reference"]


@dataclass(frozen=True)
class Role:
    """One model on this rank. `model` are its chunks of layers: one, unless pipeline stages are interleaved.
    `optimizer` and `scheduler` are None for the reference, which is never trained."""

    name: RoleName
    transformer: TransformerConfig
    model: list[Any]
    optimizer: Any = None
    scheduler: Any = None
    adapters: Switch | None = None

    def evaluating(self) -> AbstractContextManager[None]:
        """For passes that train nothing: adapters count unless this is the reference, and nothing drops out."""
        return nullcontext() if self.adapters is None else self.adapters.set(on=self.name != "reference", dropout=False)

    def storages(self) -> dict[str, list[torch.Tensor]]:
        """The tensors whose storages hold this role's memory: `name`, and `name_optimizer` where it has one.

        A tensor is listed under the part that owns it: fp32 main weights that are views of the model's buffers are
        the model's. Adam's states exist from the first step on.
        """
        if self.optimizer is None and self.adapters is not None:
            return {}  # the actor's
        if self.optimizer is None:
            return {self.name: _distinct(t for chunk in self.model for t in chunk.parameters())}
        mine = _distinct(t for chunk in self.model for t in _model_tensors(chunk))
        return {self.name: mine, f"{self.name}_optimizer": _distinct(_optimizer_tensors(self.optimizer), besides=mine)}


def build_roles(config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> dict[RoleName, Role]:
    """Every role the algorithm needs, each from the initial checkpoint. Collective."""
    tensors = HfTensors(config.model.path)
    roles: dict[RoleName, Role] = {}
    reference = REFERENCE_LOGPROBS in algorithm.needs
    if reference and config.lora is None:
        transformer = _transformer(config, shape)
        roles["reference"] = Role("reference", transformer, load_model(shape, transformer, tensors))
    transformer, adapted = _transformer(config, shape), _Adapted(config, shape)
    model = _placed(transformer, lambda chunk: adapted(_language_model(shape, transformer, tensors, chunk)))
    actor = _trained("actor", config, shape, (config.optimizer, config.lr), transformer, model, adapted.switch)
    roles["actor"] = actor
    if reference and config.lora is not None:
        roles["reference"] = Role("reference", actor.transformer, actor.model, adapters=actor.adapters)
    if VALUES in algorithm.needs:
        transformer, own = _transformer(config, shape), (_critic_optimizer(config), config.critic_lr)
        if (path := getattr(config.algorithm, "critic_path", None)) is not None:
            tensors = HfTensors(path)
        adapted = _Adapted(config, shape)
        critic = _placed(transformer, lambda chunk: adapted(load_critic(shape, transformer, tensors, chunk)))
        roles["critic"] = _trained("critic", config, shape, own, transformer, critic, adapted.switch)
    return roles


class _Adapted:
    """Puts adapters on the chunks of one model, if the run trains these. `switch` is what turns them off."""

    def __init__(self, config: TrainerConfig, shape: ModelShape) -> None:
        self._lora, self._seed, self._shape = config.lora, config.seed, shape
        self.switch = Switch() if config.lora is not None else None

    def __call__(self, model: Any) -> Any:
        if self._lora is not None and self.switch is not None:
            attach(model, self._shape, self._lora, self._seed, self.switch)
            if isinstance(getattr(model, "output_layer", None), ValueHead):
                model.output_layer.requires_grad_(True)
        return model


def load_model(shape: ModelShape, transformer: TransformerConfig, tensors: HfTensors) -> list[Any]:
    """This rank's chunks of the language model, from the checkpoint."""
    return _placed(transformer, lambda chunk: _language_model(shape, transformer, tensors, chunk))


def _language_model(shape: ModelShape, transformer: TransformerConfig, tensors: HfTensors, chunk: int | None) -> Any:
    model = build_model(shape, transformer, chunk)
    tensors.check(shape.schema("float32"))
    load_hf(parameters(model), shape, tensors.get)
    return model


def _placed(transformer: TransformerConfig, build: Callable[[int | None], Any]) -> list[Any]:
    """The chunks on their device and in their precision; one, `build(None)`, unless stages are interleaved."""
    numbers: list[int | None] = [*range(transformer.virtual_pipeline_model_parallel_size or 0)] or [None]
    chunks = [build(number).to(device()) for number in numbers]
    half = transformer.bf16 or transformer.fp16
    return [Float16Module(transformer, chunk) for chunk in chunks] if half else chunks


def _transformer(config: TrainerConfig, shape: ModelShape) -> TransformerConfig:
    return transformer_config(shape, config.parallel, config.model)


def _trained(
    name: RoleName,
    config: TrainerConfig,
    shape: ModelShape,
    rates: tuple[OptimizerSection, float],
    transformer: TransformerConfig,
    model: list[Any],
    adapters: Switch | None,
) -> Role:
    sharded = config.parallel.shard == "full"
    wrap = FullySharded if sharded else _replicated
    model = [wrap(transformer, chunk) for chunk in model]
    optimizer = build_optimizer(*rates, DTYPES[config.model.dtype], model, shape, sharded=sharded)
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    return Role(name, transformer, model, optimizer, build_scheduler(config, *rates, optimizer), adapters)


def _replicated(transformer: TransformerConfig, chunk: Any) -> Any:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(transformer, ddp, chunk)


def _critic_optimizer(config: TrainerConfig) -> OptimizerSection:
    """As the actor's, but for a constant learning rate without warm-up."""
    return msgspec.structs.replace(config.optimizer, min_lr=0.0, warmup_steps=0, decay="constant")


def _model_tensors(chunk: Any) -> Iterator[torch.Tensor]:
    """Weights and gradients, out of Megatron's buffers or FSDP's shards; frozen weights are in no buffer."""
    if isinstance(chunk, FullySharded):
        for parameter in chunk.parameters():
            yield from (t.to_local() for t in (parameter, parameter.grad) if t is not None)
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        yield from (t for t in (buffer.param_data, buffer.grad_data) if t is not None)
    yield from (parameter for parameter in chunk.parameters() if not parameter.requires_grad)


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (t for t in part.optimizer.state.get(parameter, {}).values() if isinstance(t, torch.Tensor))


def _distinct(tensors: Any, besides: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """One tensor for each storage."""
    seen = {t.untyped_storage()._cdata for t in besides or []}
    result = []
    for tensor in tensors:
        if (key := tensor.untyped_storage()._cdata) not in seen:
            seen.add(key)
            result.append(tensor.detach())
    return result


class FullySharded(_BaseDataParallel):  # type: ignore[misc]
    """Fully sharded data parallelism (ZeRO-3, arXiv:1910.02054): torch's FSDP2 around Megatron's layers, with what
    Megatron's schedule and optimizer ask of a wrapper. The parameters have become DTensors.

    Every weight is cut over the data-parallel (and context-parallel) ranks; a layer's are gathered before it runs and
    dropped afterwards, and its gradients are reduced into shards as soon as they are there. Megatron-Core's own wrapper
    of FSDP2 names the CUDA device and divides by the number of ranks, where a mean over tokens is wanted.
    """

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
