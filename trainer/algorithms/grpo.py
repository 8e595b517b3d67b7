"""Group-relative policy optimisation against the engine's log-probs.

For G samples of one prompt with rewards r: advantage = (r - mean) / (std + 1e-4), the same for every token of a sample.
With ratio = exp(logprob - behaviour logprob), the loss of a token is

    -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) [+ kl_coef * (exp(d) - d - 1)],  d = reference - logprob

and a step's loss is the mean over all its tokens (DAPO's token-level normalisation, not per sample).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trainer.algorithms.base import ADVANTAGES, BEHAVIOUR_LOGPROBS, REFERENCE_LOGPROBS, AlgorithmBase, LossOutput
from trainer.batch import MASK, Fields, Sequence
from trainer.config import GrpoConfig
from trainer.data.records import Record
from trainer.rollout import Group

STD_FLOOR = 1e-4


class Grpo(AlgorithmBase):
    """Clipped policy gradient with group-normalised advantages."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config
        self.samples_per_prompt = config.samples_per_prompt
        self.minibatches = config.minibatches
        self.needs = frozenset({REFERENCE_LOGPROBS} if config.kl_coef > 0 else ())

    def sequences(self, records: Seq[Record], groups: Seq[Group], version: int = 0) -> list[Sequence]:
        """One sequence per sample, with its advantage and the engine's log-probs on every token. Groups whose rewards
        are all equal teach nothing, but keep their tokens in the denominator."""
        return [
            Sequence(
                group.prompt_ids,
                sample.token_ids,
                {ADVANTAGES: [advantage] * len(sample.token_ids), BEHAVIOUR_LOGPROBS: sample.logprobs},
            )
            for group in groups
            for sample, advantage in zip(group.samples, self.advantages(group.rewards), strict=True)
            if sample.token_ids
        ]

    def advantages(self, rewards: Seq[float]) -> list[float]:
        """Rewards of one group, centred and (unless `scale_rewards` is off) divided by their standard deviation."""
        r = torch.tensor(rewards, dtype=torch.float64)
        centred = r - r.mean()
        scale = r.std() + STD_FLOOR if self.config.scale_rewards else 1.0
        result: list[float] = (centred / scale).tolist()
        return result

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """See the module's formula. Reports the share of clipped tokens, KL and the gap between engine and trainer."""
        mask, advantage = fields[MASK], fields[ADVANTAGES]
        log_ratio = (logprobs_BT - fields[BEHAVIOUR_LOGPROBS]) * mask
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        per_token = -torch.minimum(ratio * advantage, clipped * advantage)
        gap = log_ratio.detach().abs()
        sums = {
            "clip_ratio": ((clipped * advantage < ratio * advantage) * mask).sum(),
            "logprob_gap_mean": gap.sum(),
            "entropy": -(logprobs_BT.detach() * mask).sum(),
        }
        if self.config.kl_coef > 0:
            difference = (fields[REFERENCE_LOGPROBS] - logprobs_BT) * mask
            kl = difference.exp() - difference - 1
            per_token = per_token + self.config.kl_coef * kl
            sums["kl"] = (kl.detach() * mask).sum()
        return LossOutput((per_token * mask).sum(), mask.sum(), sums, {"logprob_gap_max": gap.max()})
