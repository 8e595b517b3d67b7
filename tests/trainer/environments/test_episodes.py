"""Episodes through a model: turns, tokens and rewards; and what becomes of environments that fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollouts.generate_server import GenerateServer
from trainer.config import (
    CallableEnvironment,
    ExactMatchReward,
    FunctionTool,
    GatewayConfig,
    RolloutConfig,
    ToolsEnvironment,
)
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.environments import EnvironmentHost, Episode, Observation, Task
from trainer.errors import ConfigError, EnvironmentFailed, EpisodeInterrupted, RolloutError
from trainer.rewards import Reward, RewardRequest, Scorer, Weighted, build_scorer
from trainer.rollouts.sampling import ENVIRONMENT, RolloutSampler
from trainer.trajectory import TrajectoryGroup
from trainer.worker_process import WorkerProcess

HERE = "tests.trainer.environments.functions"


def rollouts(
    server: GenerateServer, tokenizer: Tokenizer, options: dict[str, Any], scorer: Scorer | None = None, **config: Any
) -> RolloutSampler:
    environment = CallableEnvironment(**{"target": f"{HERE}:Countdown", "workers": 1, **config, "options": options})
    scorer = scorer or build_scorer([ExactMatchReward()])
    return RolloutSampler(
        GatewayConfig(url=server.url), RolloutConfig(max_tokens=64), scorer, tokenizer, 3, environment
    )


def play(running: RolloutSampler, tokenizer: Tokenizer, n: int = 2) -> TrajectoryGroup:
    return running.submit(Record(0, "1+2=", "03", tokenizer.prompt("1+2="), ()), n, 0).result(timeout=120)


def test_an_episode_is_one_trajectory(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with rollouts(server, tokenizer, {}) as running:
        group = play(running, tokenizer, 3)
    assert group.prompt_ids == tokenizer.prompt("1+2=")
    for trajectory, score in zip(group.trajectories, group.scores, strict=True):
        assert [turn.of_policy for turn in trajectory.turns] == [True, False] * 2 + [True]
        assert [tokenizer.decode(turn.token_ids) for turn in trajectory.turns[1::2]] == ["2+", "1+"]
        assert [turn.reward for turn in trajectory.turns] == [1, 0, 1, 0, 1]
        assert score.parts[ENVIRONMENT] == 3
        assert score.total == 3 + score.parts["exact_match"]
    for body in server.requests[-3:]:
        assert body["max_tokens"] < 64, "the turns before count"
    prompts = [tuple(body["prompt_token_ids"]) for body in server.requests]
    whole = {group.prompt_ids + t.token_ids for t in group.trajectories}
    assert all(any(w[: len(p)] == p for w in whole) for p in prompts[-9:]), "nothing is tokenised a second time"


def test_a_weight_goes_into_the_reward_of_each_turn(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with rollouts(server, tokenizer, {}, weight=0.5) as running:
        group = play(running, tokenizer, 1)
    (trajectory,), (score,) = group.trajectories, group.scores
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0, 0.5, 0, 0.5]
    assert score.parts[ENVIRONMENT] == 3
    assert score.total == 1.5 + score.parts["exact_match"]
    by_token = [reward for reward in trajectory.rewards(score.total) if reward]
    assert by_token == [0.5, 0.5, 0.5 + score.parts["exact_match"]]


def test_turns_and_tokens_are_bounded(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with rollouts(server, tokenizer, {"turns": 9}, max_turns=2) as running:
        (cut,) = play(running, tokenizer, 1).trajectories
    assert len(cut.turns) == 3
    assert cut.truncated
    with rollouts(server, tokenizer, {"turns": 1000}, max_turns=1000) as running:
        (cut,) = play(running, tokenizer, 1).trajectories
    assert cut.truncated
    assert cut.turns[-1].of_policy
    assert len(cut.token_ids) <= 64


def test_a_flood_is_cut(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with rollouts(server, tokenizer, {"how": "flood"}, max_observation_tokens=5) as running:
        (trajectory,) = play(running, tokenizer, 1).trajectories
    assert all(len(turn.token_ids) <= 5 + 8 for turn in trajectory.turns if not turn.of_policy)


@pytest.mark.parametrize("how", ["raise", "hang", "die", "nonsense", "no text", "no number"])
def test_an_episode_that_failed_is_played_again(
    server: GenerateServer, tokenizer: Tokenizer, tmp_path: Path, how: str
) -> None:
    with rollouts(server, tokenizer, {"how": how, "marker": str(tmp_path / "was here")}, timeout_s=1.0) as running:
        group = play(running, tokenizer, 1)
        assert running.stats()["episodes_failed"] == 1
    assert group.scores[0].parts[ENVIRONMENT] == 3


@pytest.mark.parametrize("how", ["raise", "die"])
def test_one_that_fails_again_and_again_is_left_out(server: GenerateServer, tokenizer: Tokenizer, how: str) -> None:
    with rollouts(server, tokenizer, {"how": how}) as running:
        group = play(running, tokenizer, 2)
        stats = running.stats()
    assert (group.trajectories, group.scores) == ((), ())
    assert (stats["episodes_failed"], stats["episodes_left_out"]) == (4, 2)
    assert stats["groups_lost"] == 1


async def test_one_that_hangs_costs_the_others_of_its_process_nothing() -> None:
    host = EnvironmentHost(CallableEnvironment(target=f"{HERE}:Obedient", workers=1))
    hurried = EnvironmentHost(replace(host.config, timeout_s=1.0))
    await host.open()
    try:
        (hanging, _), (waiting, _), (asking, _) = [await host.begin(Task("", [])) for _ in range(3)]
        hanging.host = hurried  # it is the first whose time is up
        asked = asyncio.create_task(asking.step("hang"))
        with pytest.raises(EnvironmentFailed, match="over 1 s for a step; killed") as failed:
            await hanging.step("hang")
        assert not isinstance(failed.value, EpisodeInterrupted)
        with pytest.raises(EpisodeInterrupted, match="another episode hangs"):
            await asked
        with pytest.raises(EpisodeInterrupted, match="while it waited"):
            await waiting.step("go on")
        dying, _ = await host.begin(Task("", []))
        with pytest.raises(EnvironmentFailed, match="status 3") as failed:
            await dying.step("die")
        assert not isinstance(failed.value, EpisodeInterrupted)
    finally:
        await host.close()


def test_an_interrupted_episode_is_played_again_for_free(
    server: GenerateServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, interruptions = Episode.step, iter(range(3))

    async def interrupted(self: Episode, answer: str) -> Observation:
        if next(interruptions, None) is not None:
            raise EpisodeInterrupted("of another's sake")
        return await step(self, answer)

    monkeypatch.setattr(Episode, "step", interrupted)
    with rollouts(server, tokenizer, {}, attempts=1) as running:
        assert play(running, tokenizer, 1).scores[0].parts[ENVIRONMENT] == 3
        stats = running.stats()
    assert stats["episodes_interrupted"] == 3
    assert "episodes_failed" not in stats


async def test_a_process_that_cannot_be_replaced_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> WorkerProcess:
        raise OSError("no more processes")

    host = EnvironmentHost(CallableEnvironment(target=f"{HERE}:Countdown", workers=1))
    await host.open()
    try:
        await host._workers[0].end()
        with monkeypatch.context() as patched:
            patched.setattr("trainer.environments.host.start_worker", refused)
            with pytest.raises(EnvironmentFailed, match="no more processes"):
                await host.begin(Task("1+2=", []))
        _, first = await host.begin(Task("1+2=", []))
        assert first.messages
    finally:
        await host.close()


def test_a_group_that_lacks_some_is_counted(server: GenerateServer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    options = {"how": "raise", "marker": str(tmp_path / "was here")}
    with rollouts(server, tokenizer, options, attempts=1) as running:
        group = play(running, tokenizer, 3)
        stats = running.stats()
    assert len(group.trajectories) == 2
    assert stats["groups_incomplete"] == stats["episodes_left_out"] == 1
    assert "groups_lost" not in stats


def test_tools_give_nothing_of_their_own(server: GenerateServer, tokenizer: Tokenizer) -> None:
    """So an answer is right when its rewards say so."""
    tools = ToolsEnvironment(tools=(FunctionTool(target=f"{HERE}:add"),), describe=False, workers=1)

    class Content(Reward):
        async def __call__(self, request: RewardRequest, /) -> float:
            return 1.0

    scorer, gateway = Scorer({"content": Weighted(Content())}), GatewayConfig(url=server.url)
    with RolloutSampler(gateway, RolloutConfig(max_tokens=8), scorer, tokenizer, 3, tools) as running:
        group = play(running, tokenizer, 2)
    assert [(score.parts, score.full) for score in group.scores] == [({"content": 1.0}, True)] * 2


def test_what_cannot_be_made_is_said_before_the_run(server: GenerateServer, tokenizer: Tokenizer) -> None:
    for name, options, key in (
        ("Missing", {}, "environment.target"),
        ("no_environment", {}, "environment.target"),
        ("Countdown", {"turn": 3}, "environment.options"),
    ):
        with pytest.raises(ConfigError) as error:
            rollouts(server, tokenizer, options, target=f"{HERE}:{name}")
        assert error.value.key == key


def test_episodes_of_one_record_must_begin_alike(server: GenerateServer, tokenizer: Tokenizer) -> None:
    with (
        rollouts(server, tokenizer, {}, target=f"{HERE}:Moody") as running,
        pytest.raises(RolloutError, match="in different ways"),
    ):
        play(running, tokenizer, 2)


def test_rewards_see_the_whole_trajectory(server: GenerateServer, tokenizer: Tokenizer) -> None:
    seen: list[RewardRequest] = []

    class Watching(Reward):
        async def __call__(self, request: RewardRequest, /) -> float:
            seen.append(request)
            return 0.0

    with rollouts(server, tokenizer, {}, Scorer({"watching": Weighted(Watching())})) as running:
        (trajectory,) = play(running, tokenizer, 1).trajectories
    (request,) = seen
    assert [turn["role"] for turn in request.turns] == ["assistant", "user"] * 2 + ["assistant"]
    assert request.answer == request.turns[-1]["content"] == tokenizer.decode(trajectory.turns[-1].token_ids)
    assert (request.tokens, request.truncated) == (trajectory.policy_tokens, False)


def test_an_outage_of_a_reward_teaches_nothing(server: GenerateServer, tokenizer: Tokenizer) -> None:
    class Away(Reward):
        """Fails until it was asked so often."""

        def __init__(self, until: int) -> None:
            self.asked, self.until = 0, until

        async def __call__(self, request: RewardRequest, /) -> float:
            self.asked += 1
            if self.asked <= self.until:
                raise ConnectionError("nobody there")
            return 1.0

    with rollouts(server, tokenizer, {}, Scorer({"away": Weighted(Away(1))})) as running:
        assert play(running, tokenizer, 1).scores[0].parts["away"] == 1.0
    with rollouts(server, tokenizer, {}, Scorer({"away": Weighted(Away(1000))})) as running:
        group = play(running, tokenizer, 2)
        assert running.stats()["trajectories_without_reward"] == 2
    assert group.trajectories == ()
