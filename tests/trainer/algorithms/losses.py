"""Losses that tests name in configurations."""

from __future__ import annotations

from typing import Any

import torch

from trainer.algorithms.custom import PolicyTensors


def clipped(t: PolicyTensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's, against the trainer's policy at the start of the step: what GRPO with a correction does."""
    low, high = t.options["clip"]
    ratio = (t.logprobs - t.old_logprobs).exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * t.advantages, bounded * t.advantages), {"ratio": ratio}


def by_answer(t: PolicyTensors) -> torch.Tensor:
    """Of sums and means over answers, the reference and the entropy."""
    assert t.reference_logprobs is not None
    change = t.over_answer(t.logprobs - t.reference_logprobs) * t.mean_over_answer(t.entropy)
    return -t.advantages * change


def mean(t: PolicyTensors) -> torch.Tensor:
    return (t.logprobs * t.advantages).mean()


def detached(t: PolicyTensors) -> torch.Tensor:
    return t.logprobs.detach() * t.advantages


def chatty(t: PolicyTensors) -> tuple[torch.Tensor, Any]:
    return t.logprobs, t.advantages


def reporting_a_mean(t: PolicyTensors) -> tuple[torch.Tensor, dict[str, Any]]:
    return t.logprobs, {"loss": t.logprobs.mean().item()}


NUMBER = 3
