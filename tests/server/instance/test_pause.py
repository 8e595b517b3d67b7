"""Pause leases: nobody but the one who paused keeps an engine paused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.errors import NotFound
from server.gateway.admin.fleet import PauseLeases
from tests.server.asking import call
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway, gateway_process, running_gateway
from tests.waiting import eventually
from weightsync import open_store
from weightsync.control.agent import PauseFollower
from weightsync.store import Store


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


async def test_a_pause_ends_by_itself_unless_it_is_renewed(store: Store) -> None:
    leases = PauseLeases(store, MODEL)
    async with following(store.url) as engine:
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


async def test_one_name_ends_and_renews_its_own_pauses_only(store: Store) -> None:
    leases = PauseLeases(store, MODEL)
    other = await leases.take("other", 60.0)
    for _ in range(2):
        await leases.take("mine", 60.0)
    await leases.renew_all("mine")
    assert await leases.end_all("mine") == 2
    assert [record.id for record in await leases.holding()] == [other.id]
    assert await leases.end_all("mine") == 0


# a real gateway


async def test_a_killed_gateway_leaves_nothing_paused(tmp_path: Path) -> None:
    with gateway_process(tmp_path) as gateway:
        async with following(gateway.store.store.url) as engine:
            status, _ = await call(gateway, "POST", "/admin/pause", {"ttl_s": 2, "requested_by": "me"})
            assert status == 200
            await engine.reaches(True)
            gateway.process.kill()
            gateway.process.wait()
            await engine.reaches(False)
