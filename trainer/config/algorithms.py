"""What is learned: one dataclass per algorithm; its first field, `name`, chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range, positive
from trainer.errors import ConfigError


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning: cross-entropy on the target tokens (`on_prompt` also on the prompt's)."""

    name: Literal["sft"] = "sft"
    on_prompt: bool = False


@dataclass(frozen=True)
class GrpoConfig:
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300) with DAPO's clip-higher (2503.14476).

    The behaviour policy is the engine's: its log-probs come with the rollouts. The ratio is clipped to
    [1 - clip_low, 1 + clip_high]. `kl_coef` above 0 adds the k3 estimate of KL to the initial weights, at the price
    of a second copy of the model. `scale_rewards: false` leaves the group's standard deviation out (Dr. GRPO).
    """

    name: Literal["grpo"] = "grpo"
    samples_per_prompt: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    scale_rewards: bool = True
    minibatches: int = 1

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 2:
            raise ConfigError("samples_per_prompt", f"{self.samples_per_prompt} is no group", "GRPO needs at least 2")
        positive(self, "minibatches")
        in_range(self, "clip_low", 0.0, 1.0)
        in_range(self, "clip_high", 0.0, 10.0)
        in_range(self, "kl_coef", 0.0, 10.0)
