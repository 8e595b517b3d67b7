"""Releases on two real engines under load: a version that does harm is taken back by what its answers show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.asking import Labelled
from tests.live import LiveServer
from tests.trainer.rewards.test_server import serving
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad]

REWARDS = [{"kind": "regex", "name": "old", "pattern": "w100"}]  # what version 1 says: version 2 loses by it


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, rewards: str
) -> Iterator[LiveServer]:
    """Version 1, which says w100 alone, serves; version 2, which says w101, is there."""
    root, args = (
        tmp_path_factory.mktemp("releases"),
        ("--reward", f"old={rewards}", "--reward", "away=http://127.0.0.1:1"),
    )
    live = LiveServer(checkpoints["say-0"], root, name="releases", instances=2, gateway_args=args)
    with live.running():
        wait_until(lambda: live.whole(), 300)
        answer = live.admin.post("/admin/weights", json={"path": str(checkpoints["say-1"]), "activate": False})
        assert (answer.status_code, answer.json()["version"]) == (200, 2), answer.text
        yield live


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("rewards"), rewards=REWARDS) as client:
        yield str(client.base_url)


def policy(steps: str) -> str:
    return f"sticky: none\nrewards: {{old: {{}}, away: {{}}}}\nsteps: [{steps}]\n"


def release(server: LiveServer, text: str) -> dict[str, Any]:
    answer = server.admin.post("/admin/releases?reason=a+test", json={"version": 2, "text": text})
    assert answer.status_code == 200, answer.text
    return ended(server)


def ended(server: LiveServer) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        found: dict[str, Any] = server.admin.get("/admin/releases").json()["release"]
        return found if found["ended"] else None

    return wait_until(over, 300, lambda: server.admin.get("/admin/releases").text)


def runs(server: LiveServer) -> list[int]:
    return [record["active_version"] for record in server.instances()]


def test_shadow_answers_take_a_version_back_that_no_client_has_met(server: LiveServer) -> None:
    harmful = "{metric: reward/old, min: 0.5, answers: shadow, least: 20}"
    with Labelled(server.url) as clients:
        found = release(server, policy(f"{{traffic: 0, shadow: 100, for: 10m, conditions: [{harmful}]}}"))
    assert (found["state"], found["stable"], found["step"]) == ("rolled_back", 1, 0)
    assert "reward/old min 0.5: the candidate 0 of" in found["reason"]
    assert not clients.failures
    assert {version for version, _ in clients.labelled} == {1}
    wait_until(lambda: runs(server) == [1, 1])


def test_harm_to_live_answers_takes_it_back_and_the_ledger_says_why(server: LiveServer) -> None:
    harmful = "{metric: reward/old, max_decrease: 0.1, least: 20}"
    with Labelled(server.url) as clients:
        found = release(server, policy(f"{{traffic: 50, for: 10m, conditions: [{harmful}]}}"))
        seen = clients.answers.total()
        wait_until(lambda: clients.answers.total() > seen + 10, 120)
    assert found["state"] == "rolled_back"
    assert "the candidate 0 of" in found["reason"]
    assert "the stable version 1 of" in found["reason"]
    assert not clients.failures
    assert clients.labelled == {(1, 100), (2, 101)}, "every token is of the version that its label names"
    wait_until(lambda: runs(server) == [1, 1])
    told = [(entry["action"], entry["reason"]) for entry in server.admin.get("/admin/ledger").json()["entries"]]
    assert ("release", "a test") in told
    assert ("rollback", found["reason"]) in told
    outcomes = [
        e["outcome"] for e in server.admin.get("/admin/ledger").json()["entries"] if e["action"] == "release_end"
    ]
    assert outcomes[0] == f"rolled_back: {found['reason']}"
    assert 'hotswap_release_state{model="releases",state="rolled_back"} 1.0' in httpx.get(f"{server.url}/metrics").text


def test_a_reward_server_that_is_away_holds_the_release(server: LiveServer) -> None:
    text = policy("{traffic: 50, for: 0s, conditions: [{metric: reward/away, min: 0.5}]}")
    assert server.admin.post("/admin/releases", json={"version": 2, "text": text}).status_code == 200
    with Labelled(server.url) as clients:

        def lost() -> bool:
            findings = server.admin.get("/admin/releases").json()["findings"]
            return any(f["state"] == "blind" and "does not answer" in f["text"] for f in findings)

        wait_until(lost, 60, lambda: server.admin.get("/admin/releases").text)
        assert server.admin.get("/admin/releases").json()["release"]["state"] == "held"
        assert 'hotswap_release_state{model="releases",state="held"} 1.0' in httpx.get(f"{server.url}/metrics").text
        answer = server.admin.post("/admin/releases/cancel?reason=nobody+scores", json={})
        assert answer.status_code == 200, answer.text
        assert ended(server)["reason"].endswith("nobody scores")
    assert not clients.failures
    wait_until(lambda: runs(server) == [1, 1])
