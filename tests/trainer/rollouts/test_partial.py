"""Partial rollouts: a trajectory gets so many tokens in an iteration, and goes on in the next."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.trainer.rollouts.client import client
from tests.trainer.rollouts.generate_server import GenerateServer, serve
from tests.trainer.rollouts.sampler import AtOnce, Records, Sampler, everything, published
from trainer.config import CallableEnvironment, EvalConfig
from trainer.config.sections import AsyncSchedule, ColocatedSchedule, OneStepOffSchedule, ScheduleConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.rollouts.feed import Feed
from trainer.rollouts.sampling import ENVIRONMENT, RolloutSampler
from trainer.rollouts.schedules import Schedule, build_schedule
from trainer.routing import of_trajectory
from trainer.trajectory import (
    UNFINISHED,
    Outcome,
    Partial,
    StepsOfVersions,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    outcome_from_json,
)

PATIENCE_S = 60
BUDGET, MOST = 20, 64
HERE = "tests.trainer.environments.functions"


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[GenerateServer]:
    with serve(GenerateServer(tiny_model)) as running:
        running.fewest = 48  # answers of 48 to 64 tokens: three rounds or four
        yield running


def rollouts(server: GenerateServer, tokenizer: Tokenizer, environment: Any = None, **config: Any) -> RolloutSampler:
    return client(server.url, tokenizer, None, environment, **{"max_tokens": MOST, "token_budget": BUDGET, **config})


def on_disk(outcome: Outcome) -> Future[Outcome]:
    """As a checkpoint gives it back."""
    future: Future[Outcome] = Future()
    future.set_result(outcome_from_json(json.loads(json.dumps(outcome.to_json()))))
    return future


def in_rounds(
    running: RolloutSampler,
    record: Record,
    n: int,
    between: Callable[[], object] = lambda: None,
    begun: Outcome | None = None,
) -> list[Outcome]:
    """The outcome of each round, until the group is complete; of one that has `begun`, that and the others."""
    found: list[Outcome] = [begun or running.round(record, n, 5).result(PATIENCE_S)]
    while isinstance(found[-1], Partial):
        between()
        found.append(running.round(record, n, 5, on_disk(found[-1])).result(PATIENCE_S))
    return found


@pytest.mark.parametrize("request_by", ["sample", "group"])
def test_every_token_keeps_the_experts_of_the_pass_that_sampled_the_next(
    server: GenerateServer, tokenizer: Tokenizer, record: Record, monkeypatch: pytest.MonkeyPatch, request_by: str
) -> None:
    """Over rounds under several versions, and a stream that breaks off and is asked for again."""
    monkeypatch.setattr(server, "version", 1)
    monkeypatch.setattr(server, "break_after", [BUDGET // 2])
    with rollouts(server, tokenizer, request=request_by, routed_experts=True) as running:
        *_, group = in_rounds(running, record, 2, lambda: server.swap(server.version + 1))
    assert isinstance(group, TrajectoryGroup)
    for trajectory in group.trajectories:
        routing = of_trajectory(len(group.prompt_ids), trajectory)
        assert routing is not None
        places, versions = routing[:, 0].T.tolist()
        assert places == list(range(len(group.prompt_ids) + len(trajectory.token_ids) - 1))
        by_token = [span.version for span in trajectory.versions for _ in range(span.start, span.end)]
        assert versions[len(group.prompt_ids) - 1 :] == by_token
    with rollouts(server, tokenizer, request=request_by) as running:
        *_, plain = in_rounds(running, record, 2)
    assert isinstance(plain, TrajectoryGroup)
    assert {turn.routing for trajectory in plain.trajectories for turn in trajectory.turns} == {None}


@pytest.mark.parametrize("request_by", ["sample", "group"])
def test_no_token_is_lost_or_doubled_and_each_keeps_its_version(
    server: GenerateServer, tokenizer: Tokenizer, record: Record, monkeypatch: pytest.MonkeyPatch, request_by: str
) -> None:
    monkeypatch.setattr(server, "requests", [])
    versions = itertools.count(2)
    server.version = 1
    with rollouts(server, tokenizer, request=request_by) as running:
        *rounds, group = in_rounds(running, record, 3, lambda: server.swap(next(versions)))
        samples = running.stats()
    assert isinstance(group, TrajectoryGroup)
    assert len(rounds) >= 2
    for number, partial in enumerate(rounds, 1):
        assert isinstance(partial, Partial)
        for sample, whole in zip(partial.samples, group.trajectories, strict=True):
            assert sample is not None
            begun = sample.trajectory
            assert begun.finish_reason == UNFINISHED or sample.score is not None
            assert len(begun.token_ids) == len(begun.logprobs) == min(number * BUDGET, len(whole.token_ids))
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
            assert whole.logprobs[: len(begun.token_ids)] == begun.logprobs
    for whole in group.trajectories:
        assert len(whole.token_ids) >= 48
        ends = [*range(BUDGET, len(whole.token_ids), BUDGET), len(whole.token_ids)]
        spans = [VersionSpan(i + 1, i * BUDGET, end) for i, end in enumerate(ends)]
        assert whole.versions == tuple(spans), "a token belongs to the weights of its round"
    assert all(body["max_tokens"] <= BUDGET for body in server.requests)
    whole_answers = {group.prompt_ids + answer.token_ids for answer in group.trajectories}
    prompts = [tuple(body["prompt_token_ids"]) for body in server.requests]
    assert all(any(answer[: len(prompt)] == prompt for answer in whole_answers) for prompt in prompts)
    assert samples["generate_ms_mean"] > 0


def test_what_a_resumed_run_goes_on_with_is_what_the_other_has(
    server: GenerateServer, tokenizer: Tokenizer, record: Record
) -> None:
    """Seeds depend on the place in an answer, so that who asks for the rest does not matter."""
    with rollouts(server, tokenizer) as running:
        first = running.round(record, 2, 5)
        chained = running.round(record, 2, 5, running.round(record, 2, 5, running.round(record, 2, 5, first)))
        expected = chained.result(PATIENCE_S)
    with rollouts(server, tokenizer) as resumed:
        again = resumed.round(record, 2, 5, on_disk(first.result()))
        for _ in range(2):
            again = resumed.round(record, 2, 5, on_disk(again.result(PATIENCE_S)))
        assert again.result(PATIENCE_S) == expected
    assert isinstance(expected, TrajectoryGroup)


def test_what_is_complete_is_not_asked_for_again(
    server: GenerateServer, tokenizer: Tokenizer, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollouts(server, tokenizer) as running:
        *_, group = in_rounds(running, record, 2)
        monkeypatch.setattr(server, "requests", [])
        assert running.round(record, 2, 5, on_disk(group)).result(PATIENCE_S) == group
        assert running.round(record, 2, 5, running.round(record, 2, 5, on_disk(group))).result(PATIENCE_S) == group
    assert server.requests == []


def test_an_evaluation_has_no_budget(server: GenerateServer, tokenizer: Tokenizer, record: Record) -> None:
    with rollouts(server, tokenizer) as running:
        (greedy,), sampled = running.evaluate([record], EvalConfig()), running.submit(record, 2, 9).result(PATIENCE_S)
    assert all(len(t.token_ids) >= 48 for t in (*greedy.trajectories, *sampled.trajectories))


def countdown(**options: Any) -> CallableEnvironment:
    return CallableEnvironment(target=f"{HERE}:Countdown", workers=1, options=options, max_turns=20)


def episode(outcome: Outcome) -> Trajectory:
    trajectories = (
        outcome.trajectories
        if isinstance(outcome, TrajectoryGroup)
        else [sample.trajectory for sample in outcome.samples if sample is not None]
    )
    (only,) = trajectories
    return only


EPISODES = {"max_tokens": 400, "token_budget": 70}


def test_an_episode_waits_for_its_next_round(server: GenerateServer, tokenizer: Tokenizer, record: Record) -> None:
    with rollouts(server, tokenizer, countdown(), **EPISODES) as running:
        *rounds, whole = in_rounds(running, record, 1)
        stats = running.stats()
    assert len(rounds) >= 2
    assert isinstance(whole, TrajectoryGroup)
    assert whole.scores[0].parts[ENVIRONMENT] == 3, "no answer was given to the environment twice, and none left out"
    assert [turn.of_policy for turn in episode(whole).turns] == [True, False] * 2 + [True]
    for number, partial in enumerate(rounds, 1):
        assert episode(partial).policy_tokens == number * EPISODES["token_budget"]
        assert episode(whole).token_ids[: len(episode(partial).token_ids)] == episode(partial).token_ids
    assert "episodes_failed" not in stats
    assert "episodes_begun_anew" not in stats


def test_an_episode_that_is_lost_is_brought_back_by_its_recorded_answers(
    server: GenerateServer, tokenizer: Tokenizer, record: Record
) -> None:
    """By another trainer, and after the environment's process has died."""
    with rollouts(server, tokenizer, countdown(), **EPISODES) as running:
        *_, expected = in_rounds(running, record, 1)
        first = running.round(record, 1, 5).result(PATIENCE_S)
    with rollouts(server, tokenizer, countdown(), **EPISODES) as resumed:
        second = resumed.round(record, 1, 5, on_disk(first)).result(PATIENCE_S)
        assert len(episode(second).turns) > 2
        assert resumed._host is not None
        resumed._host._workers[0].kill()
        *_, whole = in_rounds(resumed, record, 1, begun=second)
        stats = resumed.stats()
    assert whole == expected
    assert "episodes_begun_anew" not in stats


def test_an_episode_that_goes_another_way_begins_anew(
    server: GenerateServer, tokenizer: Tokenizer, record: Record
) -> None:
    """An environment that does not say again what it said has no place where the trajectory could go on."""
    with rollouts(server, tokenizer, countdown(), **EPISODES) as running:
        first = running.round(record, 1, 5).result(PATIENCE_S)
    assert len(episode(first).turns) > 1
    with rollouts(server, tokenizer, countdown(turns=2), **EPISODES) as resumed:
        *_, whole = in_rounds(resumed, record, 1, begun=first)
        stats = resumed.stats()
    assert isinstance(whole, TrajectoryGroup)
    assert stats["episodes_begun_anew"] == 1
    assert whole.scores[0].parts[ENVIRONMENT] == 2


BATCH = 2
ROUNDS = 4


def schedule(config: ScheduleConfig, sampler: Sampler, keep: Any = everything) -> Schedule:
    return published(build_schedule(config, BATCH, Feed(Records(), 0), sampler, keep, rounds=ROUNDS), sampler)


def played(built: Schedule, sampler: Sampler, first: int, steps: int) -> list[list[tuple[int, list[int]]]]:
    """By step: the numbers of its groups, and who wrote their tokens. The weights change after each."""
    found = []
    for step in range(first, first + steps):
        sampler.version = step
        taken = list(built.take(step, 99 - step))
        built.ahead(step, 98 - step)
        found.append([(r.draw.number, [s.version for s in r.group.trajectories[0].versions]) for r in taken])
    return found


@pytest.mark.parametrize(
    ("config", "least"),
    [(ColocatedSchedule(), 2), (OneStepOffSchedule(), 2), (AsyncSchedule(max_lag=1), 3)],
    ids=["colocated", "one-step-off", "async"],
)
def test_a_step_waits_for_a_round_and_not_for_a_trajectory(config: ScheduleConfig, least: int) -> None:
    """Group 0 gets a round in each iteration, and one more where a step lacks a group. Under the asynchronous schedule
    it is over the deadline of its first weights, and goes on under newer ones."""
    sampler = AtOnce({0: 4})
    built = schedule(config, sampler)
    steps = played(built, sampler, 0, 6)
    (place,) = [i for i, step in enumerate(steps) if 0 in [number for number, _ in step]]
    assert place >= least
    (versions,) = [versions for step in steps for number, versions in step if number == 0]
    assert len(set(versions)) >= 2
    assert built.stats()["stale_groups"] == 0


def test_tokens_over_the_bound_are_read_and_not_trained_on() -> None:
    sampler = AtOnce({0: 4})
    built = schedule(AsyncSchedule(max_lag=1), sampler)
    for step in range(8):
        sampler.version = step
        for rollout in built.take(step, 99 - step):
            for trajectory in rollout.group.trajectories:
                lags = trajectory.lags(step)
                assert all((mask == 1) == (lag <= 1) for mask, lag in zip(trajectory.mask, lags, strict=True))
                assert sum(trajectory.mask) >= 1
                if rollout.draw.number == 0:
                    assert 0 < sum(trajectory.mask) < len(trajectory.token_ids) == 4
                    return
        built.ahead(step, 98 - step)
    pytest.fail("group 0 was never finished")


def test_a_group_of_which_nothing_is_young_enough_is_sampled_again() -> None:
    sampler = AtOnce({2: 2})
    built = schedule(AsyncSchedule(max_lag=1), sampler)
    list(built.take(0, 99))
    built.ahead(0, 98)
    sampler.version = 7  # versions were skipped
    rollouts = list(built.take(7, 92))
    assert all(rollout.group.oldest == 7 for rollout in rollouts)
    assert built.stats()["stale_groups"] >= 1


def test_only_a_prefix_is_left_out_and_the_rest_counts() -> None:
    steps = StepsOfVersions()
    for version, step in ((1, 10), (2, 11), (3, 14)):
        steps.published(version, step)
    sampler = AtOnce({0: 3})
    draws, versions = Feed(Records(), 0).draw(1), (1, 2, 3)
    future: Future[Outcome] | None = None
    for sampler.version in versions:
        future = sampler(draws[0], future)
    assert future is not None
    group = future.result()
    assert isinstance(group, TrajectoryGroup)
    dated = group.dated(steps).within(14, 3)
    assert [trajectory.mask for trajectory in dated.trajectories] == [(0, 1, 1)] * 2
    assert dated.rewards == group.rewards
    assert dated.within(14, 4).trajectories[0].mask == (1, 1, 1)
    assert group.dated(steps).within(20, 3).trajectories[0].mask == (0, 0, 0)


def begun(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in state["pending"] if entry["group"] is not None]


LONG = {0: 4, 3: 2, 4: 3, 9: 4, 10: 2, 15: 3, 22: 4, 23: 4, 24: 4, 30: 2}


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "config", [ColocatedSchedule(), OneStepOffSchedule(), OneStepOffSchedule(oversample=2.0)], ids=lambda c: c.name
)
def test_a_resumed_run_takes_the_same_groups(config: ScheduleConfig, stop: int) -> None:
    """Also where rounds were in flight when the checkpoint was taken: they are sampled again, as often as it needs."""
    through = AtOnce(LONG)
    expected = [[number for number, _ in step] for step in played(schedule(config, through), through, 0, 12)]
    before = AtOnce(LONG)
    first = schedule(config, before)
    found = played(first, before, 0, stop - 1)
    before.version = stop - 1
    found.append([(rollout.draw.number, []) for rollout in first.take(stop - 1, 100 - stop)])
    before.slow = tuple(LONG)
    first.ahead(stop - 1, 99 - stop)
    saved = json.loads(json.dumps(first.state_dict()))

    after = AtOnce(LONG)
    resumed = schedule(config, after)
    resumed.load_state_dict(saved)
    assert after.sent == [], "the server has not got its weights yet"
    assert begun(json.loads(json.dumps(resumed.state_dict()))) == begun(saved), "to the last log-prob"
    found += played(resumed, after, stop, 12 - stop)
    assert [[number for number, _ in step] for step in found] == expected
    assert not {entry["number"] for entry in begun(saved)} & {draw.number for draw in after.sent}, (
        "what was begun goes on, and does not begin again"
    )


@pytest.mark.parametrize("config", [ColocatedSchedule(), OneStepOffSchedule(), AsyncSchedule(max_lag=2)])
def test_every_record_is_used_once_whatever_is_long(config: ScheduleConfig) -> None:
    sampler = AtOnce({number: 1 + number % 4 for number in range(0, 400, 3)})
    built = schedule(config, sampler)
    used = [number for step in played(built, sampler, 0, 60) for number, _ in step]
    assert len(used) == len(set(used)) == 60 * BATCH
    left = {pending.draw.number for pending in built.pending}
    assert set(used) | left == set(range(built.feed.drawn))
    assert not set(used) & left
    assert len(left) <= 6 * BATCH, "no more is under way than is needed"


@pytest.mark.parametrize("config", [ColocatedSchedule(), OneStepOffSchedule(), AsyncSchedule(max_lag=2)])
def test_what_was_begun_is_finished_without_a_budget_too(config: ScheduleConfig) -> None:
    """The budget was left out when the run was resumed: then a trajectory's next round is its last."""
    before = AtOnce({0: 4})
    first = schedule(config, before)
    list(first.take(0, 99))
    saved = json.loads(json.dumps(first.state_dict()))
    (entry,) = [entry for entry in begun(saved) if "samples" in entry["group"]]
    assert entry["number"] == 0
    written = len(entry["group"]["samples"][0]["trajectory"]["turns"][0]["token_ids"])
    after = AtOnce({0: written + 1})
    whole = published(build_schedule(config, BATCH, Feed(Records(), 0), after, everything), after)
    whole.load_state_dict(saved)
    taken = [number for step in played(whole, after, 1, 3) for number, _ in step]
    assert 0 in taken
    assert 0 not in [draw.number for draw in after.sent]


def test_unfinished_groups_are_counted() -> None:
    sampler = AtOnce({0: 4})
    built = schedule(ColocatedSchedule(), sampler)
    assert next(built.take(0, 9)).draw.number == 1
    assert built.stats()["groups_unfinished"] == 1
