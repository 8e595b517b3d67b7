"""REINFORCE++ (Hu et al., arXiv 2501.03262): no critic, no group needed.

A_t = the discounted rewards from t on, normalised over all tokens of the batch. The reward of a token is
-kl_coef * (old - reference), and on the last one also the answer's; with `baseline` less its group's mean.
"""

from __future__ import annotations

import torch

from trainer.algorithms.advantages import gae, whiten
from trainer.algorithms.base import ADVANTAGES, REWARDS
from trainer.algorithms.policy import PolicyGradient
from trainer.batch import MASK, Fields
from trainer.config import ReinforceConfig


class Reinforce(PolicyGradient[ReinforceConfig]):
    """Clipped policy gradient with returns normalised over the batch."""

    credit_is = REWARDS

    def credit(self, rewards: list[float]) -> list[float]:
        mean = sum(rewards) / len(rewards) if self.config.baseline else 0.0
        return [reward - mean for reward in rewards]

    def prepare(self, fields: Fields) -> Fields:
        nothing = torch.zeros_like(fields[MASK])
        returns, _ = gae(self._rewards_by_token(fields), nothing, fields[MASK], self.config.gamma, 1.0)
        fields = super().prepare(fields)
        return fields | {ADVANTAGES: whiten(returns, fields[MASK])}
