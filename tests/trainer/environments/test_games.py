"""The shipped games: their rules, and the example of the page played in the trainer's processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.environments.functions import hosting
from tests.trainer.rollouts.generate_server import GenerateServer
from trainer.config import CallableEnvironment, EnvironmentConfig, GatewayConfig, JsonlData, RolloutConfig
from trainer.config.strict import convert
from trainer.data import build_dataset
from trainer.data.tokenizer import Tokenizer
from trainer.environments import Observation, Task
from trainer.environments.games import FindKey, GuessNumber
from trainer.errors import EnvironmentFailed
from trainer.rewards import build_scorer
from trainer.rollouts.sampling import ENVIRONMENT, RolloutSampler

PAGE = (Path(__file__).parents[3] / "docs" / "trainer" / "environments.md").read_text()
GAMES = "trainer.environments.games"


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


def test_the_page_s_example_is_played(server: GenerateServer, tiny_model: str, tmp_path: Path) -> None:
    script, settings = blocks("Games")
    exec(script.replace("numbers.jsonl", str(tmp_path / "numbers.jsonl")), {})
    assert len([json.loads(line) for line in (tmp_path / "numbers.jsonl").read_text().splitlines()]) == 50
    config: Any = yaml.safe_load(settings)
    config["data"] |= {"path": str(tmp_path / "numbers.jsonl"), "cache_dir": str(tmp_path)}
    environment = convert(EnvironmentConfig, config["environment"], "environment")
    tokenizer = Tokenizer(tiny_model)
    dataset = build_dataset(convert(JsonlData, config["data"], "data"), tokenizer, 0)
    rollout, gateway = RolloutConfig(max_tokens=200), GatewayConfig(url=server.url)
    with RolloutSampler(gateway, rollout, build_scorer([]), tokenizer, 3, environment) as running:
        group = running.submit(dataset[0], 2, 0).result(timeout=60)
    for trajectory, score in zip(group.trajectories, group.scores, strict=True):
        assert score.parts[ENVIRONMENT] == pytest.approx(sum(turn.reward for turn in trajectory.turns))
        assert trajectory.turns[0].reward in (1.0, -0.05)
