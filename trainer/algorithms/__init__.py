"""The algorithms: one class each, by the name of its config entry.

base.py     what an algorithm is to the loop and to the engine    advantages.py   what an action is worth
policy.py   GRPO, RLOO, REINFORCE++, PPO, Kimi k1.5's             correction.py   weights for tokens of other policies
offline.py  SFT and DPO, which learn from records alone     custom.py  a loss of one's own
distill.py  on-policy distillation from a teacher
"""

from trainer.algorithms.base import Algorithm
from trainer.algorithms.custom import Custom
from trainer.algorithms.distill import Distill
from trainer.algorithms.offline import Dpo, Sft
from trainer.algorithms.policy import Grpo, Kimi, Ppo, Reinforce, Rloo
from trainer.config import (
    AlgorithmConfig,
    CustomConfig,
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    KimiConfig,
    PpoConfig,
    RlooConfig,
    SftConfig,
)


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
    if isinstance(config, KimiConfig):
        return Kimi(config, max_tokens)
    if isinstance(config, DistillConfig):
        return Distill(config, max_tokens)
    if isinstance(config, CustomConfig):
        return Custom(config, max_tokens)
    return Ppo(config, max_tokens) if isinstance(config, PpoConfig) else Reinforce(config, max_tokens)
