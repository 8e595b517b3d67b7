"""Pause leases: nobody but the one who paused keeps an engine paused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from server.errors import NotFound
from server.gateway.admin.fleet import PauseLeases
from tests.server.gateway.harness import ADMIN_KEY, KEYS, MODEL, RunningGateway, get, post, running_gateway
from tests.waiting import eventually, wait_until
from weightsync import open_store
from weightsync.control.agent import PauseFollower
from weightsync.store import Store

AUTH = f"Authorization: Bearer {ADMIN_KEY}\r\n"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path) as running:
        yield running


class Engine:
    """Follows the pauses of a store as an instance does."""

    def __init__(self, store: Store) -> None:
        self.paused = False
        self.follower = PauseFollower(store, KEYS, self._pause, self._resume)

    async def _pause(self) -> None:
        self.paused = True

    async def _resume(self) -> None:
        self.paused = False

    async def reaches(self, paused: bool) -> None:
        await eventually(lambda: self.paused is paused)


@contextlib.asynccontextmanager
async def following(url: str) -> AsyncIterator[Engine]:
    store = open_store(url)
    engine = Engine(store)
    task = asyncio.create_task(engine.follower.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


async def call(gateway: RunningGateway, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    raw = post(path, b"" if body is None else orjson.dumps(body), AUTH) if method != "GET" else get(path, AUTH)
    answer = await gateway.ask(raw.replace(b"POST", method.encode(), 1), admin=True)
    return answer.status, orjson.loads(answer.body)


# the routes


async def test_pause_renew_and_resume(gateway: RunningGateway) -> None:
    async with following(gateway.gateway.config.store) as engine:
        status, pause = await call(gateway, "POST", "/admin/pause", {"ttl_s": 60, "requested_by": "trainer-7"})
        assert (status, pause["ttl_s"]) == (200, 60)
        await engine.reaches(True)
        status, found = await call(gateway, "GET", "/admin/pause")
        assert (found["paused"], [p["requested_by"] for p in found["pauses"]]) == (True, ["trainer-7"])
        status, renewed = await call(gateway, "POST", f"/admin/pause/{pause['id']}/renew")
        assert (status, renewed) == (200, pause)

        _, second = await call(gateway, "POST", "/admin/pause")
        assert second["ttl_s"] == 30
        status, answer = await call(gateway, "DELETE", f"/admin/pause/{pause['id']}")
        assert (status, answer) == (200, {"id": pause["id"], "paused": True})
        assert engine.paused, "another pause holds"
        assert (await call(gateway, "DELETE", f"/admin/pause/{second['id']}"))[1]["paused"] is False
        await engine.reaches(False)
        assert (await call(gateway, "GET", "/admin/pause"))[1] == {"paused": False, "pauses": []}


async def test_a_pause_that_is_over_is_404(gateway: RunningGateway) -> None:
    _, pause = await call(gateway, "POST", "/admin/pause")
    assert (await call(gateway, "DELETE", f"/admin/pause/{pause['id']}"))[0] == 200
    for method, path in (("DELETE", f"/admin/pause/{pause['id']}"), ("POST", f"/admin/pause/{pause['id']}/renew")):
        status, answer = await call(gateway, method, path)
        assert (status, answer["error"]["code"]) == (404, "unknown_pause")


@pytest.mark.parametrize("body", [{"ttl_s": 0.5}, {"ttl_s": 601}, {"ttl_s": "9"}, {"requested_by": ""}, {"for": 3}])
async def test_bad_pauses_are_400(gateway: RunningGateway, body: dict[str, Any]) -> None:
    status, answer = await call(gateway, "POST", "/admin/pause", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_parameter")
    assert (await call(gateway, "DELETE", "/admin/pause/..%2f..%2factive"))[0] in (400, 404)
    assert (await call(gateway, "GET", "/admin/pause"))[1]["pauses"] == []


# without a gateway


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path / 'store.db'}"


async def test_a_pause_ends_by_itself_unless_it_is_renewed(url: str) -> None:
    store = open_store(url)
    leases = PauseLeases(store, MODEL)
    async with following(url) as engine:
        kept, left = await leases.take("a", 2.0), await leases.take("b", 2.0)
        await engine.reaches(True)

        async def one_is_left() -> bool:
            await leases.renew(kept.id)
            return len(await leases.holding()) == 1

        await eventually(one_is_left)
        assert [record.id for record in await leases.holding()] == [kept.id]
        assert engine.paused
        with pytest.raises(NotFound):
            await leases.renew(left.id)
        await engine.reaches(False)
        with pytest.raises(NotFound):
            await leases.end(kept.id)
    await store.close()


async def test_one_name_ends_and_renews_its_own_pauses_only(url: str) -> None:
    store = open_store(url)
    leases = PauseLeases(store, MODEL)
    other = await leases.take("other", 60.0)
    for _ in range(2):
        await leases.take("mine", 60.0)
    await leases.renew_all("mine")
    assert await leases.end_all("mine") == 2
    assert [record.id for record in await leases.holding()] == [other.id]
    assert await leases.end_all("mine") == 0
    await store.close()


# real processes

PAUSER = """
import sys, time, httpx
url, key = sys.argv[1:]
with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, trust_env=False) as client:
    pause = client.post("/admin/pause", json={"ttl_s": 2, "requested_by": "pauser"}).json()
    while True:
        client.post(f"/admin/pause/{pause['id']}/renew").raise_for_status()
        print("renewed", flush=True)
        time.sleep(0.3)
"""


def started(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, **how)


async def test_a_killed_pauser_leaves_nothing_paused(gateway: RunningGateway) -> None:
    url = f"http://{gateway.host}:{gateway.admin_port}"
    async with following(gateway.gateway.config.store) as engine:
        command = [sys.executable, "-c", PAUSER, url, ADMIN_KEY]
        with started(command, stdout=subprocess.PIPE) as pauser:
            try:
                assert pauser.stdout is not None
                for _ in range(10):  # longer than one time to live
                    assert await asyncio.to_thread(pauser.stdout.readline) == b"renewed\n"
                await engine.reaches(True)
                assert (await call(gateway, "GET", "/admin/pause"))[1]["pauses"][0]["requested_by"] == "pauser"
            finally:
                pauser.send_signal(signal.SIGKILL)
        await engine.reaches(False)


async def test_a_killed_gateway_leaves_nothing_paused(tmp_path: Path) -> None:
    store_url, port_file = f"sqlite://{tmp_path / 'store.db'}", tmp_path / "log"
    command = ["-m", "server.gateway", "--store", store_url, "--model", MODEL, "--port", "0", "--admin-port", "0"]
    env = {**os.environ, "HOTSWAP_ADMIN_KEY": ADMIN_KEY}
    with port_file.open("wb") as log, started([sys.executable, *command], env=env, stderr=log) as process:
        try:
            port = await asyncio.to_thread(_admin_port, port_file)
            async with following(store_url) as engine, httpx.AsyncClient(trust_env=False) as client:
                headers = {"authorization": f"Bearer {ADMIN_KEY}"}
                answer = await client.post(
                    f"http://127.0.0.1:{port}/admin/pause", headers=headers, json={"ttl_s": 2, "requested_by": "me"}
                )
                assert answer.status_code == 200
                await engine.reaches(True)
                process.send_signal(signal.SIGKILL)
                process.wait()
                await engine.reaches(False)
        finally:
            process.kill()


def _admin_port(log: Path) -> int:
    """The port the gateway says it has, once it serves."""
    wait_until(lambda: "Application startup complete" in log.read_text(), what=log.read_text)
    return int(wait_until(lambda: re.search(r"admin routes on .*?port (\d+)", log.read_text()))[1])
