"""The clipped policy gradient that GRPO, RLOO, REINFORCE++ and PPO share; they differ in their advantages A. Kimi
k1.5's mirror descent, which has a loss of its own, shares the rest.

With r = exp(logprob - proximal logprob) of a token (`ratio: token`), of the answer's geometric mean (`sequence`: GSPO,
arXiv 2507.18071) or of its product (`trajectory`), the loss of a token is

    clip    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), clip-higher as in DAPO (2503.14476); for A < 0 and
            with `dual_clip` c: r is at most c (1912.09729)
    cispo   -w A logprob min(r, 1 + clip_high), no gradient through the minimum (MiniMax-M1, 2506.13585)

less entropy_coef * H, with the exact entropy of the policy at that token, over the whole vocabulary V:

    H = -sum over v in V of p(v) log p(v)

w is the importance correction's weight (correction.py). With a correction, with a ratio of answers, and always in RLOO,
the proximal policy is the trainer's at the start of the step; else it is the engine's, whose log-probs came with the
samples. Over an answer the difference between the two is as large as GSPO's clip range. A step's loss is

    token      the mean over all kept tokens (DAPO)
    sequence   the mean over answers of the mean over their tokens (GRPO)
    length     the mean over answers of the sum over their tokens / max_tokens (Dr. GRPO, 2503.20783)
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from trainer.algorithms.advantages import (
    gae,
    group_normalized,
    leave_one_out,
    length_rewards,
    normalized_by_sequence,
    over_group,
    sequence_mean,
    whiten,
)
from trainer.algorithms.base import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    ENTROPY,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    REWARDS,
    VALUES,
    VERSION_LAG,
    AlgorithmBase,
    LossOutput,
)
from trainer.algorithms.correction import LONGEST_LOG, Correction, at_level, correct
from trainer.batch import MASK, Fields, Sequence, sequence_sum, to_tokens
from trainer.config import GrpoConfig, KimiConfig, PolicyConfig, PpoConfig, ReinforceConfig, RlooConfig
from trainer.data.records import Record
from trainer.errors import ConfigError
from trainer.routing import of_trajectory
from trainer.trajectory import Trajectory, TrajectoryGroup

KEEP = "keep"  # 0 on the tokens of answers that are left out
_LEVELS = {"token": "token", "sequence": "geometric", "trajectory": "sequence"}

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)
GROUP = "group"
_EXACT = 1 << 24  # whole numbers below are exact in float32


class PolicyGradient(AlgorithmBase, ABC, Generic[ConfigT]):
    """`credit` gives one number for each trajectory of a group: its advantage on every token, or (`credit_is` REWARDS)
    its reward, from which `prepare` makes advantages: each turn's own on the last token of that turn, and the rest on
    the trajectory's last one. `max_tokens` is how long answers may be."""

    credit_is = ADVANTAGES
    kl_in_loss = False
    own_proximal = False

    def __init__(self, config: ConfigT, max_tokens: int | None = None) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.samples_per_prompt, self.minibatches = config.samples_per_prompt, config.minibatches
        self.epochs = config.epochs
        if max_tokens is None and (config.normalize == "length" or config.overlong_buffer):
            raise ConfigError("rollout.max_tokens", "missing, but the algorithm divides by it", "Set it")
        if max_tokens is not None and config.overlong_buffer > max_tokens:
            problem = f"{config.overlong_buffer} is more than an answer has (rollout.max_tokens {max_tokens})"
            raise ConfigError("algorithm.overlong_buffer", problem, "Lower it: shorter answers would be punished too")
        self.needs = self._needs()

    def sequences(self, records: Seq[Record], groups: Seq[TrajectoryGroup], step: int = 0) -> list[Sequence]:
        """One sequence per trajectory with a token to train on. Groups whose rewards are all equal teach nothing, but
        keep their tokens in the denominator."""
        return [
            Sequence(
                group.prompt_ids,
                t.token_ids,
                self._per_token(t, credit, step),
                mask=t.mask,
                routing=of_trajectory(len(group.prompt_ids), t),
            )
            for group in groups
            for t, credit in zip(group.trajectories, self.credit(self._rewards(group, step)), strict=True)
            if any(t.mask)
        ]

    @abstractmethod
    def credit(self, rewards: list[float]) -> list[float]:
        """The credit of each trajectory of a group."""

    def keep_group(self, group: TrajectoryGroup) -> bool:
        return not self.config.drop_zero_std or len(set(group.rewards)) > 1

    def prepare(self, fields: Fields) -> Fields:
        return fields | {MASK: fields[MASK] * fields[KEEP]} if KEEP in fields else fields

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """The module's formula. `tokens` counts all trained tokens, rejected ones too; metrics are shares of it."""
        old = fields.get(OLD_LOGPROBS, logprobs_BT.detach())
        correction = correct(self.config.correction, old, fields)
        per_token, said = self._surrogate(logprobs_BT, old, correction, fields)
        per_token = per_token * correction.weights + self._regularizers(logprobs_BT, fields)
        total, over = self._normalized(per_token * correction.kept, fields | {MASK: correction.kept})
        sums, maxima = self._sums(logprobs_BT, old, correction, fields)
        return LossOutput(total, fields[MASK].sum(), said | sums, maxima, over)

    def _regularizers(self, logprobs_BT: torch.Tensor, fields: Fields) -> torch.Tensor:
        """[B, T]: what KL and entropy add to the loss, by token."""
        c, added = self.config, torch.zeros_like(logprobs_BT)
        if REFERENCE_LOGPROBS in fields and self.kl_in_loss:
            added = added + c.kl_coef * self._kl(logprobs_BT, fields)
        return added - c.entropy_coef * fields[ENTROPY] if c.entropy_coef else added

    def _sums(
        self, logprobs_BT: torch.Tensor, old_BT: torch.Tensor, correction: Correction, fields: Fields
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The numbers to report, as sums over tokens and as maxima."""
        mask = fields[MASK]
        gap = ((old_BT.detach() - fields[BEHAVIOUR_LOGPROBS]) * mask).abs()
        sums = {"logprob_gap_mean": gap.sum(), "entropy": (fields[ENTROPY].detach() * mask).sum()}
        if self.config.correction.kind != "none" or VERSION_LAG in fields:
            sums["correction_weight"] = correction.weights.sum()
            sums["rejected"] = (mask - correction.kept).sum()
        if REFERENCE_LOGPROBS in fields:
            sums["kl"] = (self._kl(logprobs_BT.detach(), fields) * mask).sum()
        return sums, {"logprob_gap_max": gap.max()}

    def _needs(self) -> frozenset[str]:
        c = self.config
        needs = {REFERENCE_LOGPROBS} if c.kl_coef > 0 else set()
        # In a step's only update the proximal policy is the current one: no pass of its own.
        if (self._proximal_is_own and c.updates > 1) or (needs and not self.kl_in_loss):
            needs.add(OLD_LOGPROBS)
        return frozenset(needs)

    @property
    def _proximal_is_own(self) -> bool:
        """Whether the ratio is against the trainer's policy at the start of the step, not the engine's."""
        c = self.config
        return self.own_proximal or c.ratio != "token" or c.correction.kind != "none"

    def _rewards(self, group: TrajectoryGroup, step: int) -> list[float]:
        """With DAPO's soft punishment of answers that come near the limit (section 3.4), and Kimi's length reward."""
        c, rewards = self.config, group.rewards
        lengths = [t.policy_tokens for t in group.trajectories]
        if c.overlong_buffer and self.max_tokens is not None:
            free = self.max_tokens - c.overlong_buffer
            over = [max(length - free, 0) / c.overlong_buffer for length in lengths]
            rewards = [r - c.overlong_penalty * min(o, 1.0) for r, o in zip(rewards, over, strict=True)]
        if c.length_weight and step >= c.length_after:
            added = length_rewards(lengths, [score.full for score in group.scores])
            rewards = [r + c.length_weight * a for r, a in zip(rewards, added, strict=True)]
        return rewards

    def _per_token(self, trajectory: Trajectory, credit: float, step: int) -> dict[str, Seq[float]]:
        count = len(trajectory.token_ids)
        fields: dict[str, Seq[float]] = {
            self.credit_is: [credit] * count if self.credit_is == ADVANTAGES else trajectory.rewards(credit),
            BEHAVIOUR_LOGPROBS: trajectory.logprobs,
        }
        if self.config.correction.max_lag is not None or self.config.correction.lag_decay < 1:
            fields[VERSION_LAG] = trajectory.lags(step)
        if self.config.mask_truncated:
            fields[KEEP] = [float(not trajectory.truncated)] * count
        return fields

    def _surrogate(
        self, logprobs_BT: torch.Tensor, old_BT: torch.Tensor, correction: Correction, fields: Fields
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each token before the correction, and what it reports, as sums over kept tokens: where clipping
        stopped the gradient (cispo: bounded the weight)."""
        advantage = fields[ADVANTAGES]
        proximal = old_BT if self._proximal_is_own else fields[BEHAVIOUR_LOGPROBS]
        log_ratio = (logprobs_BT - proximal) * fields[MASK]
        ratio = at_level(_LEVELS[self.config.ratio], log_ratio, fields).exp()
        per_token, clipped = self._clipped(ratio, advantage, logprobs_BT)
        clipped = clipped * correction.kept
        return per_token, {
            "clip_ratio": clipped.sum(),
            "clip_ratio_low": (clipped * (advantage < 0)).sum(),
            "clip_ratio_high": (clipped * (advantage > 0)).sum(),
        }

    def _clipped(
        self, ratio: torch.Tensor, advantage: torch.Tensor, logprobs_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token, and where clipping changed it."""
        c, high = self.config, 1 + self.config.clip_high
        if c.objective == "cispo":
            ratio = ratio.detach()
            return -ratio.clamp(max=high) * advantage * logprobs_BT, (ratio > high) & (advantage > 0)
        if c.dual_clip is not None:
            ratio = ratio.clamp(max=c.dual_clip)
        bounded = ratio.clamp(1 - c.clip_low, high)
        return -torch.minimum(ratio * advantage, bounded * advantage), bounded * advantage < ratio * advantage

    def _kl(self, logprobs_BT: torch.Tensor, fields: Fields) -> torch.Tensor:
        """Schulman's k3 estimate of KL to the reference, by token. With `kl_unbiased` it is weighted by the token's
        ratio to the policy that sampled it, gradient and all: then its mean over samples is the current policy's KL,
        and its gradient that of the KL (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
        mask = fields[MASK]
        difference = ((fields[REFERENCE_LOGPROBS] - logprobs_BT) * mask).clamp(max=LONGEST_LOG)
        estimate = difference.exp() - difference - 1
        if not self.config.kl_unbiased:
            return estimate
        return at_level("token", (logprobs_BT - fields[BEHAVIOUR_LOGPROBS]) * mask, fields).exp() * estimate

    def _kl_penalty(self, fields: Fields) -> torch.Tensor:
        """[B, T]: what KL costs in reward, by token: the k1 estimate under the policy at the start of the step."""
        if self.config.kl_coef == 0:
            return torch.zeros_like(fields[MASK])
        difference = fields[OLD_LOGPROBS] - fields[REFERENCE_LOGPROBS]
        return self.config.kl_coef * difference * fields[MASK]

    def _rewards_by_token(self, fields: Fields) -> torch.Tensor:
        return fields[REWARDS] - self._kl_penalty(fields)

    def _normalized(self, per_token: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum, denominator) over the kept tokens, which are `fields`' mask."""
        if self.config.normalize == "token":
            return per_token.sum(), fields[MASK].sum()
        means, count = sequence_mean(per_token, fields)
        if self.config.normalize == "sequence":
            return means.sum(), (count > 0).sum()
        assert self.max_tokens is not None
        return sequence_sum(per_token, fields).sum() / self.max_tokens, (count > 0).sum()


class Grpo(PolicyGradient[GrpoConfig]):
    """Group-relative policy optimisation.

    For G samples of one prompt with rewards r: A = (r - mean) / (std + 1e-4), the same for every token of a sample;
    without `scale_rewards` A = r - mean (Dr. GRPO). KL to the initial weights is in the loss:

        + kl_coef * (exp(d) - d - 1),  d = reference - logprob
    """

    kl_in_loss = True

    def credit(self, rewards: list[float]) -> list[float]:
        return group_normalized(rewards, scale=self.config.scale_rewards)


class Rloo(PolicyGradient[RlooConfig]):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740).

    The whole answer y is one action. In a step's only update the gradient of the loss is

        -(mean over answers of A * the gradient of log p(y)),  log p(y) = sum over its tokens of their log-probs

    with A = R - mean of R over the prompt's other samples, R = reward - kl_coef * sum over tokens of (old - reference).
    Further updates clip the ratio of p(y) to the trainer's own at the start of the step.
    A is linear in R, so the two parts are computed apart: the rewards' on rank 0, the KL's once the log-probs are
    there.
    """

    own_proximal = True

    def __init__(self, config: RlooConfig, max_tokens: int | None = None) -> None:
        super().__init__(config, max_tokens)
        self._number = itertools.count()

    def credit(self, rewards: list[float]) -> list[float]:
        return leave_one_out(rewards)

    def sequences(self, records: Seq[Record], groups: Seq[TrajectoryGroup], step: int = 0) -> list[Sequence]:
        """As every policy gradient's, and numbered by group where KL needs to know."""
        if self.config.kl_coef == 0:
            return super().sequences(records, groups, step)
        result: list[Sequence] = []
        for group in groups:
            number = float(next(self._number) % _EXACT)
            sampled = super().sequences([], [group], step)
            result += [replace(s, per_sequence={GROUP: number}) for s in sampled]
        return result

    def prepare(self, fields: Fields) -> Fields:
        advantages = fields[ADVANTAGES]
        if GROUP in fields:
            real = sequence_sum(fields[MASK], fields) > 0
            penalties = sequence_sum(self._kl_penalty(fields), fields)
            advantages = advantages - to_tokens(over_group(penalties, fields[GROUP], real), fields)
        if self.config.normalize_advantages:
            advantages = normalized_by_sequence(advantages, fields)
        return super().prepare(fields | {ADVANTAGES: advantages})


class Kimi(PolicyGradient[KimiConfig]):
    """Kimi k1.5's policy optimisation (arXiv 2501.12599, section 2.3.2, equations 2 and 3).

    Each step solves a regularised problem around the policy pi_i at its start. Its surrogate loss, of a trajectory y
    with advantage A = r - mean r of the prompt's samples, has the gradient

        -A * the gradient of log pi(y) + tau / 2 * the gradient of (log pi(y) - log pi_i(y))^2

    and a step's loss is the mean over trajectories. log pi(y) sums over the trajectory's trained tokens. In a step's
    first update pi is pi_i, and the square has no gradient. The correction's weights multiply A by token. KL to the
    initial weights, if wanted, is in the loss as GRPO's is, averaged over each trajectory's tokens. Each step is a
    problem of its own, so the optimizer is reset at its start, unless the configuration says otherwise.
    """

    kl_in_loss = True
    own_proximal = True

    def __init__(self, config: KimiConfig, max_tokens: int | None = None) -> None:
        super().__init__(config, max_tokens)
        self.resets_optimizer = config.reset_optimizer

    def credit(self, rewards: list[float]) -> list[float]:
        return group_normalized(rewards, scale=False)

    def loss(self, logprobs_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """The formula above."""
        c, mask = self.config, fields[MASK]
        old = fields.get(OLD_LOGPROBS, logprobs_BT.detach())
        correction = correct(c.correction, old, fields)
        kept = fields | {MASK: correction.kept}
        change = (logprobs_BT - old) * correction.kept
        gained = sequence_sum(-fields[ADVANTAGES] * correction.weights * change, kept)
        moved = sequence_sum(change, kept)
        regularized, count = sequence_mean(self._regularizers(logprobs_BT, fields) * correction.kept, kept)
        total = (gained + c.tau / 2 * moved.square() + regularized).sum()
        sums, maxima = self._sums(logprobs_BT, old, correction, fields)
        sums["policy_change"] = change.detach().abs().sum()
        return LossOutput(total, mask.sum(), sums, maxima, (count > 0).sum())


class Reinforce(PolicyGradient[ReinforceConfig]):
    """REINFORCE++ (Hu et al., arXiv 2501.03262): no critic, no group needed.

    A_t = the discounted rewards from t on, normalised over all tokens of the batch. The reward of a token is
    -kl_coef * (old - reference), and on the last one also the answer's; with `baseline` less its group's mean.
    """

    credit_is = REWARDS

    def credit(self, rewards: list[float]) -> list[float]:
        mean = sum(rewards) / len(rewards) if self.config.baseline else 0.0
        return [reward - mean for reward in rewards]

    def prepare(self, fields: Fields) -> Fields:
        nothing = torch.zeros_like(fields[MASK])
        returns, _ = gae(self._rewards_by_token(fields), nothing, fields, self.config.gamma, 1.0)
        fields = super().prepare(fields)
        return fields | {ADVANTAGES: whiten(returns, fields[MASK])}


class Ppo(PolicyGradient[PpoConfig]):
    """Proximal policy optimisation (Schulman et al., arXiv 1707.06347) with a critic, which is trained along.

    The rewards of REINFORCE++ go through generalised advantage estimation with the values that the critic gave at the
    start of the step. The critic's loss of a token is

        max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2

    with R = A + V_old from before normalisation; a step's is the mean over tokens. Truncated answers count as ended.
    """

    credit_is = REWARDS

    def __init__(self, config: PpoConfig, max_tokens: int | None = None) -> None:
        super().__init__(config, max_tokens)
        self.needs = self.needs | {VALUES}
        self.critic_warmup = config.critic_warmup

    def credit(self, rewards: list[float]) -> list[float]:
        return rewards

    def prepare(self, fields: Fields) -> Fields:
        c, rewards = self.config, self._rewards_by_token(fields)
        advantages, returns = gae(rewards, fields[VALUES], fields, c.gamma, c.lam)
        fields = super().prepare(fields | {RETURNS: returns})
        advantages = whiten(advantages, fields[MASK]) if c.normalize_advantages else advantages
        return fields | {ADVANTAGES: advantages}

    def critic_loss(self, values_BT: torch.Tensor, fields: Fields) -> LossOutput:
        """The formula above. Reports values and returns, so that a critic that learns nothing shows."""
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
