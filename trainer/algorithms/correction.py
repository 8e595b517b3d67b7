"""Importance correction between the engine that sampled and the trainer that learns, and for stale tokens.

With w = exp(old - behaviour), `old` being the trainer's log-prob at the start of the step, the loss of a token weighs

    truncated   clamp(w, low, high)                                                 TIS (Yao et al. 2025)
    masked      w where low <= w <= high; the others leave loss and denominator     MIS (Liu et al. 2025), IcePop

w is a token's, or that of the whole answer: its product (`sequence`) or geometric mean (`geometric`). Tokens older than
`max_lag` optimizer steps leave too; the others' weight is multiplied by lag_decay ^ lag. At the levels of answers the
oldest token decides for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.algorithms.advantages import sequence_mean
from trainer.algorithms.base import BEHAVIOUR_LOGPROBS, VERSION_LAG
from trainer.batch import MASK, Fields, label_segments, sequence_sum, to_tokens
from trainer.config import CorrectionConfig

LONGEST_LOG = 20.0  # exp of more says nothing, and would soon overflow


@dataclass(frozen=True)
class Correction:
    """`weights` [B, T] of the loss, without gradient, and `kept` [B, T]: the mask without the rejected tokens."""

    weights: torch.Tensor
    kept: torch.Tensor


def correct(config: CorrectionConfig, old_BT: torch.Tensor, fields: Fields) -> Correction:
    """`old_BT`: log-probs of the trainer's policy at the start of the step."""
    mask = fields[MASK]
    weights, accepted = torch.ones_like(mask), mask > 0
    if config.kind != "none":
        weights = at_level(config.level, (old_BT.detach() - fields[BEHAVIOUR_LOGPROBS]) * mask, fields).exp()
        if config.kind == "truncated":
            weights = weights.clamp(config.low, config.high)
        else:
            accepted = accepted & (weights >= config.low) & (weights <= config.high)
    if (lag := fields.get(VERSION_LAG)) is not None:
        lag = lag if config.level == "token" else _largest(lag, fields)
        weights = weights * config.lag_decay**lag
        if config.max_lag is not None:
            accepted = accepted & (lag <= config.max_lag)
    kept = mask * accepted
    return Correction(weights * kept, kept)


def at_level(level: str, log_ratio_BT: torch.Tensor, fields: Fields) -> torch.Tensor:
    """[B, T]: each token's log-ratio, or its answer's: the sum (`sequence`, `trajectory`) or mean (`geometric`)."""
    if level == "geometric":
        log_ratio_BT = to_tokens(sequence_mean(log_ratio_BT, fields)[0], fields)
    elif level != "token":
        log_ratio_BT = to_tokens(sequence_sum(log_ratio_BT, fields), fields)
    return log_ratio_BT.clamp(-LONGEST_LOG, LONGEST_LOG)


def _largest(values_BT: torch.Tensor, fields: Fields) -> torch.Tensor:
    ids = label_segments(fields)
    largest = values_BT.new_zeros(values_BT.shape[0], int(ids.max()) + 1)
    return largest.scatter_reduce(1, ids, values_BT * fields[MASK], "amax").gather(1, ids)
