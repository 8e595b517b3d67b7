"""Numbers about rollouts: rewards, lengths, and which weights wrote them; for a step and for an evaluation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from trainer.errors import RolloutError
from trainer.rewards.scorer import Score
from trainer.trajectory import REPEAT, Trajectory, TrajectoryGroup


def rollout_metrics(groups: Sequence[TrajectoryGroup], step: int) -> dict[str, float]:
    """Means over the step's samples, on rank 0. `step` counts the optimizer steps before it.

    `zero_std_groups` is the share of groups whose rewards are all equal: they teach a group-relative algorithm nothing.
    `truncated` is the share of samples that ran into `rollout.max_tokens`. A token's version lag is how many
    optimizer steps the version that wrote it is behind `step`. `excluded_tokens` is the share of the policy's tokens
    that are read and not trained on, because they are too old; it is told where there are any.
    """
    groups = [group for group in groups if group.trajectories]  # of the others every episode or reward failed
    if not groups:
        return {}
    trajectories = [t for g in groups for t in g.trajectories]
    lags = [lag for t in trajectories for lag, trained in zip(t.lags(step), t.mask, strict=True) if trained]
    written = sum(t.policy_tokens for t in trajectories)
    excluded = {"excluded_tokens": (written - len(lags)) / written} if len(lags) < written else {}
    return (
        score_metrics([s for g in groups for s in g.scores])
        | {"zero_std_groups": sum(len(set(g.rewards)) == 1 for g in groups) / len(groups)}
        | length_metrics(trajectories)
        | {
            "rollout_tokens": float(written),
            "version_lag_mean": sum(lags) / max(len(lags), 1),
            "version_lag_max": max(lags, default=0.0),
            "versions_per_sample": statistics.fmean(len({v.version for v in t.versions}) for t in trajectories),
        }
        | excluded
    )


def sample_texts(
    groups: Sequence[TrajectoryGroup], most: int, text: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """The first completion to each of `most` prompts, as a `samples` event has it; `text` decodes tokens."""
    return [
        {
            "prompt": text(group.prompt_ids),
            "completion": text(group.trajectories[0].token_ids),
            "finish_reason": group.trajectories[0].finish_reason,
            "reward": group.scores[0].total,
            "rewards": group.scores[0].parts,
            "versions": sorted({span.version for span in group.trajectories[0].versions}),
        }
        for group in [group for group in groups if group.trajectories][:most]
    ]


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


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lengths of what the policy wrote, in tokens and turns, and the share that was cut off. The turns, and what tools
    and others wrote between them, are told where an answer has more than one."""
    lengths = [t.policy_tokens for t in trajectories]
    turns = [sum(turn.of_policy for turn in t.turns) for t in trajectories]
    result = {
        "answer_tokens_mean": statistics.fmean(lengths),
        "answer_tokens_max": float(max(lengths)),
        "truncated": statistics.fmean(t.truncated for t in trajectories),
    }
    if circles := sum(t.finish_reason == REPEAT for t in trajectories):
        result["repeated"] = circles / len(trajectories)
    if max(turns) > 1:
        read = statistics.fmean(len(t.token_ids) - t.policy_tokens for t in trajectories)
        result |= {"turns_mean": statistics.fmean(turns), "observation_tokens_mean": read}
    return result


def pass_at(k: int, samples: int, right: int) -> float:
    """The probability that at least one of k answers is right, estimated without bias from `samples` of which `right`
    are (Chen et al. 2021, arXiv 2107.03374): 1 - C(samples - right, k) / C(samples, k)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def evaluation_metrics(groups: Sequence[TrajectoryGroup], passes: Sequence[int] = ()) -> dict[str, float]:
    """`accuracy` is the share of answers with every reward at its best, all prompts' together; `pass_at_k`, for each k
    of `passes`, the mean of pass@k over the prompts that have as many answers with a score."""
    scores = [score for group in groups for score in group.scores]
    if not scores:
        raise RolloutError("no answer of an evaluation has a score. Look for warnings about rewards above.")
    found = score_metrics(scores)
    result = {
        "accuracy": found.pop("full_reward"),
        **{name: value for name, value in found.items() if name == "reward_mean" or name.startswith("reward/")},
        **length_metrics([t for group in groups for t in group.trajectories]),
    }
    counts = [(len(group.scores), sum(score.full for score in group.scores)) for group in groups]
    for k in passes:
        if enough := [pass_at(k, samples, right) for samples, right in counts if samples >= k]:
            result[f"pass_at_{k}"] = statistics.fmean(enough)
    return result
