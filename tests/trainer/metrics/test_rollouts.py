"""What rollouts report, on groups small enough to count by hand."""

from __future__ import annotations

import itertools

import pytest

from tests.trainer.rollouts.trajectories import answer
from trainer.metrics.rollouts import evaluation_metrics, pass_at, rollout_metrics
from trainer.rewards.scorer import Score
from trainer.trajectory import Trajectory, TrajectoryGroup, VersionSpan


def sample(*spans: tuple[int, int], finish: str = "stop") -> Trajectory:
    """`spans` are (version, tokens)."""
    versions, start = [], 0
    for version, tokens in spans:
        versions.append(VersionSpan(version, start, start + tokens, step=version))
        start += tokens
    return answer((7,) * start, (-0.5,) * start, finish, tuple(versions))


def score(total: float, **parts: float) -> Score:
    return Score(total, parts)


GROUPS = [
    TrajectoryGroup(
        (1,), (sample((3, 4)), sample((2, 1), (3, 1), finish="length")), (score(1, a=1, b=1), score(0.5, a=0, b=1))
    ),
    TrajectoryGroup((2,), (sample((1, 2)), sample((3, 2))), (score(1, a=1, b=1), score(1, a=1, b=1))),
]


def test_all_that_is_reported() -> None:
    """Rewards by function and group, lengths, and version lag by token."""
    assert rollout_metrics(GROUPS, step=4) == pytest.approx({
        "reward_mean": 0.875, "reward_std": (3 * 0.125**2 + 0.375**2) ** 0.5 / 2, "reward_min": 0.5, "reward_max": 1,
        "reward/a": 0.75, "reward/b": 1, "full_reward": 0.75, "zero_std_groups": 0.5,
        "answer_tokens_mean": 2.5, "answer_tokens_max": 4, "rollout_tokens": 10, "truncated": 0.25,
        "version_lag_mean": (4 * 1 + 1 * 2 + 1 * 1 + 2 * 3 + 2 * 1) / 10, "version_lag_max": 3,
        "versions_per_sample": 1.25,
    })  # fmt: skip


def test_no_rollouts_no_metrics() -> None:
    assert rollout_metrics([], 3) == {}


def test_an_evaluation_of_greedy_answers() -> None:
    groups = [TrajectoryGroup(g.prompt_ids, g.trajectories[:1], g.scores[:1]) for g in GROUPS]
    found = evaluation_metrics(groups)  # no pass_at
    assert found == {
        "accuracy": 1, "reward_mean": 1, "reward/a": 1, "reward/b": 1,
        "answer_tokens_mean": 3, "answer_tokens_max": 4, "truncated": 0,
    }  # fmt: skip


def test_an_evaluation_of_several_answers_is_their_mean_and_pass_at_k() -> None:
    bad = TrajectoryGroup((3,), (sample((3, 1)), sample((3, 1))), (score(0, a=0, b=0), score(0, a=0, b=0)))
    found = evaluation_metrics([*GROUPS, bad], (1, 2, 3))
    assert found["accuracy"] == found["pass_at_1"] == 0.5
    assert found["pass_at_2"] == pytest.approx(2 / 3)
    assert "pass_at_3" not in found  # no prompt has three answers with a score


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_have_a_right_one(k: int, right: int) -> None:
    """Chen et al. 2021, equation 1, against counting."""
    answers = [True] * right + [False] * (5 - right)
    choices = list(itertools.combinations(answers, k))
    assert pass_at(k, 5, right) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_a_reward_that_failed_is_no_full_reward() -> None:
    failed = Score(1.0, {"a": 1.0}, {"a": "timed out"})
    found = evaluation_metrics([TrajectoryGroup((1,), (sample((1, 1)),), (failed,))])
    assert found["accuracy"] == 0
    assert found["reward/a"] == 1
