"""Group-relative policy optimisation.

For G samples of one prompt with rewards r: A = (r - mean) / (std + 1e-4), the same for every token of a sample;
without `scale_rewards` A = r - mean (Dr. GRPO). KL to the initial weights is in the loss:

    + kl_coef * (exp(d) - d - 1),  d = reference - logprob
"""

from __future__ import annotations

from trainer.algorithms.advantages import group_normalized
from trainer.algorithms.policy import PolicyGradient
from trainer.config import GrpoConfig


class Grpo(PolicyGradient[GrpoConfig]):
    """Clipped policy gradient with group-normalised advantages."""

    kl_in_loss = True

    def credit(self, rewards: list[float]) -> list[float]:
        return group_normalized(rewards, scale=self.config.scale_rewards)
