"""Colocated and one-step-off: order, what is sampled when, refills, and what a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.rollouts.sampler import AtOnce, Keep, Records, Sampler, everything, numbers, published, useful
from trainer.config.sections import AsyncSchedule, ColocatedSchedule, OneStepOffSchedule
from trainer.errors import RolloutError
from trainer.rollouts.feed import Feed
from trainer.rollouts.schedules import Schedule, build_schedule


@pytest.fixture
def sampler() -> Sampler:
    return Sampler()


def colocated(sampler: Sampler, keep: Keep = everything, refills: int = 3) -> Schedule:
    built = build_schedule(ColocatedSchedule(max_refills=refills), 4, Feed(Records(), 0), sampler, keep)
    return published(built, sampler)


def one_step_off(sampler: Sampler) -> Schedule:
    return published(build_schedule(OneStepOffSchedule(), 4, Feed(Records(), 0), sampler, everything), sampler)


def test_a_step_gets_its_batch_in_the_order_it_was_drawn(sampler: Sampler) -> None:
    schedule = colocated(sampler)
    assert sampler.taken(schedule.take(step=1, steps_left=2), 3, 1, 2, 0) == [0, 1, 2, 3]
    schedule.ahead(step=1, steps_left=1)
    assert sampler.in_flight == []  # training has the machine to itself


def test_groups_that_teach_nothing_are_replaced(sampler: Sampler) -> None:
    schedule = colocated(sampler, useful)
    taking = schedule.take(step=1, steps_left=1)
    sampler.soon(lambda: (sampler.finish(0, 2, rewards=(1.0, 1.0)), sampler.finish(1, 3)))
    assert next(taking).draw.number == 1
    assert next(taking).draw.number == 3
    assert sampler.in_flight == [4, 5]
    sampler.finish(4, 5)
    assert numbers(taking) == [4, 5]
    assert schedule.stats()["filtered_groups"] == 2
    assert schedule.stats()["filtered_groups"] == 0  # since the last call


def test_refills_are_bounded_and_the_step_is_whole_all_the_same(sampler: Sampler) -> None:
    schedule = colocated(sampler, useful, refills=1)
    with sampler.finishing(rewards=(0.0, 0.0)):
        assert numbers(schedule.take(step=1, steps_left=1)) == [4, 5, 6, 7]
    assert len(sampler.sent) == 8  # a batch, and one more batch for those sent back


def test_the_next_batch_is_sampled_while_this_one_trains(sampler: Sampler) -> None:
    sampler.version = 1
    schedule = one_step_off(sampler)
    assert sampler.taken(schedule.take(step=1, steps_left=3), 0, 1, 2, 3) == [0, 1, 2, 3]
    schedule.ahead(step=1, steps_left=2)
    assert sampler.in_flight == [4, 5, 6, 7]
    sampler.finish(4, 5, 6, 7)
    assert numbers(schedule.take(step=2, steps_left=2)) == [4, 5, 6, 7]
    sampler.version = 2
    schedule.ahead(step=2, steps_left=1)
    sampler.finish(8, 9, 10, 11)
    assert numbers(schedule.take(step=3, steps_left=1)) == [8, 9, 10, 11]
    schedule.ahead(step=3, steps_left=0)
    assert sampler.in_flight == []  # nothing that no step will use


def test_what_sampling_raises_reaches_the_step(sampler: Sampler) -> None:
    taking = colocated(sampler).take(step=1, steps_left=1)
    sampler.soon(lambda: sampler.fail(0, RolloutError("refused")))
    with pytest.raises(RolloutError, match="refused"):
        next(taking)


def test_a_checkpoint_keeps_what_is_finished_and_repeats_what_was_in_flight(sampler: Sampler) -> None:
    sampler.version = 1
    schedule = one_step_off(sampler)
    sampler.taken(schedule.take(step=1, steps_left=3), 0, 1, 2, 3)
    schedule.ahead(step=1, steps_left=2)
    sampler.finish(5)
    saved = json.loads(json.dumps(schedule.state_dict()))

    after = Sampler()
    after.version = 1
    resumed = one_step_off(after)
    resumed.load_state_dict(saved)
    assert after.sent == []  # the server has not got its weights yet
    taking = resumed.take(step=2, steps_left=2)
    after.soon(lambda: after.finish(4, 6, 7))
    theirs = list(taking)
    assert [draw.number for draw in after.sent] == [4, 6, 7]
    assert [draw.record for draw in after.sent] == [draw.record for draw in sampler.sent if draw.number in (4, 6, 7)]
    sampler.finish(4, 6, 7)
    assert list(schedule.take(step=2, steps_left=2)) == theirs
    assert [rollout.draw.number for rollout in theirs] == [4, 5, 6, 7]
    resumed.ahead(step=2, steps_left=1)
    assert after.in_flight == [8, 9, 10, 11]


def left_by_an_asynchronous_run() -> dict[str, Any]:
    """Its state after a step at version 2: of 12 groups 4 are used, 6 are finished and 2 in flight."""
    before = AtOnce(version=2, slow=(10, 11))
    schedule = published(build_schedule(AsyncSchedule(max_lag=2), 4, Feed(Records(), 0), before, everything), before)
    assert numbers(schedule.take(step=2, steps_left=9)) == [0, 1, 2, 3]
    state: dict[str, Any] = json.loads(json.dumps(schedule.state_dict()))
    return state


@pytest.mark.parametrize(
    ("make", "most", "sent"),
    [(colocated, 0, [0, 4, 8]), (one_step_off, 1, [2, 6, 6])],
    ids=["colocated", "one step off"],
)
def test_the_bound_holds_for_what_an_asynchronous_run_has_left(
    make: Callable[[Sampler], Schedule], most: int, sent: list[int]
) -> None:
    server = AtOnce()
    schedule, used, lags = make(server), list[int](), list[int]()
    schedule.load_state_dict(left_by_an_asynchronous_run())
    for version in (2, 3, 4):
        server.version = version
        for rollout in schedule.take(version, steps_left=5 - version):
            used.append(rollout.draw.number)
            lags.append(version - (rollout.group.oldest or 0))
        schedule.ahead(version, steps_left=4 - version)
        assert len(server.sent) == sent[version - 2], "what the next step needs, and no more"
    assert used == list(range(4, 16))
    assert max(lags) == most


def test_a_batch_that_is_too_old_since_versions_were_skipped_is_sampled_again() -> None:
    server = AtOnce()
    schedule = one_step_off(server)
    numbers(schedule.take(step=0, steps_left=2))
    schedule.ahead(step=0, steps_left=1)
    server.version = 2  # 1 could not be published
    rollouts = list(schedule.take(step=2, steps_left=1))
    assert [rollout.group.oldest for rollout in rollouts] == [2] * 4
    assert [rollout.draw.number for rollout in rollouts] == [4, 5, 6, 7]
    assert schedule.stats()["stale_groups"] == 4


def one_in_three(number: int) -> bool:
    return number % 3 == 0


def by_turns(number: int) -> bool:
    """Eight that are of no use, then eight that are."""
    return number // 8 % 2 == 1


def filtered(server: Sampler, oversample: float, refills: int = 9) -> Schedule:
    config = ColocatedSchedule(max_refills=refills, oversample=oversample)
    return published(build_schedule(config, 4, Feed(Records(), 0), server, useful), server)


def test_as_many_are_sampled_at_once_as_the_share_of_useful_ones_asks_for() -> None:
    """One group in three is of use. A wave of refills is what stood in line when it was looked at last."""
    waves = {}
    for oversample in (0.0, 2.0):
        server, used, asked = AtOnce(teaches=one_in_three), list[int](), list[int]()
        schedule = filtered(server, oversample)
        for server.version in range(6):
            before = len(server.sent)
            taking = schedule.take(server.version, 99)
            first = next(taking)
            asked.append(len(server.sent) - before)
            used += [first.draw.number, *numbers(taking)]
        assert used == list(range(0, 3 * 24, 3)), "every group that is of use, in order, and each once"
        waves[oversample] = asked
    assert waves[0.0][1:] == [6] * 5, "a batch, and one for each that was sent back before the first was found"
    assert all(wave >= 8 for wave in waves[2.0][2:]), "those of the step before are used beside them"


def test_what_is_left_over_is_used_in_the_next_step_and_no_more_than_allowed_is() -> None:
    server, lags, used = AtOnce(teaches=by_turns), list[int](), list[int]()
    schedule = filtered(server, 1.0)
    for server.version in range(12):
        for rollout in schedule.take(server.version, 99):
            lags.append(server.version - (rollout.group.oldest or 0))
            used.append(rollout.draw.number)
        assert len(schedule.pending) <= 4
    assert used == [number for number in range(used[-1] + 1) if by_turns(number)]
    assert schedule.stats()["stale_groups"] == 0
    assert max(lags) == 1


def test_nothing_is_oversampled_for_the_last_step() -> None:
    server = AtOnce(teaches=one_in_three)
    schedule = filtered(server, 2.0)
    for server.version in range(4):
        list(schedule.take(server.version, 4 - server.version))
    assert schedule.pending == []


def stepped(schedule: Schedule, server: Sampler, versions: range) -> list[tuple[list[int], int]]:
    """By step: the groups that it took, and how many were drawn by then."""
    found = []
    for server.version in versions:
        found.append((numbers(schedule.take(server.version, 99)), schedule.feed.drawn))
    return found


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_oversampling_goes_on_where_it_stood(stop: int) -> None:
    through, before, after = (AtOnce(teaches=by_turns) for _ in range(3))
    expected = stepped(filtered(through, 1.0), through, range(8))
    stopped, resumed = filtered(before, 1.0), filtered(after, 1.0)
    found = stepped(stopped, before, range(stop))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert found + stepped(resumed, after, range(stop, 8)) == expected
