"""The models of one run, by role: the actor that is trained and published, its critic, the frozen reference.

    actor      the policy: model, gradients, optimizer, learning-rate schedule
    critic     a value for every token (critic.py): the same, with its own optimizer; for algorithms that need `values`
    reference  the initial policy, only ever evaluated; for algorithms that need `reference_logprobs`

Each has its own TransformerConfig: Megatron hangs the optimizer's loss scale on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.algorithms.base import REFERENCE_LOGPROBS, VALUES, Algorithm
from trainer.config import OptimizerConfig as OptimizerSection
from trainer.config import TrainerConfig
from trainer.megatron.convert import load_hf
from trainer.megatron.critic import load_critic
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors
from trainer.megatron.model import DTYPES, build_model, transformer_config
from trainer.megatron.parallel import device

RoleName = Literal["actor", "critic", "reference"]


@dataclass(frozen=True)
class Role:
    """One model on this rank. `optimizer` and `scheduler` are None for the reference, which is never trained."""

    name: RoleName
    transformer: TransformerConfig
    model: Any
    optimizer: Any = None
    scheduler: Any = None

    def storages(self) -> dict[str, list[torch.Tensor]]:
        """The tensors whose storages hold this role's memory: `name`, and `name_optimizer` where it has one.

        A tensor is listed under the part that owns it: fp32 main weights that are views of the model's buffers are
        the model's. Adam's states exist from the first step on.
        """
        if self.optimizer is None:
            return {self.name: _distinct(self.model.parameters())}
        buffers = [*self.model.buffers, *self.model.expert_parallel_buffers]
        mine = _distinct(t for b in buffers for t in (b.param_data, b.grad_data) if t is not None)
        return {self.name: mine, f"{self.name}_optimizer": _distinct(_optimizer_tensors(self.optimizer), besides=mine)}


def build_roles(config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> dict[RoleName, Role]:
    """Every role the algorithm needs, each from the initial checkpoint. Collective."""
    tensors = None if config.model.random_init else HfTensors(config.model.path)
    roles: dict[RoleName, Role] = {}
    if REFERENCE_LOGPROBS in algorithm.needs:
        transformer = _transformer(config, shape)
        roles["reference"] = Role("reference", transformer, load_model(shape, transformer, tensors))
    transformer = _transformer(config, shape)
    roles["actor"] = _trained("actor", config, config.optimizer, transformer, load_model(shape, transformer, tensors))
    if VALUES in algorithm.needs:
        transformer, section = _transformer(config, shape), _critic_optimizer(config)
        if (path := getattr(config.algorithm, "critic_path", None)) is not None:
            tensors = HfTensors(path)
        model = _placed(load_critic(shape, transformer, tensors), transformer)
        roles["critic"] = _trained("critic", config, section, transformer, model)
    return roles


def load_model(shape: ModelShape, transformer: TransformerConfig, tensors: HfTensors | None) -> Any:
    """This rank's part of the language model, from the checkpoint (None: Megatron's initialisation)."""
    model = build_model(shape, transformer)
    if tensors is not None:
        tensors.check(shape.schema("float32"))
        load_hf(model, shape, tensors.get)
    return _placed(model, transformer)


def _placed(model: Any, transformer: TransformerConfig) -> Any:
    model = model.to(device())
    return Float16Module(transformer, model) if transformer.bf16 or transformer.fp16 else model


def _transformer(config: TrainerConfig, shape: ModelShape) -> TransformerConfig:
    return transformer_config(shape, config.parallel, config.model)


def _trained(
    name: RoleName, config: TrainerConfig, section: OptimizerSection, transformer: TransformerConfig, model: Any
) -> Role:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(transformer, ddp, model)
    optimizer = get_megatron_optimizer(_optimizer_config(section, DTYPES[config.model.dtype]), [model])
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    return Role(name, transformer, model, optimizer, _scheduler(config, section, optimizer))


def _critic_optimizer(config: TrainerConfig) -> OptimizerSection:
    """The critic's own learning rate (constant, without warm-up), everything else as the actor's."""
    lr = getattr(config.algorithm, "critic_lr", None) or config.optimizer.lr
    return dataclasses.replace(config.optimizer, lr=lr, min_lr=0.0, warmup_steps=0, decay="constant")


def _optimizer_config(optimizer: OptimizerSection, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _scheduler(config: TrainerConfig, c: OptimizerSection, optimizer: Any) -> OptimizerParamScheduler:
    updates = config.steps * getattr(config.algorithm, "minibatches", 1) * getattr(config.algorithm, "epochs", 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=c.lr / (c.warmup_steps + 1),  # the first step already moves
        max_lr=c.lr,
        min_lr=c.min_lr,
        lr_warmup_steps=c.warmup_steps,
        lr_decay_steps=max(updates, c.warmup_steps + 1),
        lr_decay_style=c.decay,
        start_wd=c.weight_decay,
        end_wd=c.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run may have been given more steps
    )


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
