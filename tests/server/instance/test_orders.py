"""Orders to pause and to sleep: the admin routes, their leases, and how an instance follows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.gateway import UpstreamSettings
from server.gateway.admin.fleet import PauseLeases
from server.instance.config import InstanceConfig
from server.instance.middleware import Admission
from server.instance.rest import rest
from server.orders import SleeperRecord, SleepOrder, ordered, orders, sleepers, stay_asleep
from tests.server.asking import call
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway, running_gateway
from tests.server.instance.engines import Engine, config_of, sidecar_of, version
from tests.server.refusals import refuses
from tests.waiting import eventually, stays
from weightsync import open_store
from weightsync.control.pauses import PauseFollower
from weightsync.control.records import ActiveRecord, InstanceRecord
from weightsync.store import Store

ORDER = SleepOrder("i", 1, 0.0, "test", 0.0)
SLEEPER = SleeperRecord("i", 2, 7, "here", 0.0)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    settings = UpstreamSettings(scrape_interval_s=3600.0)
    with running_gateway(tmp_path, upstream=settings, run_coordinator=False) as running:
        yield running


# pauses


class Paused:
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
async def following(url: str) -> AsyncIterator[Paused]:
    store = open_store(url)
    engine = Paused(store)
    task = asyncio.create_task(engine.follower.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


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
        for method, path in (("DELETE", f"/admin/pause/{pause['id']}"), ("POST", f"/admin/pause/{pause['id']}/renew")):
            status, answer = await call(gateway, method, path)
            assert (status, answer["error"]["code"]) == (404, "unknown_pause"), "it is over"


@pytest.mark.parametrize("body", [{"ttl_s": 0.5}, {"ttl_s": 601}, {"ttl_s": "9"}, {"requested_by": ""}, {"for": 3}])
async def test_bad_pauses_are_400(gateway: RunningGateway, body: dict[str, Any]) -> None:
    status, answer = await call(gateway, "POST", "/admin/pause", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_parameter")
    assert (await call(gateway, "DELETE", "/admin/pause/..%2f..%2factive"))[0] in (400, 404)
    assert (await call(gateway, "GET", "/admin/pause"))[1]["pauses"] == []


async def test_a_pause_ends_by_itself_unless_it_is_renewed(store: Store) -> None:
    leases = PauseLeases(store, MODEL)
    async with following(store.url) as engine:
        kept, left = await leases.take("a", 4.0), await leases.take("b", 4.0)
        await engine.reaches(True)

        async def one_is_left() -> bool:
            await leases.renew(kept.id)
            return len(await leases.holding()) == 1

        await eventually(one_is_left)
        assert [record.id for record in await leases.holding()] == [kept.id]
        assert engine.paused
        with refuses(404):
            await leases.renew(left.id)
        await engine.reaches(False)
        with refuses(404):
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


# orders to sleep


def sleeping_record(gateway: RunningGateway, instance_id: str) -> SleepOrder | None:
    found = gateway.store.get(orders(KEYS) + instance_id)
    return SleepOrder.from_json(found.value) if found is not None else None


async def test_sleep_is_ordered_seen_and_ended(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        status, body = await call(gateway, "POST", "/admin/instances/i0/sleep", {"level": 1, "drain_s": 3})
        assert (status, body) == (200, {"id": "i0", "level": 1, "state": "falling_asleep"})
        order = sleeping_record(gateway, "i0")
        assert order is not None
        assert (order.level, order.drain_s, order.requested_by, order.ttl_s) == (1, 3.0, "admin", None)

        waiting = asyncio.create_task(call(gateway, "POST", "/admin/instances/i0/sleep", {"wait_s": 30}))
        await stays(lambda: not waiting.done(), 0.1)
        gateway.unregister("i0")  # as an instance does that falls asleep
        gateway.store.put(sleepers(KEYS) + "i0", SleeperRecord("i0", 2, 7, "here", 0.0).to_json())
        assert (await waiting)[1] == {"id": "i0", "level": 2, "state": "asleep"}
        _, listed = await call(gateway, "GET", "/admin/sleep")
        assert [o["id"] for o in listed["orders"]] == ["i0"]
        assert [(s["id"], s["pid"], s["in_place"]) for s in listed["asleep"]] == [("i0", 7, False)]

        assert (await call(gateway, "POST", "/admin/instances/i0/wake"))[1] == {"id": "i0", "state": "waking"}
        assert sleeping_record(gateway, "i0") is None
        gateway.register(up, "i0")
        _, body = await call(gateway, "POST", "/admin/instances/i0/wake", {"wait_s": 30})
        assert body == {"id": "i0", "state": "serving"}


async def test_an_order_that_is_not_renewed_ends_by_itself(gateway: RunningGateway) -> None:
    """A trainer that dies cannot leave the fleet asleep; one that lives renews by ordering again."""
    async with gateway.instance():
        await call(gateway, "POST", "/admin/instances/i0/sleep", {"ttl_s": 1})
        await call(gateway, "POST", "/admin/instances/i0/sleep", {"ttl_s": 3600})
        await stays(lambda: sleeping_record(gateway, "i0"), 1.5, "the renewed order, without the first one's lease")
        await call(gateway, "POST", "/admin/instances/i0/sleep", {"ttl_s": 1})
        await eventually(lambda: sleeping_record(gateway, "i0") is None)


@pytest.mark.parametrize("what", ["sleep", "wake", "drain", "resume"])
async def test_nobody_is_told_who_is_not_there(gateway: RunningGateway, what: str) -> None:
    status, body = await call(gateway, "POST", f"/admin/instances/nobody/{what}")
    assert (status, body["error"]["code"]) == (404, "unknown_instance")


@pytest.mark.parametrize("body", [{"level": 3}, {"level": "1"}, {"ttl_s": 0}, {"drain_s": -1}, {"deep": True}])
async def test_orders_are_strict(gateway: RunningGateway, body: dict[str, Any]) -> None:
    async with gateway.instance():
        assert (await call(gateway, "POST", "/admin/instances/i0/sleep", body))[0] == 400
        assert sleeping_record(gateway, "i0") is None


async def test_an_order_for_another_instance_wakes_and_sleeps_nobody_else(store: Store) -> None:
    following = asyncio.create_task(ordered(store, KEYS, "i"))
    await store.put(orders(KEYS) + "i2", SleepOrder("i2", 1, 0.0, "test", 0.0).to_json())
    await stays(lambda: not following.done(), 0.2)
    await store.put(orders(KEYS) + "i", ORDER.to_json())
    assert await asyncio.wait_for(following, 60) == ORDER
    sleeping = asyncio.create_task(stay_asleep(store, KEYS, SLEEPER))
    await store.delete(orders(KEYS) + "i2")
    await stays(lambda: not sleeping.done(), 0.2)
    await eventually(lambda: store.get(sleepers(KEYS) + "i"))
    await store.delete(orders(KEYS) + "i")
    await asyncio.wait_for(sleeping, 60)
    assert await store.get(sleepers(KEYS) + "i") is None, "it says that it sleeps, but it is awake"


async def test_a_process_started_under_an_order_waits_before_it_has_an_engine(store: Store, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    await asyncio.wait_for(rest(config), 60)  # without an order it starts
    await store.put(orders(KEYS) + "i", SleepOrder("i", 2, 0.0, "test", 0.0).to_json())
    resting = asyncio.create_task(rest(config))
    await eventually(lambda: store.get(sleepers(KEYS) + "i"))
    assert not resting.done()
    await store.delete(orders(KEYS) + "i")
    await asyncio.wait_for(resting, 60)


async def test_an_instance_starts_although_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.store.etcd_members.CALL_TIMEOUT_S", 0.5)
    config = InstanceConfig(model_dir=Path(), model=MODEL, store="etcd://127.0.0.1:9", instance_id="i")
    await asyncio.wait_for(rest(config), 120)


async def activate(store: Store, number: int, epoch: int) -> None:
    await store.put(KEYS.version(number), version(number).to_json())
    active = ActiveRecord(number, epoch, None, "s", 0.0, fingerprint=f"f{number}")
    await store.put(KEYS.active, active.to_json())


async def serves(store: Store, version: int) -> None:
    """Return when the instance says that it serves that version."""

    async def does() -> bool:
        found = await store.get(KEYS.instance("i"))
        record = InstanceRecord.from_json(found.value) if found else None
        return record is not None and (record.state, record.active_version) == ("SERVING", version)

    await eventually(does, what=f"version {version} is served")


async def asleep(store: Store) -> SleeperRecord:
    return SleeperRecord.from_json((await eventually(lambda: store.get(sleepers(KEYS) + "i"))).value)


async def test_an_engine_with_sleep_mode_sleeps_in_place_and_catches_up(store: Store, tmp_path: Path) -> None:
    """While it sleeps it is in no swap; awake, it serves nothing before it runs what is active then."""
    await activate(store, 1, 1)
    engine, admission = Engine(sleeps_in_place=True), Admission(None)
    sidecar = sidecar_of(config_of(tmp_path), engine, admission)
    async with sidecar.running():
        await serves(store, 1)
        said = await store.get(KEYS.instance("i"))
        assert said is not None
        assert InstanceRecord.from_json(said.value).devices == engine.devices
        await store.put(orders(KEYS) + "i", ORDER.to_json())
        record = await asleep(store)
        assert (record.level, record.in_place) == (1, True)
        assert await store.get(KEYS.instance("i")) is None, "a sleeping instance would hold swaps up"
        assert not admission.admits()
        await activate(store, 2, 2)
        await store.delete(orders(KEYS) + "i")
        await serves(store, 2)
        assert admission.admits()
    assert engine.log == ["stage 1", "run 1", "sleep", "wake", "stage 2", "run 2"]
    assert not sidecar.starts_over


@pytest.mark.parametrize(("in_place", "level"), [(False, 1), (True, 2)])
async def test_otherwise_the_process_ends_to_sleep(store: Store, tmp_path: Path, in_place: bool, level: Any) -> None:
    await activate(store, 1, 1)
    engine = Engine(sleeps_in_place=in_place)
    sidecar = sidecar_of(config_of(tmp_path), engine)
    ended = asyncio.Event()
    sidecar.end = ended.set
    async with sidecar.running():
        await serves(store, 1)
        await store.put(orders(KEYS) + "i", SleepOrder("i", level, 0.0, "test", 0.0).to_json())
        await asyncio.wait_for(ended.wait(), 60)
        assert sidecar.starts_over
        assert await store.get(KEYS.instance("i")) is None
    assert "sleep" not in engine.log
