"""Numbers about rollouts: rewards, lengths, and which weights wrote them; for a step and for an evaluation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainer.rewards.scorer import Score
from trainer.rollout import Group, Sample


def rollout_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Means over the step's samples, on rank 0. `step` counts the optimizer steps before it.

    `zero_std_groups` is the share of groups whose rewards are all equal: they teach a group-relative algorithm nothing.
    `truncated` is the share of samples that ran into `rollout.max_tokens`. A token's version lag is how many
    optimizer steps the version that wrote it is behind `step`.
    """
    if not groups:
        return {}
    samples = [s for g in groups for s in g.samples]
    lags = [lag for s in samples for lag in s.lags(step)]
    return (
        score_metrics([s for g in groups for s in g.scores])
        | {"zero_std_groups": sum(len(set(g.rewards)) == 1 for g in groups) / len(groups)}
        | length_metrics(samples)
        | {
            "rollout_tokens": float(sum(len(s.token_ids) for s in samples)),
            "version_lag_mean": sum(lags) / max(len(lags), 1),
            "version_lag_max": max(lags, default=0.0),
            "versions_per_sample": sum(len({span.version for span in s.versions}) for s in samples) / len(samples),
        }
    )


def score_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """The weighted sum's spread, the share of samples with every reward at its best, each reward's own mean."""
    totals = [s.total for s in scores]
    summed = {
        "reward_mean": statistics.fmean(totals),
        "reward_std": statistics.pstdev(totals),
        "reward_min": min(totals),
        "reward_max": max(totals),
        "full_reward": sum(s.full for s in scores) / len(scores),
    }
    names = sorted({name for s in scores for name in s.parts})
    return summed | {f"reward/{n}": statistics.fmean(s.parts[n] for s in scores if n in s.parts) for n in names}


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Answer lengths in tokens, and the share that was cut off."""
    lengths = [len(s.token_ids) for s in samples]
    return {
        "answer_tokens_mean": statistics.fmean(lengths),
        "answer_tokens_max": float(max(lengths)),
        "truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
    }


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
