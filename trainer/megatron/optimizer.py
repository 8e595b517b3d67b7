"""Megatron's optimizer, on the device or in host memory, and its learning-rate schedule from the configuration."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.config import OptimizerConfig as OptimizerSection
from trainer.config import TrainerConfig
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.muon import Muon
from weightsync.memory.pinned import pinned

FP32 = 4  # bytes


@torch.no_grad()  # type: ignore[untyped-decorator]  # or shards of fp32 weights would be no leaves, which Adam refuses
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
            groups, defaults = part.optimizer.param_groups, part.optimizer.defaults
            part.optimizer = None
            if torch.cuda.is_available():
                torch._C._host_emptyCache()  # of the pinned copies that it has made
            part.optimizer = HostAdam(groups, **defaults)
    return optimizer


def reset_optimizer(optimizer: Any) -> None:
    """Moments and counts of steps back to zero, in the memory that they have. Weights and the learning rate's schedule
    stay as they are."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if name == "master_param" or not isinstance(value, torch.Tensor):
                    continue
                if 0 not in value.stride():  # Muon's stand-in is zero already
                    value.zero_()


def moment_bytes(optimizer: Any) -> int:
    """The bytes that a first step will add to an optimizer: two moments in fp32 for each number, or Muon's one."""
    found = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        ones = part.optimizer.matrices if isinstance(part.optimizer, Muon) else frozenset()
        for number, group in enumerate(part.optimizer.param_groups):
            for order, parameter in enumerate(group["params"]):
                if not part.optimizer.state.get(parameter):
                    found += parameter.numel() * FP32 * (1 if (number, order) in ones else 2)
    return found


class HostAdam(HybridDeviceOptimizer):  # type: ignore[misc]
    """Megatron-Core's AdamW in host memory: main weights and states live there, and torch's fused AdamW for CPUs
    updates them. Gradients and new weights travel on streams of their own, so that one parameter is computed while
    others travel. The device keeps the weights of the model alone.

    This class adds to Megatron's: it has its states from the start, as checkpoints want them; its settings are none of
    a checkpoint's, so that a run may be resumed with it or without; weights that are fp32 on the device are loaded too;
    and its main weights are pinned in any precision, or the thread that computes would wait for each copy of them.
    Without a GPU it makes the same copies of weights that are on the host already.
    """

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._own = {name: value for name, value in self.defaults.items() if name not in _ADAMS}
        for optimizer in self.sub_optimizers:
            for weight in (w for group in optimizer.param_groups for w in group["params"]):
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
        self._sync_sub_optimizers_state_to_hdo()

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, with `master_param` among the states."""
        found: dict[str, Any] = super().state_dict()
        for group in found["param_groups"]:
            for name in self._own:
                group.pop(name, None)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        groups = [group | self._own for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict | {"param_groups": groups})

    def _update_fp32_params_by_new_state(self) -> None:
        for parameter, state in self.state.items():
            self.param_to_inner_param[parameter].data.copy_(state["master_param"])

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        copies = {parameter: _main_weight(parameter) for group in self.param_groups for parameter in group["params"]}
        groups = [group | {"params": [copies[p] for p in group["params"]]} for group in self.param_groups]
        rounded = {parameter: copy for parameter, copy in copies.items() if parameter.dtype != torch.float32}
        return groups, [], copies, {copy: parameter for parameter, copy in copies.items()}, rounded


def _main_weight(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of `parameter` on the host, in fp32, pinned where that is on a GPU."""
    memory, _ = pinned(parameter.numel() * FP32, parameter.device)
    return memory.view(torch.float32).view(parameter.shape).copy_(parameter.detach())


_ADAMS = {"lr", "betas", "eps", "weight_decay"}


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
    config = OptimizerConfig(
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
        optimizer_cpu_offload=section.offload,
        optimizer_offload_fraction=float(section.offload),
        overlap_cpu_optimizer_d2h_h2d=section.offload,
    )
    if section.offload:
        # Or the device would keep fp32 main weights beside the host's. Set afterwards: Megatron's check of it wants
        # TransformerEngine, of which nothing is used here.
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
    return config
