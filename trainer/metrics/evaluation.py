"""What an evaluation on the held-out records reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.metrics.rollouts import length_metrics, score_metrics

if TYPE_CHECKING:
    from trainer.rollout import Group


def evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`accuracy` is the share of answers with every reward at its best. With several answers to a prompt it is their
    mean (avg@n), and `pass_any` the share of prompts with at least one such answer (pass@n)."""
    scores = [score for group in groups for score in group.scores]
    found = score_metrics(scores)
    result = {
        "accuracy": found.pop("full_reward"),
        **{name: value for name, value in found.items() if name == "reward_mean" or name.startswith("reward/")},
        **length_metrics([sample for group in groups for sample in group.samples]),
    }
    if any(len(group.scores) > 1 for group in groups):
        result["pass_any"] = statistics.fmean(any(s.full for s in group.scores) for group in groups)
    return result
