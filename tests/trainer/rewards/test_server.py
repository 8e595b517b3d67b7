"""Rewards over HTTP: a real process, asked as the judge of releases asks it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.ports import free_port
from tests.waiting import wait_until
from tests.warm import TRAINERS, warm
from trainer.config.strict import build
from trainer.errors import ConfigError
from trainer.rewards.server import RewardServerConfig, main

FUNCTIONS = "tests.trainer.rewards.functions"
REWARDS: list[dict[str, Any]] = [
    {"kind": "math", "timeout_s": 60.0},
    {"kind": "regex", "name": "digit", "pattern": r"\d", "weight": 0.1},
    {"kind": "callable", "target": f"{FUNCTIONS}:misbehaves", "name": "bad", "timeout_s": 3.0, "workers": 1},
    {"kind": "callable", "target": f"{FUNCTIONS}:of_extra", "name": "extra"},
]


@contextlib.contextmanager
def serving(root: Path, **more: Any) -> Iterator[httpx.Client]:
    config = {"rewards": REWARDS, "port": free_port()} | more
    file, log = root / "rewards.yaml", root / "rewards.log"
    file.write_text(json.dumps(config))
    process = warm(TRAINERS).start(["trainer.rewards.server", "--config", str(file)], dict(os.environ), log)
    with httpx.Client(base_url=f"http://127.0.0.1:{config['port']}", timeout=120) as client:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return client.get("/healthz").is_success
            return False

        try:
            wait_until(answers, 240, what=log.read_text)
            yield client
        finally:
            process.kill()
            process.wait(30)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("rewards")) as running:
        yield running


def asked(client: httpx.Client, *rewards: str, **fields: Any) -> Any:
    return client.post("/score", json={"prompt": "2+2=", "answer": "4", "rewards": list(rewards), **fields})


def test_it_scores_what_is_asked_for(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"rewards": ["math", "digit", "bad", "extra"]}
    assert asked(client, "math", "digit", expected="4").json() == {"scores": {"math": 1, "digit": 1}, "failures": {}}
    assert asked(client, "math", answer="five", expected="4").json()["scores"] == {"math": 0}
    assert asked(client, "extra", extra={"bonus": 0.25}).json()["scores"] == {"extra": 0.25}
    unasked = client.post(
        "/score", json={"prompt": "", "answer": "4", "rewards": []}, headers={"authorization": "Bearer x"}
    )
    assert unasked.json() == {"scores": {}, "failures": {}}  # where there is no key, none is wrong
    every = client.post("/score", json={"prompt": "", "answer": "4", "expected": "4", "extra": {"bonus": 1}}).json()
    assert every == {"scores": {"math": 1, "digit": 1, "bad": 1, "extra": 1}, "failures": {}}  # unweighted


@pytest.mark.parametrize(("answer", "said"), [("raise", "KeyError"), ("hang", "3 s"), ("die", "ended")])
def test_a_reward_that_fails_has_no_value(client: httpx.Client, answer: str, said: str) -> None:
    found = asked(client, "bad", "digit", answer=answer).json()
    assert found["scores"] == {"digit": 0}
    assert said in found["failures"]["bad"]
    assert asked(client, "bad").json()["scores"] == {"bad": 1}  # the next one has another worker


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        ({"prompt": "", "answer": "", "rewards": ["luck"]}, 404, "unknown_reward", "math, digit, bad, extra"),
        ({"prompt": ""}, 400, "invalid_parameter", "answer"),
        ({"prompt": "", "answer": 3}, 400, "invalid_parameter", "answer"),
        ({"prompt": "", "answer": "", "speed": 1}, 400, "invalid_parameter", "speed"),
    ],
)
def test_a_request_that_cannot_be_meant(
    client: httpx.Client, body: dict[str, Any], status: int, code: str, said: str
) -> None:
    answer = client.post("/score", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert said in answer.json()["error"]["message"]


def test_it_asks_for_its_key_and_takes_no_more_than_it_can(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-secret\n")
    slow = {**REWARDS[2], "timeout_s": 200.0}
    with serving(tmp_path, rewards=[slow], key_file=str(tmp_path / "key"), pending=1) as client:
        refused = asked(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        client.headers["authorization"] = "Bearer another"
        assert asked(client).status_code == 401
        client.headers["authorization"] = "Bearer a-secret"
        assert asked(client, "bad").json()["scores"] == {"bad": 1}

        under_way = tmp_path / "under way"

        def hang() -> None:
            with contextlib.suppress(httpx.TransportError):  # it ends with the server
                asked(client, "bad", answer=f"hang {under_way}")

        threading.Thread(target=hang, daemon=True).start()
        wait_until(under_way.exists, 60)  # any other question until then could take the only place
        full = asked(client, "bad")
        assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rewards": []}, "at least one"),
        ({"rewards": [{"kind": "group", "target": "a:b"}]}, "compares samples"),
        ({"rewards": REWARDS, "host": "0.0.0.0"}, "no key"),
        ({"rewards": REWARDS, "key_file": "/nowhere"}, "cannot read"),
        ({"rewards": [{"kind": "lucky"}]}, "lucky"),
    ],
)
def test_a_configuration_that_cannot_be_meant(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RewardServerConfig, config).key()
    assert said in str(caught.value)


def test_a_reward_that_cannot_be_loaded_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rewards.yaml"
    file.write_text(json.dumps({"rewards": [{"kind": "callable", "target": "nowhere:nothing"}], "port": free_port()}))
    assert main(["--config", str(file)]) == 2
    assert "nowhere" in capsys.readouterr().err
