"""Advantages: group baselines on rank 0, estimators over the whole batch on every rank.

Tensors are [B, T], over rows that may hold several sequences. A sequence's trained tokens need not follow each other: a
tool's answer may lie between.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trainer.batch import MASK, SEGMENTS, Fields, sequence_sum, to_tokens

STD_FLOOR = 1e-4
VARIANCE_FLOOR = 1e-8


def group_normalized(rewards: Seq[float], *, scale: bool) -> list[float]:
    """Rewards of one group, centred and (unless `scale` is off) divided by their standard deviation + 1e-4. A sample
    alone has nothing to be compared with: 0."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)
    centred = r - r.mean()
    result: list[float] = (centred / (r.std() + STD_FLOOR) if scale else centred).tolist()
    return result


def leave_one_out(rewards: Seq[float]) -> list[float]:
    """Each reward minus the mean of the group's others; 0 for a sample alone."""
    total, others = sum(rewards), len(rewards) - 1
    if others < 1:
        return [0.0] * len(rewards)
    return [reward - (total - reward) / others for reward in rewards]


def length_rewards(lengths: Seq[int], correct: Seq[bool]) -> list[float]:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) of the answers to one prompt.

    With l = 0.5 - (length - shortest) / (longest - shortest), a right answer gets l, and a wrong one min(0, l): short
    answers are preferred among the right ones, and no wrong one is praised for being short. 0 if all are as long.
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(lengths)
    scaled = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [value if right else min(0.0, value) for value, right in zip(scaled, correct, strict=True)]


def gae(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, fields: Fields, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): (advantages, returns), 0 outside the mask of `fields`.

    delta_t = r_t + gamma V_(t+1) - V_t, A_t = sum over l of (gamma lam)^l delta_(t+l), return_t = A_t + V_t. Here t + 1
    is the sequence's next trained token: what its environment wrote between takes no time and no credit. There is
    nothing after a sequence's last one. With values of 0 and lam 1, both are the discounted rewards to go.
    """
    mask, advantages = fields[MASK], torch.zeros_like(values_BT)
    goes_on = _goes_on(fields)
    following = next_value = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        trained = mask[:, t] > 0
        following, next_value = following * goes_on[:, t], next_value * goes_on[:, t]
        delta = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        following = torch.where(trained, delta + gamma * lam * following, following)
        next_value = torch.where(trained, values_BT[:, t], next_value)
        advantages[:, t] = following * trained
    return advantages, (advantages + values_BT) * mask


def _goes_on(fields: Fields) -> torch.Tensor:
    """bool [B, T]: whether the token predicted at t + 1 is of the same sequence as the one predicted at t."""
    same = torch.ones_like(fields[MASK], dtype=torch.bool)
    if SEGMENTS in fields:
        segments = fields[SEGMENTS][:, 1:]
        same[:, :-1] = segments[:, :-1] == segments[:, 1:]
    return same


def whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over the masked tokens of the batch; 0 elsewhere."""
    count = mask_BT.sum().clamp(min=1)
    centred = (values_BT - (values_BT * mask_BT).sum() / count) * mask_BT
    return centred * (centred.square().sum() / count).clamp(min=VARIANCE_FLOOR).rsqrt()


def sequence_mean(values_BT: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S]: the mean over each sequence's trained tokens (0 for an empty slot), and their number."""
    count = sequence_sum(fields[MASK], fields)
    return sequence_sum(values_BT, fields) / count.clamp(min=1), count


def over_group(values_BS: torch.Tensor, groups_BS: torch.Tensor, real_BS: torch.Tensor) -> torch.Tensor:
    """Each sequence's value minus the mean of its group's others; 0 for a sequence alone and for empty slots."""
    values, real = values_BS[real_BS], groups_BS[real_BS].round().long()
    _, index = real.unique(return_inverse=True)
    sums, counts = (
        torch.zeros(len(real), dtype=values.dtype, device=values.device).index_add(0, index, x)
        for x in (values, torch.ones_like(values))
    )
    others = counts[index] - 1
    baseline = (sums[index] - values) / others.clamp(min=1)
    result = torch.zeros_like(values_BS)
    result[real_BS] = (values - baseline) * (others > 0)
    return result


def normalized_by_sequence(advantages_BT: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Advantages that are equal within a sequence, centred and divided by their standard deviation over sequences."""
    mean_BS, count = sequence_mean(advantages_BT, fields)
    real = count > 0
    values = mean_BS[real]
    scale = (values.std() if len(values) > 1 else values.new_zeros(())) + STD_FLOOR
    return to_tokens((mean_BS - values.mean()) / scale * real, fields)
