"""What a layout or a precision needs of the machine, asked before anything is built."""

from __future__ import annotations

import importlib.util

import torch

from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.megatron.hf_config import ModelShape


def check_support(config: TrainerConfig, shape: ModelShape) -> None:
    """Raise ConfigError naming the key that this machine, or this combination, cannot serve."""
    if config.model.fp8 != "none":
        _check_fp8(shape)
    if config.parallel.shard == "full":
        _check_full_sharding(config)
    if config.parallel.expert > 1 and config.parallel.expert_tensor_size > 1 and not torch.cuda.is_available():
        problem = "cutting experts that are also spread gathers parts of different lengths, which gloo cannot"
        raise ConfigError("parallel.expert_tensor", problem, "Set it to 1, or use GPUs")


def _check_fp8(shape: ModelShape) -> None:
    if shape.experts:
        raise ConfigError("model.fp8", "experts are not run in 8 bits", "Set it to none")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        # Megatron-Core's local layers would ignore the switch in silence.
        raise ConfigError(
            "model.fp8", "needs a GPU with 8-bit matrix products (Ada, Hopper or later)", "Set it to none"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError("model.fp8", "needs TransformerEngine, which is not installed", "Install it, or set none")


def _check_full_sharding(config: TrainerConfig) -> None:
    if config.model.dtype == "float16":
        problem = "full keeps no scaled gradients for float16"
        raise ConfigError("parallel.shard", problem, "Set model.dtype to bfloat16 or float32")
    if config.optimizer.offload:
        raise ConfigError("optimizer.offload", "not with parallel.shard full", "Set one of them back")
