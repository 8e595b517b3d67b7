"""Episodes through a model: turns, tokens and rewards; what becomes of environments that fail; the shipped games: their
rules, and the example of the page played in the trainer's processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.trainer.environments.functions import hosting
from tests.trainer.rollouts.client import client
from tests.trainer.rollouts.generate_server import GenerateServer
from trainer.config import CallableEnvironment, EnvironmentConfig, FunctionTool, JsonlData, ToolsEnvironment
from trainer.config.strict import convert
from trainer.data import build_dataset
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.environments import EnvironmentHost, Episode, Observation, Task
from trainer.environments.games import FindKey, GuessNumber
from trainer.errors import ConfigError, EnvironmentFailed, RolloutError
from trainer.rewards import Reward, RewardRequest, Scorer, Weighted, build_scorer
from trainer.rollouts.sampling import ENVIRONMENT
from trainer.trajectory import TrajectoryGroup
from trainer.worker_process import WorkerProcess

HERE = "tests.trainer.environments.functions"
PAGE = (Path(__file__).parents[3] / "docs" / "trainer" / "environments.md").read_text()
GAMES = "trainer.environments.games"
Play = Callable[..., tuple[TrajectoryGroup, dict[str, float]]]


@pytest.fixture
def play(server: GenerateServer, tokenizer: Tokenizer, record: Record) -> Play:
    """A group of n episodes, and what was counted meanwhile. The environment's class, and what else it is told, are
    `config`; its `options` are the class's."""

    def played(n: int, scorer: Scorer | None = None, **config: Any) -> tuple[TrajectoryGroup, dict[str, float]]:
        environment = CallableEnvironment(**{"target": f"{HERE}:Countdown", "workers": 1, **config})
        with client(server.url, tokenizer, scorer, environment, max_tokens=64) as running:
            return running.submit(record, n, 0).result(timeout=120), running.stats()

    return played


def test_an_episode_is_one_trajectory(play: Play, server: GenerateServer, tokenizer: Tokenizer) -> None:
    """A weight goes into the reward of each turn."""
    group, _ = play(3, weight=0.5)
    assert group.prompt_ids == tokenizer.prompt("1+2=")
    for trajectory, score in zip(group.trajectories, group.scores, strict=True):
        assert [turn.of_policy for turn in trajectory.turns] == [True, False] * 2 + [True]
        assert [tokenizer.decode(turn.token_ids) for turn in trajectory.turns[1::2]] == ["2+", "1+"]
        assert [turn.reward for turn in trajectory.turns] == [0.5, 0, 0.5, 0, 0.5]
        assert score.parts[ENVIRONMENT] == 3
        assert score.total == 1.5 + score.parts["exact_match"]
        by_token = [reward for reward in trajectory.rewards(score.total) if reward]
        assert by_token == [0.5, 0.5, 0.5 + score.parts["exact_match"]]
    for body in server.requests[-3:]:
        assert body["max_tokens"] < 64, "the turns before count"
    prompts = [tuple(body["prompt_token_ids"]) for body in server.requests]
    whole = {group.prompt_ids + t.token_ids for t in group.trajectories}
    assert all(any(w[: len(p)] == p for w in whole) for p in prompts[-9:]), "nothing is tokenised a second time"


def test_turns_and_tokens_are_bounded(play: Play) -> None:
    (cut,) = play(1, options={"turns": 9}, max_turns=2)[0].trajectories
    assert (len(cut.turns), cut.truncated) == (3, True)
    (cut,) = play(1, options={"turns": 1000}, max_turns=1000)[0].trajectories
    assert cut.truncated
    assert cut.turns[-1].of_policy
    assert len(cut.token_ids) <= 64


def test_a_flood_is_cut(play: Play) -> None:
    (trajectory,) = play(1, options={"how": "flood"}, max_observation_tokens=5)[0].trajectories
    assert all(len(turn.token_ids) <= 5 + 8 for turn in trajectory.turns if not turn.of_policy)


@pytest.mark.parametrize("how", ["raise", "hang", "die", "nonsense", "no text", "no number"])
def test_an_episode_that_failed_is_played_again(play: Play, tmp_path: Path, how: str) -> None:
    group, stats = play(
        1, options={"how": how, "marker": str(tmp_path / "was here")}, timeout_s=3.0 if how == "hang" else 60.0
    )
    assert stats["episodes_failed"] == 1
    assert group.scores[0].parts[ENVIRONMENT] == 3


@pytest.mark.parametrize("how", ["raise", "die"])
def test_one_that_fails_again_and_again_is_left_out(play: Play, how: str) -> None:
    group, stats = play(2, options={"how": how})
    assert (group.trajectories, group.scores) == ((), ())
    assert (stats["episodes_failed"], stats["episodes_left_out"]) == (4, 2)
    assert stats["groups_lost"] == 1


async def test_one_that_hangs_costs_the_others_of_its_process_nothing() -> None:
    async with hosting(CallableEnvironment(target=f"{HERE}:Obedient", workers=1)) as host:
        hurried = EnvironmentHost(msgspec.structs.replace(host.config, timeout_s=1.0))
        (hanging, _), (waiting, _), (asking, _) = [await host.begin(Task("", [])) for _ in range(3)]
        hanging.host = hurried  # it is the first whose time is up
        asked = asyncio.create_task(asking.step("hang"))
        with pytest.raises(EnvironmentFailed, match="over 1 s for a step; killed") as failed:
            await hanging.step("hang")
        assert not failed.value.code
        with pytest.raises(EnvironmentFailed, match="another episode hangs") as ended:
            await asked
        assert ended.value.code == "interrupted"
        with pytest.raises(EnvironmentFailed, match="while it waited") as ended:
            await waiting.step("go on")
        assert ended.value.code == "interrupted"
        dying, _ = await host.begin(Task("", []))
        with pytest.raises(EnvironmentFailed, match="status 3") as failed:
            await dying.step("die")
        assert not failed.value.code


def test_an_interrupted_episode_is_played_again_for_free(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    step, interruptions = Episode.step, iter(range(3))

    async def interrupted(self: Episode, answer: str) -> Observation:
        if next(interruptions, None) is not None:
            raise EnvironmentFailed("of another's sake", code="interrupted")
        return await step(self, answer)

    monkeypatch.setattr(Episode, "step", interrupted)
    group, stats = play(1, attempts=1)
    assert group.scores[0].parts[ENVIRONMENT] == 3
    assert stats["episodes_interrupted"] == 3
    assert "episodes_failed" not in stats


async def test_a_process_that_cannot_be_replaced_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> WorkerProcess:
        raise OSError("no more processes")

    async with hosting(CallableEnvironment(target=f"{HERE}:Countdown", workers=1)) as host:
        await host._workers[0].end()
        with monkeypatch.context() as patched:
            patched.setattr("trainer.environments.host.start_worker", refused)
            with pytest.raises(EnvironmentFailed, match="no more processes"):
                await host.begin(Task("1+2=", []))
        _, first = await host.begin(Task("1+2=", []))
        assert first.messages


def test_a_group_that_lacks_some_is_counted(play: Play, tmp_path: Path) -> None:
    group, stats = play(3, options={"how": "raise", "marker": str(tmp_path / "was here")}, attempts=1)
    assert len(group.trajectories) == 2
    assert stats["groups_incomplete"] == stats["episodes_left_out"] == 1
    assert "groups_lost" not in stats


def test_tools_give_nothing_of_their_own(server: GenerateServer, tokenizer: Tokenizer, record: Record) -> None:
    """So an answer is right when its rewards say so."""
    tools = ToolsEnvironment(tools=(FunctionTool(target=f"{HERE}:add"),), describe=False, workers=1)

    class Content(Reward):
        async def __call__(self, request: RewardRequest, /) -> float:
            return 1.0

    with client(server.url, tokenizer, Scorer({"content": Weighted(Content())}), tools, max_tokens=8) as running:
        group = running.submit(record, 2, 0).result(timeout=120)
    assert [(score.parts, score.full) for score in group.scores] == [({"content": 1.0}, True)] * 2


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [("Missing", {}, "target"), ("no_environment", {}, "target"), ("Countdown", {"turn": 3}, "options")],
)
def test_what_cannot_be_made_is_said_before_the_run(play: Play, name: str, options: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        play(1, target=f"{HERE}:{name}", options=options)
    assert error.value.key == f"environment.{key}"


def test_episodes_of_one_record_must_begin_alike(play: Play) -> None:
    with pytest.raises(RolloutError, match="in different ways"):
        play(2, target=f"{HERE}:Moody")


def test_rewards_see_the_whole_trajectory(play: Play, tokenizer: Tokenizer) -> None:
    seen: list[RewardRequest] = []

    class Watching(Reward):
        async def __call__(self, request: RewardRequest, /) -> float:
            seen.append(request)
            return 0.0

    (trajectory,) = play(1, Scorer({"watching": Weighted(Watching())}))[0].trajectories
    (request,) = seen
    assert [turn["role"] for turn in request.turns] == ["assistant", "user"] * 2 + ["assistant"]
    assert request.answer == request.turns[-1]["content"] == tokenizer.decode(trajectory.turns[-1].token_ids)
    assert (request.tokens, request.truncated) == (trajectory.policy_tokens, False)


def test_an_outage_of_a_reward_teaches_nothing(play: Play) -> None:
    class Away(Reward):
        """Fails until it was asked so often."""

        def __init__(self, until: int) -> None:
            self.asked, self.until = 0, until

        async def __call__(self, request: RewardRequest, /) -> float:
            self.asked += 1
            if self.asked <= self.until:
                raise ConnectionError("nobody there")
            return 1.0

    assert play(1, Scorer({"away": Weighted(Away(1))}))[0].scores[0].parts["away"] == 1.0
    group, stats = play(2, Scorer({"away": Weighted(Away(1000))}))
    assert (group.trajectories, stats["trajectories_without_reward"]) == ((), 2)


def blocks(section: str) -> tuple[str, str]:
    """The Python and the YAML of a section of the page."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (settings,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return script, settings


def said(seen: Observation) -> str:
    return " ".join(message["content"] for message in seen.messages)


@pytest.mark.parametrize("number", [1, 37, 64])
def test_a_player_who_halves_the_range_wins_within_its_logarithm(number: int) -> None:
    game = GuessNumber(highest=64, cost=0.1)
    assert "1 to 64" in said(game.reset(Task("", (), str(number))))
    low, high, rewards = 1, 64, list[float]()
    while not rewards or rewards[-1] != 1.0:
        middle = (low + high) // 2
        seen = game.step(f"I say {middle}.")
        rewards.append(seen.reward)
        if not seen.done:
            low, high = (middle + 1, high) if said(seen) == "Too low." else (low, middle - 1)
    assert seen.done
    assert len(rewards) <= 7
    assert rewards[:-1] == [-0.1] * (len(rewards) - 1)
    assert (said(game.step("well")), game.step("well").reward) == ("Write a number.", -0.1)


@pytest.mark.parametrize(
    ("key", "there", "back"),
    [("hall", [], []), ("attic", ["north", "up"], ["down", "south"]), ("cellar", ["east", "down"], ["up", "west"])],
)
def test_bringing_the_key_and_opening_the_door_is_worth_one(key: str, there: list[str], back: list[str]) -> None:
    game, total = FindKey(), 0.0
    seen = game.reset(Task("", (), key))
    assert "You are in the hall." in said(seen)
    assert "does not work" in said(game.step("open door")), "there is no key yet"
    for command in [*(f"go {d}" for d in there), "take key", *(f"go {d}" for d in back), "Open door "]:
        assert not seen.done
        seen = game.step(command)
        total += seen.reward
    assert seen.done
    assert total == pytest.approx(1.0)


def test_walking_and_asking_again_earn_nothing() -> None:
    game = FindKey()
    game.reset(Task("", (), "library"))
    assert [game.step(c).reward for c in ("go up", "dance", "take key", "go north")] == [0.0] * 4
    assert game.step("take key").reward == pytest.approx(1 / 3)
    assert game.step("go south").reward == pytest.approx(1 / 3)
    assert [game.step(c).reward for c in ("take key", "go north", "go south")] == [0.0] * 3


@pytest.mark.parametrize(("name", "answer"), [("GuessNumber", "101"), ("GuessNumber", "x"), ("FindKey", "garden")])
async def test_a_record_that_fits_no_game_fails_its_episode(name: str, answer: str) -> None:
    async with hosting(CallableEnvironment(target=f"{GAMES}:{name}", workers=1)) as host:
        with pytest.raises(EnvironmentFailed, match="ValueError"):
            await host.begin(Task("", (), answer))


async def test_the_page_s_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, settings = blocks("Your own")
    (tmp_path / "countdown.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    async with hosting(convert(EnvironmentConfig, yaml.safe_load(settings)["environment"], "environment")) as host:
        episode, first = await host.begin(Task("", (), "30"))
        assert "from 10," in said(first)
        assert said(await episode.step("9")) == "No. 10 is next."
        seen = [await episode.step(str(number)) for number in range(10, -1, -1)]
    assert [s.done for s in seen] == [False] * 10 + [True]
    assert sum(s.reward for s in seen) == pytest.approx(1.0)


def test_the_page_s_example_is_played(server: GenerateServer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    script, settings = blocks("Games")
    script = script.replace('"guess"', '"1+2="')  # the model of sums has no letters
    exec(script.replace("numbers.jsonl", str(tmp_path / "numbers.jsonl")), {})
    assert len([json.loads(line) for line in (tmp_path / "numbers.jsonl").read_text().splitlines()]) == 50
    config: Any = yaml.safe_load(settings)
    config["data"] |= {"path": str(tmp_path / "numbers.jsonl"), "cache_dir": str(tmp_path)}
    environment = convert(EnvironmentConfig, config["environment"], "environment")
    dataset = build_dataset(convert(JsonlData, config["data"], "data"), tokenizer, 0)
    with client(server.url, tokenizer, build_scorer([]), environment, max_tokens=200) as running:
        group = running.submit(dataset[0], 2, 0).result(timeout=60)
    for trajectory, score in zip(group.trajectories, group.scores, strict=True):
        assert score.parts[ENVIRONMENT] == pytest.approx(sum(turn.reward for turn in trajectory.turns))
        assert trajectory.turns[0].reward in (1.0, -0.05)
