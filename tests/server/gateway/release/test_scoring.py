"""Scores by a real reward server, and evaluations against instances that answer what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import ConfigError, ServerError
from server.gateway.config import NamedSettings
from server.gateway.release.policy import Reward, parse
from server.gateway.release.scoring import (
    Evaluator,
    RewardClient,
    needed,
    read_set,
)
from tests.trainer.rewards.test_server import serving
from weightsync.control.records import InstanceRecord

CANDIDATE = InstanceRecord("new", "http://new", key="secret", active_version=13)
STABLE = InstanceRecord("old", "http://old", active_version=12)


@pytest.fixture(scope="module")
def reward_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("scoring"), rewards=[{"kind": "math"}]) as client:
        yield str(client.base_url)


class Instances(httpx.AsyncBaseTransport):
    """Both instances: the candidate adds one to every sum. Everything else goes where it is addressed to."""

    def __init__(self) -> None:
        self.asked: list[tuple[httpx.Request, Any]] = []
        self.faults: dict[str, httpx.Response] = {}
        self.client = httpx.AsyncClient(transport=self)
        self._real = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host not in ("new", "old"):
            return await self._real.handle_async_request(request)
        body = json.loads(request.content)
        self.asked.append((request, body))
        if host in self.faults:
            return self.faults[host]
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        a, b = map(int, text.rstrip("=").split("+"))
        said = f"It is {a + b + (host == 'new')}"
        choice = {"text": said} if "prompt" in body else {"message": {"content": said}}
        return httpx.Response(200, json={"choices": [choice] * body["n"]})


@pytest.fixture
async def instances() -> AsyncIterator[Instances]:
    found = Instances()
    async with found.client:
        yield found


def evaluator(client: httpx.AsyncClient, url: str, root: Path, lines: list[Any], **bounds: Any) -> Evaluator:
    file = root / "set.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    text = {
        "rewards": {"math": {}},
        "evaluation": [{"name": "sums", "by": "math", **bounds}],
        "steps": [{"traffic": 10, "for": 1}],
    }
    named = NamedSettings(reward=(f"math={url}",), evaluation=(f"sums={file}",))
    return Evaluator(client, RewardClient(client, named), "m", parse(json.dumps(text)))


SUMS = [{"prompt": "1+2=", "expected": "3"}, {"messages": [{"role": "user", "content": "2+2="}], "expected": "4"}]
OFF_BY_ONE = [{"prompt": "1+2=", "expected": "4"}, {"prompt": "2+2=", "expected": "4"}]


async def test_the_mean_of_the_rewards_must_reach_the_bound(
    reward_server: str, instances: Instances, tmp_path: Path
) -> None:
    client = instances.client
    failing = await evaluator(client, reward_server, tmp_path, SUMS, min=0.5, samples=2).verdict(CANDIDATE, None)
    assert failing == "sums: math 0, which is below 0.5"
    (first, body), _ = instances.asked
    assert (body["n"], body["temperature"], body["max_tokens"], body["model"]) == (2, 0.0, 256, "m")
    assert first.headers["authorization"] == "Bearer secret"
    assert first.headers["x-hotswap-probe"] == "1"
    assert await evaluator(client, reward_server, tmp_path, OFF_BY_ONE, min=0.5).verdict(CANDIDATE, None) == ""


async def test_it_is_compared_with_the_stable_version(reward_server: str, instances: Instances, tmp_path: Path) -> None:
    worse = evaluator(instances.client, reward_server, tmp_path, SUMS, max_decrease=0.5)
    assert await worse.verdict(CANDIDATE, STABLE) == "sums: math 0, and 1 of the stable version: over 0.5 less"
    same = evaluator(instances.client, reward_server, tmp_path, OFF_BY_ONE, max_decrease=0.0)
    assert await same.verdict(CANDIDATE, STABLE) == ""
    with pytest.raises(ServerError, match="nothing to compare"):
        await same.verdict(CANDIDATE, None)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (httpx.Response(503, text="busy"), "status 503: busy"),
        (httpx.Response(200, json={"choices": [{}]}), "cannot be read"),
        (httpx.Response(200, text="hello"), "cannot be read"),
    ],
)
async def test_a_candidate_that_does_not_answer_has_no_verdict(
    fault: httpx.Response, said: str, instances: Instances, tmp_path: Path
) -> None:
    instances.faults["new"] = fault
    with pytest.raises(ServerError, match=said):
        await evaluator(instances.client, "http://127.0.0.1:1", tmp_path, SUMS, min=0.5).verdict(CANDIDATE, None)


async def test_an_answer_without_a_score_says_why(reward_server: str) -> None:
    async with httpx.AsyncClient() as client:
        for name, url, said in (
            ("luck", reward_server, "no reward 'luck'"),
            ("math", "http://127.0.0.1:1", "does not answer"),
            ("math", f"{reward_server}/nowhere", "not answer as a reward server does"),
            ("other", reward_server, "no --reward other=.*another \\(math, luck\\)"),
        ):
            rewards = RewardClient(client, NamedSettings(reward=(f"math={url}", f"luck={url}")))
            with pytest.raises(ServerError, match=said):
                await rewards.score(name, Reward(), "1+1=", "2", "2", {})


async def test_the_key_of_a_reward_is_read_from_a_private_file(tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text("secret\n")
    told: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        told.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"scores": {"math": 1.0, "open": 1.0}})

    named = NamedSettings(reward=("math=http://r", "open=http://r/"), reward_key=(f"math={file}",))
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        file.chmod(0o644)
        with pytest.raises(ServerError, match="chmod 600"):
            await RewardClient(client, named).score("math", Reward(), "1+1=", "2", "2", {})
        file.chmod(0o600)
        rewards = RewardClient(client, named)
        for name in ("math", "open"):
            assert await rewards.score(name, Reward(), "1+1=", "2", "2", {}) == 1.0
    assert told == ["Bearer secret", None]


def test_what_a_reward_needs_of_a_request() -> None:
    reward = Reward(expected="answer", extra=("unit",))
    assert needed(reward, {"answer": 4, "unit": "m", "more": 1}) == ("4", {"unit": "m"})
    assert needed(reward, {"answer": 4}) is None
    assert needed(Reward(), {}) == ("", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "1 to 10000 lines"),
        ('{"prompt": "a"}\n{"prompt"', "line 2"),
        ('{"prompt": "a", "messages": [{}]}', "line 1: give either"),
        ("{}", "line 1: give either"),
        ('{"prompt": "a", "target": "b"}', "line 1"),
    ],
)
def test_a_set_that_cannot_be_meant(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_set("sums", NamedSettings(evaluation=(f"sums={file}",)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_set("sums", NamedSettings(evaluation=(f"sums={tmp_path}/none",)))
    with pytest.raises(ConfigError, match="no --evaluation"):
        read_set(str(file), NamedSettings())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward": ("math",)}, "--reward math: write NAME=URL"),
        ({"reward": ("math=file:///etc/passwd",)}, "give a URL with http"),
        ({"reward_key": ("=/key",)}, "--reward-key =/key: write NAME=FILE"),
        ({"evaluation": ("sums=",)}, "--evaluation sums=: write NAME=FILE"),
        ({"sign_key": ("ops=/a", "ops=/b")}, "each name once"),
    ],
)
def test_settings_that_name_nothing(given: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NamedSettings(**given)
