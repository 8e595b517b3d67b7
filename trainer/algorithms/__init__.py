"""Algorithms by the name of their config entry."""

from trainer.algorithms.base import ActorCritic, Algorithm, AlgorithmBase, LossOutput
from trainer.algorithms.dpo import Dpo
from trainer.algorithms.grpo import Grpo
from trainer.algorithms.policy import PolicyGradient
from trainer.algorithms.ppo import Ppo
from trainer.algorithms.reinforce import Reinforce
from trainer.algorithms.rloo import Rloo
from trainer.algorithms.sft import Sft
from trainer.config import AlgorithmConfig, DpoConfig, GrpoConfig, PpoConfig, RlooConfig, SftConfig

__all__ = [
    "ActorCritic",
    "Algorithm",
    "AlgorithmBase",
    "Dpo",
    "Grpo",
    "LossOutput",
    "PolicyGradient",
    "Ppo",
    "Reinforce",
    "Rloo",
    "Sft",
    "build_algorithm",
]


def build_algorithm(config: AlgorithmConfig, max_tokens: int | None = None) -> Algorithm:
    """The algorithm a config entry names. `max_tokens` is how long sampled answers may be, for options that count on
    it; raises ConfigError when it is missing."""
    if isinstance(config, SftConfig):
        return Sft(config)
    if isinstance(config, DpoConfig):
        return Dpo(config)
    if isinstance(config, GrpoConfig):
        return Grpo(config, max_tokens)
    if isinstance(config, RlooConfig):
        return Rloo(config, max_tokens)
    return Ppo(config, max_tokens) if isinstance(config, PpoConfig) else Reinforce(config, max_tokens)
