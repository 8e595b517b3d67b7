"""Algorithms by the name of their config entry."""

from trainer.algorithms.base import Algorithm, LossOutput
from trainer.algorithms.grpo import Grpo
from trainer.algorithms.sft import Sft
from trainer.config import GrpoConfig, SftConfig

__all__ = ["Algorithm", "Grpo", "LossOutput", "Sft", "build_algorithm"]


def build_algorithm(config: SftConfig | GrpoConfig) -> Algorithm:
    """The algorithm a config entry names."""
    return Grpo(config) if isinstance(config, GrpoConfig) else Sft(config)
