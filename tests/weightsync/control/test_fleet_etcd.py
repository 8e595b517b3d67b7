"""A fleet on etcd: through an outage, with leases that end by themselves, and with more instances than etcd takes
operations in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd
from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, Engine, Fleet, before_the_commit, running_fleet
from weightsync.errors import StoreRefused, SwapAborted


@pytest.fixture
def server(request: pytest.FixtureRequest, arena_directory: Path) -> Iterator[Etcd]:
    """An etcd of this test's own, with these flags."""
    etcd = Etcd(flags=getattr(request, "param", ()))
    yield etcd
    etcd.close()


async def test_a_swap_outlives_a_kill_and_restart_of_etcd(server: Etcd) -> None:
    url = server.url("fleet")
    async with running_fleet(url) as fleet:
        fleet.coordinator()
        engine = await fleet.instance("a", Engine(hang=asyncio.Event()), ttl_s=30)
        publishing = asyncio.create_task(fleet.publish(activate=True, timeout_s=60))
        await eventually(lambda: engine.calls)
        await asyncio.to_thread(server.restart)
        engine.go_on()
        assert await publishing == 1
        await eventually(lambda: engine.running == 1)
        assert await fleet.publish(activate=True, timeout_s=60) == engine.running == 2


async def test_a_lease_that_ends_between_decision_and_commit(
    etcd: Etcd, arena_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd deletes the record by itself, and no compare sees that. The instance lives, registers anew and follows."""
    url = etcd.url("ended")
    async with running_fleet(url) as fleet:
        store = fleet.coordinator()._store
        engines = [await fleet.instance(name, ttl_s=6) for name in ("a", "b")]
        lease = fleet.participants["b"]._lease
        assert lease is not None
        before_the_commit(store, monkeypatch, lambda: store.revoke(lease.id))
        assert await fleet.publish(activate=True, timeout_s=30) == 1
        await eventually(lambda: [e.running for e in engines] == [1, 1])


@pytest.mark.parametrize("server", [("--max-txn-ops=12",)], indirect=True)
async def test_a_commit_is_no_larger_for_a_larger_fleet(server: Etcd) -> None:
    async with running_fleet(server.url("large")) as fleet:
        fleet.coordinator()
        engines = await fleet.instances("abcdefghijklmn")
        for value in (1.0, 2.0, 3.0, 4.0):  # with the fourth, a version retires
            version = await fleet.publish(value, activate=True, timeout_s=30)
            assert {engine.running for engine in engines} == {version}


async def test_a_commit_that_the_store_refuses_aborts_the_swap_and_says_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody flips, and the next swap is committed."""
    coordinator, engine = fleet.coordinator(), await fleet.instance("a")

    async def refuse() -> None:
        raise StoreRefused("etcd://x", "request is too large", "Start etcd with a larger --max-request-bytes")

    before_the_commit(coordinator._store, monkeypatch, refuse)
    with pytest.raises(SwapAborted, match="--max-request-bytes"):
        await fleet.publish(activate=True, timeout_s=30)
    assert await fleet.store().get(KEYS.active) is None
    assert engine.running is None
    assert await fleet.publish(activate=True, timeout_s=30) == engine.running
