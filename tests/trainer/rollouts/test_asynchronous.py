"""The asynchronous schedule: what it sends, whom it waits for, and that nothing is ever too old."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future, wait
from typing import Any

import pytest

from tests.trainer.rollouts.sampler import Keep, Records, Sampler, everything, numbers, published, useful
from trainer.config.sections import AsyncSchedule
from trainer.rollouts.feed import Feed
from trainer.rollouts.schedules import Schedule, build_schedule
from trainer.trajectory import TrajectoryGroup

BATCH = 2


@pytest.fixture
def sampler() -> Sampler:
    return Sampler()


def schedule(sampler: Sampler, max_lag: int = 1, buffer: int | None = None, keep: Keep = everything) -> Schedule:
    config = AsyncSchedule(max_lag=max_lag, buffer=buffer)
    return published(build_schedule(config, BATCH, Feed(Records(), 0), sampler, keep), sampler)


def test_groups_are_taken_as_they_finish(sampler: Sampler) -> None:
    built = schedule(sampler)
    taking = built.take(step=0, steps_left=9)
    sampler.soon(lambda: sampler.finish(3))
    assert next(taking).draw.number == 3
    assert sampler.in_flight == [0, 1, 2]
    sampler.finish(1)
    assert numbers(taking) == [1]


@pytest.mark.parametrize(
    ("max_lag", "buffer", "steps_left", "sent", "ahead"),
    [
        pytest.param(3, None, 99, (3 + 1) * BATCH, (3 + 1) * BATCH, id="no more than may be trained on in time"),
        pytest.param(3, 3, 99, 3, 3 + BATCH, id="a smaller buffer"),
        pytest.param(1, 1, 99, BATCH, 2 * BATCH, id="a buffer smaller than a step holds a step"),
        pytest.param(5, None, 2, 2 * BATCH, 2 * BATCH, id="nothing that no step will use"),
    ],
)
def test_what_is_ahead_is_bounded(
    sampler: Sampler, max_lag: int, buffer: int | None, steps_left: int, sent: int, ahead: int
) -> None:
    """All that is sent is finished, and still no more is sent."""
    built = schedule(sampler, max_lag, buffer)
    assert sampler.taken(built.take(0, steps_left), *range(sent)) == list(range(BATCH))
    assert len(sampler.sent) == sent
    assert built.stats()["groups_ready"] == sent - BATCH
    built.ahead(step=0, steps_left=steps_left - 1)
    assert len(sampler.sent) == ahead


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_no_token_is_older_than_the_bound_whatever_finishes_when(sampler: Sampler, max_lag: int) -> None:
    built, luck, steps = schedule(sampler, max_lag), random.Random(max_lag), 200
    used, lags = set[int](), list[int]()

    def chosen(flying: list[int]) -> list[int]:
        slow = luck.random() < 0.9  # the first in line is the slow one
        return [luck.choice(flying[1:] or flying) if slow else flying[0]]

    with sampler.finishing(chosen):
        for version in range(steps):
            sampler.version = version
            for rollout in built.take(version, steps - version):
                assert rollout.draw.number not in used
                used.add(rollout.draw.number)
                lags.append(version - (rollout.group.oldest or 0))
            built.ahead(version, steps - version - 1)
    assert max(lags) == max_lag
    assert built.stats()["stale_groups"] == 0
    assert used == set(range(steps * BATCH))  # every record once, none left over


def test_a_group_over_the_bound_all_the_same_is_sampled_again(sampler: Sampler) -> None:
    built = schedule(sampler, max_lag=1)
    assert sampler.taken(built.take(step=0, steps_left=9), 0, 1, 2, 3) == [0, 1]
    sampler.version = 5  # versions were skipped
    with sampler.finishing():
        rollouts = list(built.take(step=5, steps_left=8))
    assert [rollout.group.oldest for rollout in rollouts] == [5, 5]
    assert built.stats()["stale_groups"] >= 1
    assert [draw.number for draw in sampler.sent].count(2) == 2


@pytest.mark.timeout(120)
def test_a_server_that_went_back_beyond_the_bound_does_not_stop_training(sampler: Sampler) -> None:
    """Sampled again it would be as old: what the server has is all there is."""
    sampler.version = 3
    with sampler.finishing():
        rollouts = list(schedule(sampler, max_lag=1).take(step=9, steps_left=1))
    assert [rollout.group.oldest for rollout in rollouts] == [3, 3]
    assert [draw.number for draw in sampler.sent] == [0, 1]


def test_groups_that_teach_nothing_are_replaced(sampler: Sampler) -> None:
    built = schedule(sampler, keep=useful)
    taking = built.take(step=0, steps_left=9)
    sampler.soon(lambda: (sampler.finish(0, 1, rewards=(1.0, 1.0)), sampler.finish(2, 3)))
    assert numbers(taking) == [2, 3]
    assert built.stats()["filtered_groups"] == 2
    assert sampler.in_flight == [4, 5]


def test_a_checkpoint_loses_and_repeats_nothing(sampler: Sampler) -> None:
    built = schedule(sampler, max_lag=2)
    used = set(sampler.taken(built.take(step=0, steps_left=9), 4, 1, 2))
    saved = json.loads(json.dumps(built.state_dict()))

    after = Sampler()
    resumed = schedule(after, max_lag=2)
    resumed.load_state_dict(saved)
    assert {p["number"] for p in resumed.state_dict()["pending"]} == {p["number"] for p in saved["pending"]}
    after.version = 1
    after.soon(lambda: after.finish(0, 3, 5))
    for version in (1, 2):
        used |= set(numbers(resumed.take(version, steps_left=9)))
    assert {0, 3, 5} <= {draw.number for draw in after.sent}
    assert not {1, 2, 4} & {draw.number for draw in after.sent}
    assert used == set(range(6))


def test_going_back_gives_up_what_was_in_flight(sampler: Sampler) -> None:
    built = schedule(sampler)
    saved = built.state_dict()
    sampler.taken(built.take(step=0, steps_left=9), 0, 1)
    flying = [pending.future for pending in built.pending]
    assert len(flying) == 2
    built.load_state_dict(saved)
    assert all(future.cancelled() for future in flying)
    assert built.pending == []
    assert built.feed.drawn == 0


def real(sampler: Sampler, max_lag: int, every: int = 1) -> Schedule:
    """One that learns of versions from whoever publishes them."""
    return build_schedule(AsyncSchedule(max_lag=max_lag), BATCH, Feed(Records(), 0), sampler, everything, every)


def test_what_is_restored_keeps_its_age_under_new_numbers(sampler: Sampler) -> None:
    """The killed run had published on: the checkpoint's weights, version 7, are version 30 now."""
    sampler.version = 6
    built = real(sampler, max_lag=2)
    built.steps.published(6, 60)
    used = sampler.taken(built.take(step=60, steps_left=9), *range((2 + 1) * BATCH))
    built.steps.published(7, 61)
    saved = json.loads(json.dumps(built.state_dict()))

    after = Sampler()
    after.version = 30
    resumed = real(after, max_lag=2)
    resumed.load_state_dict(saved)
    resumed.steps.published(30, 61)
    rollouts = list(resumed.take(step=61, steps_left=8))
    assert [rollout.group.trajectories[0].lags(61) for rollout in rollouts] == [[1.0], [1.0]], "one step old, as it was"
    assert [rollout.draw.number for rollout in rollouts] == [used[-1] + 1, used[-1] + 2]
    assert resumed.stats()["stale_groups"] == 0
    assert {draw.number for draw in after.sent}.isdisjoint(p["number"] for p in saved["pending"])


def test_steps_that_were_not_published_make_tokens_older(sampler: Sampler) -> None:
    """Steps 1 and 2 are trained on what step 0 sampled, since their own weights could not be published. At step 3 that
    is over the bound: there are newer weights, and they are asked."""
    built, lags = real(sampler, max_lag=2), []
    sampler.version = 7
    built.steps.published(7, 0)
    for step in (0, 1, 2, 3):
        if step == 3:
            sampler.version = 8  # one version on, three steps on
            built.steps.published(8, 3)
        with sampler.finishing():
            lags.append([rollout.group.trajectories[0].lags(step) for rollout in built.take(step, 9 - step)])
    assert lags == [[[0.0]] * BATCH, [[1.0]] * BATCH, [[2.0]] * BATCH, [[0.0]] * BATCH]


def test_what_cannot_be_used_in_time_is_not_sampled(sampler: Sampler) -> None:
    """The server's weights are a step old already: they are good for two steps where new ones were for three."""
    built = real(sampler, max_lag=2, every=2)
    built.steps.published(1, 4)
    sampler.taken(built.take(step=5, steps_left=9), *range(2 * BATCH))
    assert len(sampler.sent) == 2 * BATCH
    built.ahead(step=5, steps_left=8)
    assert len(sampler.sent) == 2 * BATCH


def test_what_is_due_is_waited_for_though_younger_groups_are_ready(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = schedule(sampler, max_lag=1)
    first, due, young = (range(BATCH * i, BATCH * (i + 1)) for i in range(3))
    sampler.version = 1
    assert sampler.taken(built.take(1, 9), *first) == [*first]
    sampler.version = 2
    built._send_next(BATCH)
    sampler.finish(*young)

    def finishes_only_what_is_waited_for(futures: list[Future[TrajectoryGroup]], **how: Any) -> Any:
        if not any(future.done() for future in futures):
            sampler.finish(next(number for number in due if number in sampler.in_flight))
        return wait(futures, **how)

    monkeypatch.setattr("trainer.rollouts.schedules.wait", finishes_only_what_is_waited_for)
    assert numbers(built.take(2, 8)) == [*due]
