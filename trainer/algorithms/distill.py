"""On-policy distillation (Agarwal et al., GKD, arXiv 2306.13649; Gu et al., MiniLLM, 2306.08543). In the policy
gradient's loss (policy.py) every token has an advantage of its own:

    A_t = teacher's logprob - engine's logprob + reward_weight * (r - mean) / (std + 1e-4)

The first difference, with its sign turned, is the estimate k1 of the reverse KL of policy and teacher at that token.
The effect of a token on later ones is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trainer.algorithms.advantages import group_normalized
from trainer.algorithms.base import ADVANTAGES
from trainer.algorithms.correction import Correction
from trainer.algorithms.policy import PolicyGradient
from trainer.batch import MASK, Fields
from trainer.config import DistillConfig
from trainer.trajectory import Trajectory

TEACHER_LOGPROBS = "teacher_logprobs"


class Distill(PolicyGradient[DistillConfig]):
    """The formula above. Reports `teacher_kl`, the estimate k1 of the reverse KL at the start of the step."""

    kl_in_loss = True

    def credit(self, rewards: list[float]) -> list[float]:
        if not self.config.reward_weight:
            return [0.0] * len(rewards)
        return [self.config.reward_weight * a for a in group_normalized(rewards, scale=True)]

    def _per_token(self, trajectory: Trajectory, credit: float, step: int) -> dict[str, Seq[float]]:
        teacher = trajectory.teacher_logprobs
        assert teacher is not None  # one without is left out of its group
        differences = zip(teacher, trajectory.logprobs, strict=True)
        advantages = [credit + theirs - mine for theirs, mine in differences]
        return super()._per_token(trajectory, credit, step) | {ADVANTAGES: advantages, TEACHER_LOGPROBS: teacher}

    def _sums(
        self, logprobs_BT: torch.Tensor, old_BT: torch.Tensor, correction: Correction, fields: Fields
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        sums, maxima = super()._sums(logprobs_BT, old_BT, correction, fields)
        gap = (old_BT.detach() - fields[TEACHER_LOGPROBS]) * fields[MASK]
        return sums | {"teacher_kl": gap.sum()}, maxima
