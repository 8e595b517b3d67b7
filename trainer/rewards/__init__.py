"""Rewards by the kind of their config entry."""

from collections.abc import Sequence

from trainer.config import CallableReward, ExactMatchReward, RegexReward
from trainer.rewards.base import Reward, Score, Scorer
from trainer.rewards.rules import Regex, UserFunction, exact_match

__all__ = ["Reward", "Score", "Scorer", "build_scorer"]

RewardConfig = ExactMatchReward | RegexReward | CallableReward


def build_scorer(configs: Sequence[RewardConfig]) -> Scorer:
    """The weighted sum a config names. A kind used twice gets a number: `regex`, `regex_2`."""
    rewards: dict[str, tuple[float, Reward]] = {}
    for config in configs:
        same = sum(name.split("_")[0] == config.kind.split("_")[0] for name in rewards)
        name = config.kind if not same else f"{config.kind}_{same + 1}"
        rewards[name] = (config.weight, _build(config))
    return Scorer(rewards)


def _build(config: RewardConfig) -> Reward:
    if isinstance(config, RegexReward):
        return Regex(config)
    if isinstance(config, CallableReward):
        return UserFunction(config)
    return exact_match
