"""Two versions share the traffic of two real engines: every answer is its version's, whatever changes meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.asking import Labelled
from tests.live import LiveServer
from tests.waiting import comes_true, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad]


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Version 1, which says w100 alone, serves; version 2, which says w101, is there."""
    live = LiveServer(checkpoints["say-0"], tmp_path_factory.mktemp("splits"), name="splits", instances=2)
    with live.running():
        wait_until(lambda: live.whole(), 300)
        answer = live.admin.post("/admin/weights", json={"path": str(checkpoints["say-1"]), "activate": False})
        assert (answer.status_code, answer.json()["version"]) == (200, 2), answer.text
        yield live


def divide(server: LiveServer, mode: str = "together", drain_s: float = 0, **percents: float) -> dict[str, Any]:
    shares = [{"version": int(name[1:]), "percent": percent} for name, percent in percents.items()]
    body = {"shares": shares, "mode": mode, "drain_s": drain_s}
    answer = server.admin.post("/admin/weights/split", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_versions_share_real_engines_under_load(server: LiveServer) -> None:
    with Labelled(server.url) as clients:
        divide(server, v1=50, v2=50)
        wait_until(lambda: {record["active_version"] for record in server.instances()} == {1, 2})
        before = clients.answers.copy()
        wait_until(lambda: clients.answers[1] > before[1] + 20 and clients.answers[2] > before[2] + 20, 120)
        stalls = [record["commit_ms"] for record in server.instances()]
        divide(server, v1=90, v2=10)
        assert [record["commit_ms"] for record in server.instances()] == stalls, "no engine has flipped for it"
        seen = clients.answers.total()
        wait_until(lambda: clients.answers.total() > seen + 40, 120)
        pinned = server.generate([3, 4, 5], 4, hotswap={"version": 2})["choices"][0]
        assert (pinned["weight_versions"][0]["version"], set(pinned["token_ids"])) == (2, {101})
        answer = server.admin.request("DELETE", "/admin/weights/split")
        assert (answer.status_code, answer.json()["version"]) == (200, 1), answer.text
        seen = clients.answers.total()
        wait_until(lambda: clients.answers.total() > seen + 10, 120)
    assert not clients.failures
    assert clients.labelled == {(1, 100), (2, 101)}, "every token is of the version that its label names"
    wait_until(lambda: [record["active_version"] for record in server.instances()] == [1, 1])
    alone = [server.generate([3, 4, 5], 2)["choices"][0]["weight_versions"][0]["version"] for _ in range(10)]
    assert alone == [1] * 10


def test_a_rolling_split_is_probed_and_then_grows(server: LiveServer) -> None:
    """A canary: one instance, probed before it has traffic, one percent, and half of it without another flip."""
    with Labelled(server.url) as clients:
        made = divide(server, mode="rolling", drain_s=2, v1=99, v2=1)
        assert (made["mode"], made["probe"]) == ("rolling", "passed")
        (share,) = made["split"]["shares"]
        assert (share["instances"], share["percent"]) == ([made["canary"]], 1)
        before = clients.answers[2]
        divide(server, v1=50, v2=50)
        wait_until(lambda: clients.answers[2] > before + 10, 120)
    assert not clients.failures
    assert clients.labelled <= {(1, 100), (2, 101)}
    assert server.admin.request("DELETE", "/admin/weights/split").status_code == 200


def test_the_death_of_the_only_instance_of_a_version_fails_nobody(server: LiveServer) -> None:
    assert comes_true(lambda: server.whole(), 200)
    divide(server, v1=50, v2=50)
    holder = next(at for at, record in enumerate(server.instances()) if record["active_version"] == 2)
    with Labelled(server.url) as clients:
        wait_until(lambda: clients.answers[1] > 5 and clients.answers[2] > 5, 120)
        for process in server.tree(holder):
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: [r["eligible"] for r in server.instances()] != [True, True], 60)
        before = clients.answers[1]
        wait_until(lambda: clients.answers[1] > before + 40, 120)
        assert comes_true(lambda: server.whole(), 200)
        back = clients.answers[2]
        wait_until(lambda: clients.answers[2] > back + 5, 120)
    retryable = [failure for failure in clients.failures if "upstream_died" in failure]
    assert clients.failures == retryable, "nothing fails but what was at the instance as it died"
    assert len(retryable) <= 3, "a client each at most"
    assert clients.labelled == {(1, 100), (2, 101)}
    page = server.admin.get("/metrics").text
    assert 'hotswap_split_requests_total{model="splits",status="200",version="2"}' in page
