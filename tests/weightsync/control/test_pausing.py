"""Pauses: they hold while somebody holds them, and end with whoever that was, whatever dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.etcd import Etcd
from tests.waiting import eventually, stays
from tests.weightsync.fleet import KEYS, MODEL, Engine, Fleet, Participant, running_fleet
from weightsync.control.pauses import Pauses
from weightsync.control.records import InstanceRecord, PauseRecord
from weightsync.store.protocol import KeyValue, Store


async def hold(store: Store, name: str, ttl_s: float, lease_s: float | None = None) -> int:
    """Pause as the admin API does; returns the lease. Its time is that of the pause, unless `lease_s` says another."""
    lease = await store.grant_lease(lease_s or ttl_s)
    await store.put(KEYS.pause(name), PauseRecord(name, "test", ttl_s, 0.0).to_json(), lease)
    return lease


def kv(name: str, ttl_s: float) -> KeyValue:
    return KeyValue(KEYS.pause(name), PauseRecord(name, "test", ttl_s, 0.0).to_json(), 1, 1)


def test_a_pause_holds_for_its_time_after_it_was_last_seen() -> None:
    pauses = Pauses()
    assert (pauses.wanted(0.0), pauses.left_s(0.0)) == (False, None)
    pauses.see([kv("a", 5.0), kv("b", 9.0)], now=10.0)
    assert (pauses.wanted(14.9), pauses.left_s(14.0)) == (True, 1.0)
    assert (pauses.wanted(16.0), pauses.left_s(16.0)) == (True, 3.0)
    assert (pauses.wanted(19.0), pauses.left_s(19.0)) == (False, None)
    pauses.see([kv("a", 5.0)], now=18.0)
    assert pauses.wanted(22.9)
    pauses.see([], now=19.0)
    assert not pauses.wanted(19.0)
    pauses.see([KeyValue(KEYS.pause("a"), b"{}", 1, 1)], now=0.0)
    assert not pauses.wanted(0.0), "a record that cannot be read pauses nothing"


async def test_instances_pause_while_any_pause_is_held(fleet: Fleet) -> None:
    engines = await fleet.instances("ab")
    store = fleet.store()
    first, second = await hold(store, "p", 600), await hold(store, "q", 600)
    await eventually(lambda: all(e.paused for e in engines))
    await store.revoke(first)
    await stays(lambda: all(e.paused for e in engines), 0.2)
    await store.revoke(second)
    await eventually(lambda: not any(e.paused for e in engines))
    assert [e.calls for e in engines] == [[("pause", 0), ("resume", 0)]] * 2


async def test_one_that_joins_a_paused_fleet_pauses_until_it_leaves(fleet: Fleet) -> None:
    await hold(fleet.store(), "p", 600)
    engine = await fleet.instance("late")
    await eventually(lambda: engine.paused)
    assert fleet.participants["late"].paused
    await fleet.participants["late"].stop()
    assert not engine.paused


async def test_a_pause_ends_with_its_owner(fleet: Fleet) -> None:
    engine = await fleet.instance("a")
    store = fleet.store()
    await hold(store, "p", 600)
    await eventually(lambda: engine.paused)
    await hold(store, "p", 1.0)  # and no task renews it
    await eventually(lambda: not engine.paused)


async def test_one_that_loses_the_store_resumes_when_the_time_of_the_pause_is_over(
    fleet: Fleet, tmp_path: Path
) -> None:
    engine = await fleet.instance("a")
    await hold(fleet.store(), "p", 0.5, lease_s=600)
    await eventually(lambda: engine.paused)
    os.rename(tmp_path / "store.db", tmp_path / "away.db")
    await eventually(lambda: not engine.paused)
    assert not (tmp_path / "store.db").exists()


async def test_one_whose_store_does_not_answer_resumes_too(server: Etcd) -> None:
    """A frozen etcd refuses nothing and says nothing."""
    async with running_fleet(server.url("fleet")) as fleet:
        engine = await fleet.instance("a")
        await hold(fleet.store(), "p", 1.0, lease_s=600)
        await eventually(lambda: engine.paused)
        server.freeze()
        await eventually(lambda: not engine.paused, 30)
        server.thaw()


async def test_a_resume_that_fails_is_tried_again(fleet: Fleet) -> None:
    class Stubborn(Engine):
        async def resume(self) -> None:
            self.calls.append(("resume", 0))
            if self.calls.count(("resume", 0)) < 3:
                raise RuntimeError("busy")
            self.paused = False

    engine = await fleet.instance("a", Stubborn())
    store = fleet.store()
    lease = await hold(store, "p", 600)
    await eventually(lambda: engine.paused)
    await store.revoke(lease)
    await eventually(lambda: not engine.paused)


@pytest.mark.parametrize("mode", ["together", "rolling"])
async def test_a_paused_fleet_swaps(fleet: Fleet, mode: str) -> None:
    coordinator = await fleet.serving("a")
    engine = fleet.engines["a"]
    await hold(fleet.store(), "p", 600)
    await eventually(lambda: engine.paused)
    version = await fleet.publish()
    assert (await coordinator.activate(version, mode=mode)).ok  # type: ignore[arg-type]
    assert (engine.running, engine.paused) == (version, True)


async def test_pause_and_resume_come_together(fleet: Fleet) -> None:
    engine = Engine()
    with pytest.raises(TypeError, match="both pause and resume"):
        Participant(fleet.store(), MODEL, InstanceRecord("a", "x"), engine.stage, engine.commit, pause=engine.pause)
