"""The client of `/generate`: what it sends, what it makes of answers, what it retries and for how long."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from tests.trainer.rollouts.client import client, records
from tests.trainer.rollouts.generate_server import GenerateServer, serve_app
from trainer.config import EvalConfig, ExactMatchReward, GatewayConfig, RegexReward, RolloutConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, RolloutError
from trainer.rewards import Reward, RewardRequest, Scorer, Weighted, build_scorer
from trainer.rollouts.generate import repeats
from trainer.rollouts.sampling import RolloutSampler
from trainer.trajectory import TrajectoryGroup, VersionSpan


def take(running: RolloutSampler, problems: list[Record], n: int, first: int = 0) -> list[TrajectoryGroup]:
    """`n` samples for each problem; the problems are the run's records number `first` and on."""
    futures = [running.submit(problem, n, first + i) for i, problem in enumerate(problems)]
    return [future.result(timeout=60) for future in futures]


def test_samples_come_back_in_order_with_logprobs_and_versions(server: GenerateServer, tokenizer: Tokenizer) -> None:
    server.version = 7
    problems = records(tokenizer, "1+2=", "3+4=", "5+5=")
    with client(server.url, tokenizer, max_tokens=4) as running:
        groups = take(running, problems, 5)
    assert [group.prompt_ids for group in groups] == [record.prompt_ids for record in problems]
    for group in groups:
        assert len(group.trajectories) == len(group.scores) == 5
        for sample in group.trajectories:
            assert len(sample.logprobs) == len(sample.token_ids) <= 4
            assert all(logprob <= 0 for logprob in sample.logprobs)
            assert sample.versions == (VersionSpan(7, 0, len(sample.token_ids)),)


def test_an_adapter_is_asked_for_by_name_until_an_instance_has_it(server: GenerateServer, tokenizer: Tokenizer) -> None:
    """The commit record of its first version is there a moment before the instances have it."""
    server.failures, server.code = [404, 404], "model_not_found"
    with client(server.url, tokenizer, model="sums") as running:
        take(running, records(tokenizer, "1+2="), 1)
        assert server.requests[-1]["model"] == "sums"
        running.evaluate(records(tokenizer, "3+4="), EvalConfig())
    assert server.requests[-1]["model"] == "sums"
    assert server.failures == []
    server.failures, server.code = [404], "test"
    with client(server.url, tokenizer) as running, pytest.raises(RolloutError, match="404"):
        take(running, records(tokenizer, "1+2="), 1)
    assert "model" not in server.requests[-1]


def test_the_request_is_tokens_in_tokens_out(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with client(server.url, tokenizer, max_tokens=3, request="group", on_swap="recompute", seeded=False) as running:
        take(running, records(tokenizer, "1+2="), 2)
    body = server.requests[-1]
    assert body["prompt_token_ids"] == list(tokenizer.prompt("1+2="))
    assert (body["n"], body["max_tokens"], body["temperature"], body["logprobs"]) == (2, 3, 1.0, True)
    assert not {"prompt", "seed"} & body.keys()
    assert body["hotswap"] == {"policy": "recompute"}


def test_samples_are_asked_for_one_by_one_or_a_group_at_once(server: GenerateServer, tokenizer: Tokenizer) -> None:
    problems = records(tokenizer, "1+2=")
    with client(server.url, tokenizer, request="group") as running:
        take(running, problems, 4)
        assert server.requests[-1]["n"] == 4
        base = server.requests[-1]["seed"]
    with client(server.url, tokenizer, request="sample") as running:
        (group,) = take(running, problems, 4)
    alone = server.requests[-4:]
    assert [body["n"] for body in alone] == [1] * 4
    assert sorted(body["seed"] for body in alone) == [base, base + 1, base + 2, base + 3]  # as an engine would
    assert len({answer.token_ids for answer in group.trajectories}) > 1


def test_seeds_repeat_by_record_and_differ_between_records(server: GenerateServer, tokenizer: Tokenizer) -> None:
    problems = records(tokenizer, "1+2=", "3+4=")
    with client(server.url, tokenizer) as running:
        first, again, other = (take(running, problems, 4, first) for first in (1, 1, 9))
    assert first == again
    assert first != other


def test_greedy_is_one_sample_at_temperature_zero(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with client(server.url, tokenizer) as running:
        first, again = (running.evaluate(records(tokenizer, "1+2="), EvalConfig()) for _ in range(2))
    assert first == again
    assert (server.requests[-1]["n"], server.requests[-1]["temperature"]) == (1, 0.0)


def test_an_evaluation_has_its_own_temperature_top_p_and_rewards_and_the_same_seeds_each_time(
    server: GenerateServer, tokenizer: Tokenizer
) -> None:
    config = EvalConfig(samples=3, temperature=0.6, top_p=0.9)
    before = len(server.requests)
    own = build_scorer([RegexReward(pattern="x*")])
    problems = records(tokenizer, "1+2=", "3+4=")
    with closing(own), client(server.url, tokenizer, request="group") as running:
        first, again = (running.evaluate(problems, config, own) for _ in range(2))
        trained = take(running, problems, 3)
    assert first == again
    assert [set(score.parts) for group in first for score in group.scores] == [{"regex"}] * 6
    assert {name for group in trained for score in group.scores for name in score.parts} == {"exact_match"}
    asked = server.requests[before : before + 4]
    assert [(body["n"], body["temperature"], body["top_p"]) for body in asked] == [(3, 0.6, 0.9)] * 4
    seeds = [body["seed"] for body in server.requests[before:]]
    assert len(set(seeds)) == 4, "two prompts to evaluate, and two to train on, which have other seeds"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_retried(server: GenerateServer, tokenizer: Tokenizer, status: int) -> None:
    server.failures = [status, status]
    with client(server.url, tokenizer) as running:
        assert len(take(running, records(tokenizer, "1+2="), 2)) == 1
    assert server.failures == []


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_retried_and_says_why(server: GenerateServer, tokenizer: Tokenizer, status: int) -> None:
    server.failures = [status, 500]
    with (
        client(server.url, tokenizer, request="group") as running,
        pytest.raises(RolloutError, match=f"made to fail with {status}") as error,
    ):
        take(running, records(tokenizer, "1+2="), 2)
    assert error.value.status == status
    assert server.failures == [500]
    server.failures = []


def test_an_answer_that_a_swap_did_not_wait_for_is_asked_for_again(
    server: GenerateServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `on_swap: finish` an answer that is longer than the swap waits ends with 409 `weights_changed`. Nothing is
    wrong then, however often it happens; other conflicts are refusals."""
    server.failures = [409, 409, 409]
    monkeypatch.setattr(server, "code", "weights_changed")
    with client(server.url, tokenizer, retry_s=0.05, on_swap="finish") as running:
        assert len(take(running, records(tokenizer, "1+2="), 1)) == 1
    assert server.failures == []
    monkeypatch.setattr(server, "code", "version_unavailable")
    server.failures = [409]
    with client(server.url, tokenizer, on_swap="finish") as running, pytest.raises(RolloutError) as error:
        take(running, records(tokenizer, "1+2="), 1)
    assert error.value.status == 409


@pytest.mark.parametrize("path", ["/json", "/broken"])
def test_another_server_is_told_from_a_broken_one(tokenizer: Tokenizer, path: str) -> None:
    other = FastAPI()
    other.post("/json/generate")(lambda: {"choices": []})
    other.post("/broken/generate")(
        lambda: Response('event: token\ndata: {"text": "4"}\n\n', media_type="text/event-stream")
    )
    with (
        serve_app(other) as url,
        client(url + path, tokenizer, retry_s=60) as running,
        pytest.raises(RolloutError, match="Is this hotswap"),
    ):
        take(running, records(tokenizer, "1+2="), 1)


def test_what_repeats_itself_is_told_from_what_does_not() -> None:
    assert repeats([1, 2, 3] * 8, 24)
    assert repeats([5] * 16, 16)
    assert repeats([*([1, 2] * 8), 1], 17), "the last passage may be cut off"
    assert not repeats([1, 2, 3] * 7 + [1, 2, 4], 24)
    assert not repeats([1, 2, 3, 4] * 6, 24), "six times is no circle"
    assert not repeats([5] * 15, 16), "too few tokens to tell"


@pytest.mark.parametrize("request_by", ["sample", "group"])
def test_an_answer_that_goes_round_in_circles_is_ended(tokenizer: Tokenizer, request_by: str) -> None:
    """The server would go on for ever; it sees its client leave."""
    left, endless = threading.Event(), FastAPI()

    async def events(choices: int) -> AsyncIterator[str]:
        try:
            for number in itertools.count():
                for index in range(choices):
                    tokens = [number] * 4 if index == 0 and number < 10 else [7, 8, 7, 8]
                    event = {"index": index, "token_ids": tokens, "logprobs": [-1.0] * 4, "weight_version": 1}
                    yield f"event: token\ndata: {json.dumps(event)}\n\n"
                await asyncio.sleep(0)
        finally:
            left.set()

    async def generate(request: Request) -> StreamingResponse:
        return StreamingResponse(events((await request.json())["n"]), media_type="text/event-stream")

    endless.post("/generate")(generate)
    with serve_app(endless) as url:
        with client(url, tokenizer, max_tokens=10**6, request=request_by, stop_repeats=32) as running:
            (group,) = take(running, records(tokenizer, "1+2="), 2)
        assert left.wait(60)
    for answer in group.trajectories:
        assert (answer.finish_reason, answer.truncated) == ("repeat", True)
        assert answer.token_ids[-32:] == (7, 8) * 16
        assert len(answer.token_ids) < 100


def test_nobody_there_is_reported_within_the_budget(tokenizer: Tokenizer) -> None:
    began = time.monotonic()
    running = client("http://127.0.0.1:9", tokenizer, retry_s=0.3)
    with running, pytest.raises(RolloutError, match="hotswap up"):
        take(running, records(tokenizer, "1+2="), 2)
    assert time.monotonic() - began < 20  # it gave up at all


def test_the_key_is_sent_and_must_be_set(
    server: GenerateServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = GatewayConfig(url=server.url, api_key_env="ROLLOUT_KEY")
    arguments = (RolloutConfig(max_tokens=16), build_scorer([ExactMatchReward()]), tokenizer, 0)
    with pytest.raises(ConfigError, match="ROLLOUT_KEY"):
        RolloutSampler(gateway, *arguments)
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    with RolloutSampler(gateway, *arguments) as running:
        running.evaluate(records(tokenizer, "1+2="), EvalConfig())
    assert server.headers[-1]["authorization"] == "Bearer secret"


def test_a_failing_reward_is_counted_and_the_rollout_goes_on(server: GenerateServer, tokenizer: Tokenizer) -> None:
    class Broken(Reward):
        async def __call__(self, request: RewardRequest, /) -> float:
            raise ZeroDivisionError

    scorer = Scorer({"broken": Weighted(Broken(), on_failure=-1.0)})
    with client(server.url, tokenizer, scorer) as running:
        groups = take(running, records(tokenizer, "1+2=", "3+4="), 2)
        assert running.stats()["reward_failures/broken"] == 4
    assert [group.rewards for group in groups] == [[-1.0, -1.0]] * 2
    assert all("ZeroDivisionError" in score.failures["broken"] for group in groups for score in group.scores)


def test_a_finished_sample_is_scored_while_others_decode(
    server: GenerateServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes no second answer before the first one has its score."""
    scored = []

    class Watching(Reward):
        async def __call__(self, request: RewardRequest, /) -> float:
            scored.append(request)
            return 0.0

    scorer, before = Scorer({"watching": Weighted(Watching())}), server.answered
    monkeypatch.setattr(server, "ready", lambda: server.answered == before or bool(scored))
    with client(server.url, tokenizer, scorer) as running:
        take(running, records(tokenizer, "1+2="), 16)
    assert server.answered == before + 16


@pytest.mark.parametrize("cut", [False, True], ids=["error", "cut"])
@pytest.mark.parametrize("request_by", ["sample", "group"])
def test_what_a_stream_brought_is_kept_when_it_breaks(
    server: GenerateServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, cut: bool, request_by: str
) -> None:
    """The rest is asked for, of the weights that are there then; every token has its log-prob and its version."""
    monkeypatch.setattr(server, "cut", cut)
    monkeypatch.setattr(server, "fewest", 48)
    monkeypatch.setattr(server, "break_after", [40] if request_by == "group" else [40, 40])
    monkeypatch.setattr(server, "requests", [])
    monkeypatch.setattr(server, "ready", lambda: server.requests[-1]["max_tokens"] == 64 or server.swap(4))
    server.version = 3
    with client(server.url, tokenizer, max_tokens=64, request=request_by) as running:
        (group,) = take(running, records(tokenizer, "1+2="), 2)
    first, *_, last = server.requests
    assert first["max_tokens"] == 64
    assert last["max_tokens"] < 64
    for answer in group.trajectories:
        assert len(answer.token_ids) == len(answer.logprobs) >= 48
        assert answer.versions[0].start == 0
        assert answer.versions[-1].end == len(answer.token_ids)
        assert all(one.end == other.start for one, other in itertools.pairwise(answer.versions))
        assert {span.version for span in answer.versions} == {3, 4}
    kept = [tuple(body["prompt_token_ids"]) for body in server.requests if body["max_tokens"] < 64]
    whole = [group.prompt_ids + answer.token_ids for answer in group.trajectories]
    assert kept
    assert all(any(answer[: len(begun)] == begun for answer in whole) for begun in kept)


def test_leaving_cancels_what_is_in_flight(server: GenerateServer, tokenizer: Tokenizer) -> None:
    running = client(server.url, tokenizer)
    server.failures = [503] * 100  # would be retried for seconds
    started = running.submit(records(tokenizer, "1+2=")[0], 4, 0)
    running.close()
    server.failures = []
    assert started.cancelled()
