"""The fleet as a component: a real gateway, and instances without an engine that obey orders as real ones do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from server.gateway import UpstreamSettings
from server.orders import SleeperRecord, SleepOrder, ordered, orders, stay_asleep
from tests.server.gateway.harness import ADMIN_KEY, KEYS, RunningGateway, running_gateway
from tests.trainer.ranks import Ranks
from tests.waiting import wait_until
from trainer.config import ServingMemory
from trainer.errors import ConfigError, MemoryPlanError
from trainer.memory.serving import Fleet, ServingEngine
from trainer.rewards.scorer import LoopThread
from weightsync import open_store


@dataclass
class Instance:
    """Registered while it serves. It needs `drain_s` to fall asleep; `slept` are the orders it followed."""

    gateway: RunningGateway
    id: str
    drain_s: float
    slept: list[SleepOrder] = field(default_factory=list)

    def register(self) -> None:
        self.gateway.register("http://127.0.0.1:9", self.id)

    async def obey(self) -> None:
        store = open_store(self.gateway.gateway.store.url)
        while True:
            order = await ordered(store, KEYS, self.id)
            self.slept.append(order)
            await store.delete(KEYS.instance(self.id))
            await asyncio.sleep(self.drain_s)
            await stay_asleep(store, KEYS, SleeperRecord(self.id, order.level, 1, "here", 0.0))
            await asyncio.to_thread(self.register)


Starter = Callable[..., Instance]


@pytest.fixture
def start(gateway: RunningGateway) -> Iterator[Starter]:
    """Starts an instance by name; one that is `deaf` does not obey."""
    obeying = LoopThread()

    def one(name: str, *, deaf: bool = False, drain_s: float = 0.0) -> Instance:
        instance = Instance(gateway, name, drain_s)
        instance.register()
        if not deaf:
            obeying.run(instance.obey())
        return instance

    yield one
    obeying.close()


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", ADMIN_KEY)
    settings = UpstreamSettings(scrape_interval_s=3600.0)
    with running_gateway(tmp_path, upstream=settings, run_coordinator=False) as running:
        yield running


def config(gateway: RunningGateway, timeout_s: float = 120.0, ttl_s: float = 60.0, level: int = 2) -> ServingMemory:
    url = f"http://127.0.0.1:{gateway.admin_port}"
    return ServingMemory(admin_url=url, timeout_s=timeout_s, ttl_s=ttl_s, level=1 if level == 1 else 2, drain_s=1.0)


def ordered_now(gateway: RunningGateway) -> list[str]:
    return [kv.key.removeprefix(orders(KEYS)) for kv in gateway.store.list(orders(KEYS))[0]]


@pytest.mark.parametrize(("level", "away"), [(1, "offloaded"), (2, "destroyed")])
def test_the_whole_fleet_sleeps_and_wakes(gateway: RunningGateway, start: Starter, level: int, away: str) -> None:
    instances = [start("a"), start("b")]
    fleet = Fleet(config(gateway, level=level))
    engine = ServingEngine(fleet, 1000, level)
    assert engine.state == "instantiated"
    for turn in (1, 2):
        getattr(engine, engine.leaves)()
        assert engine.state == away
        wait_until(lambda: not gateway.gateway.default.fleet.serving)  # the store has told the trainer
        assert [len(instance.slept) for instance in instances] == [turn, turn]
        assert {(o.level, o.drain_s, o.ttl_s, o.requested_by) for i in instances for o in i.slept} == {
            (level, 1.0, 60.0, "trainer")
        }
        assert ServingEngine(fleet, 1000, level).state == away, "a resumed trainer must find it asleep"
        (engine.reload if level == 1 else engine.instantiate)()
        assert engine.state == "instantiated"
        assert {i.record.id for i in gateway.gateway.default.fleet.serving} == {"a", "b"}
        assert ordered_now(gateway) == []
    fleet.close()


def test_one_that_does_not_obey_is_named_and_nobody_stays_asleep(gateway: RunningGateway, start: Starter) -> None:
    start("good")
    start("deaf", deaf=True)
    engine = ServingEngine(Fleet(config(gateway, timeout_s=0.5)), 1000, 2)
    named = r"deaf(, good)? did not fall asleep within 0\.5 s.*memory\.serving\.timeout_s"  # `good` may be late, too
    with pytest.raises(MemoryPlanError, match=named):
        engine.destroy()
    assert engine.state == "instantiated"
    wait_until(lambda: {i.record.id for i in gateway.gateway.default.fleet.serving} == {"good", "deaf"})


class Often(threading.Event):
    """Has orders renewed thirty times as they last: none ends because a thread of the trainer was late."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(None if timeout is None else timeout / 10)


def test_orders_end_with_the_trainer_that_renews_them(gateway: RunningGateway, start: Starter) -> None:
    instance = start("a")
    fleet = Fleet(config(gateway, ttl_s=6.0))
    fleet._stop = Often()
    fleet.sleep()
    first = SleepOrder.from_json(gateway.store.get(orders(KEYS) + "a").value)  # type: ignore[union-attr]

    def since() -> float:
        found = gateway.store.get(orders(KEYS) + "a")
        return SleepOrder.from_json(found.value).since if found is not None else 0.0

    wait_until(lambda: since() > first.since)
    assert len(instance.slept) == 1, "a renewal must not wake it"
    fleet._end_renewing()  # as if the trainer had been killed
    wait_until(lambda: {i.record.id for i in gateway.gateway.default.fleet.serving} == {"a"}, 60)


def test_orders_are_renewed_while_requests_end(gateway: RunningGateway, start: Starter) -> None:
    instance = start("a", drain_s=7.0)
    fleet = Fleet(config(gateway, ttl_s=6.0))
    fleet._stop = Often()
    fleet.sleep()
    assert len(instance.slept) == 1
    fleet.wake()
    fleet.close()


def test_closing_wakes_who_sleeps(gateway: RunningGateway, start: Starter) -> None:
    start("a")
    fleet = Fleet(config(gateway))
    fleet.sleep()
    fleet.close()
    wait_until(lambda: {i.record.id for i in gateway.gateway.default.fleet.serving} == {"a"})


@pytest.mark.parametrize(("budget_gib", "room"), [(1.0, False), (1.1, True)])
def test_a_server_makes_room_before_the_engine_is_built(
    gateway: RunningGateway,
    start: Starter,
    two_ranks: Ranks,
    tiny_model: str,
    tmp_path: Path,
    budget_gib: float,
    room: bool,
) -> None:
    """On rank 0's order, which all ranks know of."""
    instance = start("a")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(ADMIN_KEY)
    section = msgspec.structs.replace(config(gateway), engine_gib=0.5, kv_cache_gib=0.5, admin_key_file=str(key))
    memory = {"budget_gib": budget_gib, "serving": msgspec.to_builtins(section)}
    found = two_ranks.call("opened", path=tiny_model, parallel={"data": 2}, memory=memory)
    state = "instantiated" if room else "destroyed"
    assert found == [[["engine", state], ["kv_cache", state]]] * 2
    assert len(instance.slept) == (0 if room else 1)


def test_what_cannot_be_asked_is_said(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryPlanError, match="has no instances"):
        Fleet(config(gateway)).sleep()
    nowhere = ServingMemory(admin_url="http://127.0.0.1:9", timeout_s=0.2)
    with pytest.raises(MemoryPlanError, match=r"does not answer.*memory\.serving\.admin_url"):
        Fleet(nowhere).sleep()
    unknown = ServingMemory(admin_url=nowhere.admin_url, instances=("x",))
    with pytest.raises(MemoryPlanError, match="404"):
        Fleet(ServingMemory(admin_url=config(gateway).admin_url, instances=unknown.instances)).sleep()
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", "wrong")
    with pytest.raises(MemoryPlanError, match="401"):
        Fleet(config(gateway)).sleep()
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY")
    with pytest.raises(ConfigError, match=r"memory\.serving.*admin_key_file"):
        Fleet(config(gateway))
