"""Megatron's optimizer and learning-rate schedule from the configuration, and Adam with its states in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.adamw import adamw

from trainer.config import OptimizerConfig as OptimizerSection
from trainer.config import TrainerConfig
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.muon import Muon

FP32 = 4  # bytes


def build_optimizer(
    section: OptimizerSection, lr: float, dtype: torch.dtype, chunks: list[Any], shape: ModelShape, *, sharded: bool
) -> Any:
    """AdamW or Muon over the wrapped chunks of a model. fp32 main weights and the states are sharded over data-parallel
    ranks: by Megatron's distributed optimizer, or with the weights themselves (`sharded`: they are DTensors)."""
    optimizer = get_megatron_optimizer(_config(section, lr, dtype, distributed=not sharded), chunks)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if section.name == "muon":
            part.optimizer = Muon(part, chunks, shape, section)
        elif section.offload:
            part.optimizer = HostAdam(part.optimizer.param_groups)
    return optimizer


def reset_optimizer(optimizer: Any) -> None:
    """Moments and counts of steps back to zero, in the memory that they have. Weights and the learning rate's schedule
    stay as they are."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in part.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and 0 not in value.stride():  # Muon's stand-in is zero already
                    value.zero_()


def moment_bytes(optimizer: Any) -> int:
    """What a first step will add to an optimizer: two moments in fp32 for each number, or Muon's one."""
    found = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        ones = part.optimizer.matrices if isinstance(part.optimizer, Muon) else frozenset()
        for number, group in enumerate(part.optimizer.param_groups):
            for order, parameter in enumerate(group["params"]):
                if not part.optimizer.state.get(parameter):
                    found += parameter.numel() * FP32 * (1 if (number, order) in ones else 2)
    return found


class HostAdam(torch.optim.AdamW):  # type: ignore[misc]
    """Adam whose states live in host memory and whose arithmetic is done there, parameter by parameter.

    The device keeps the fp32 main weights; gradient and weight travel to the host and the new weight back (12 bytes a
    parameter and step), which frees the 8 bytes of the two moments. The numbers are those of torch's AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(0))])
        self.param_groups = groups  # set like this because shards of a buffer are no leaves, which Adam would refuse

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
            # Where TransformerEngine is installed, Megatron keeps the number of steps here.
            group["step"] = max((int(self.state[p]["step"]) for p in group["params"] if p in self.state), default=0)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        weight, gradient = parameter.detach().cpu(), parameter.grad.cpu()
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight, pin_memory=parameter.is_cuda)
            state["exp_avg_sq"] = torch.zeros_like(weight, pin_memory=parameter.is_cuda)
        if "step" not in state:
            state["step"] = torch.tensor(float(group.get("step", 0)))
        for name in ("exp_avg", "exp_avg_sq"):  # a checkpoint's loader may have made them on the device
            state[name] = state[name].cpu()
        adamw(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"].cpu()],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if parameter.is_cuda:
            parameter.copy_(weight)


def build_scheduler(config: TrainerConfig, c: OptimizerSection, lr: float, optimizer: Any) -> OptimizerParamScheduler:
    """The learning rate by update: linear warm-up, then `decay` until the run's last one."""
    updates = config.steps * getattr(config.algorithm, "minibatches", 1) * getattr(config.algorithm, "epochs", 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=lr / (c.warmup_steps + 1),  # the first step already moves
        max_lr=lr,
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


def _config(section: OptimizerSection, lr: float, dtype: torch.dtype, *, distributed: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=section.loss_scale,
        hysteresis=1,
        loss_scale_window=section.loss_scale_window,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
