"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347) with a critic.

The rewards of REINFORCE++ go through generalised advantage estimation with the values that the critic gave at the start
of the step. The critic's loss of a token is

    max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2

with R = A + V_old from before normalisation; a step's is the mean over tokens. Truncated answers count as ended.
"""

from __future__ import annotations

import torch

from trainer.algorithms.advantages import gae, whiten
from trainer.algorithms.base import ADVANTAGES, RETURNS, REWARDS, VALUES, LossOutput
from trainer.algorithms.policy import PolicyGradient
from trainer.batch import MASK, Fields
from trainer.config import PpoConfig


class Ppo(PolicyGradient[PpoConfig]):
    """Clipped policy gradient with advantages by a critic, which is trained along."""

    credit_is = REWARDS

    def __init__(self, config: PpoConfig, max_tokens: int | None = None) -> None:
        super().__init__(config, max_tokens)
        self.needs = self.needs | {VALUES}
        self.critic_warmup = config.critic_warmup

    def credit(self, rewards: list[float]) -> list[float]:
        return rewards

    def prepare(self, fields: Fields) -> Fields:
        c, rewards = self.config, self._rewards_by_token(fields)
        advantages, returns = gae(rewards, fields[VALUES], fields[MASK], c.gamma, c.lam)
        fields = super().prepare(fields | {RETURNS: returns})
        advantages = whiten(advantages, fields[MASK]) if c.normalize_advantages else advantages
        return fields | {ADVANTAGES: advantages}

    def critic_loss(self, values_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """The module's formula. Reports values and returns, so that a critic that learns nothing shows."""
        mask, old, returns = fields[MASK], fields[VALUES], fields[RETURNS]
        error = plain = (values_BT - returns).square()
        if (bound := self.config.value_clip) is not None:
            error = torch.maximum(plain, (old + (values_BT - old).clamp(-bound, bound) - returns).square())
        sums = {
            "value_clip_ratio": ((error > plain) * mask).sum(),
            "value_mean": (values_BT.detach() * mask).sum(),
            "return_mean": (returns * mask).sum(),
        }
        return LossOutput((error * mask).sum() / 2, mask.sum(), sums)
