"""A fleet on etcd: publisher, coordinator and instances as on SQLite, and through an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import Etcd
from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, Engine, running_fleet
from tests.weightsync.tensors import model
from weightsync import Publisher


@pytest.fixture
def server(arena_directory: Path) -> Iterator[Etcd]:
    """An etcd that this test may harm."""
    etcd = Etcd()
    yield etcd
    etcd.close()


async def test_versions_are_published_activated_and_rolled_back(etcd: Etcd, arena_directory: Path) -> None:
    url = etcd.url("fleet")
    async with running_fleet(url) as fleet:
        coordinator = fleet.coordinator()
        engines = [await fleet.instance(name) for name in ("a", "b")]
        publisher = await asyncio.to_thread(Publisher, url, model="demo")
        for step in (1, 2):
            assert await asyncio.to_thread(publisher.publish, model(step), timeout_s=30) == step
        assert [e.running for e in engines] == [2, 2]
        report = await coordinator.rollback()
        assert (report.ok, report.version, report.epoch) == (True, 1, 3)
        assert [e.running for e in engines] == [1, 1]
        await asyncio.to_thread(publisher.close)


async def test_a_swap_outlives_a_kill_and_restart_of_etcd(server: Etcd) -> None:
    url = server.url("fleet")
    async with running_fleet(url) as fleet:
        fleet.coordinator()
        engine = await fleet.instance("a", Engine(hang=asyncio.Event()), ttl_s=30)
        publisher = await asyncio.to_thread(Publisher, url, model="demo")
        publishing = asyncio.create_task(asyncio.to_thread(publisher.publish, model(), timeout_s=60))
        await eventually(lambda: engine.calls)
        await asyncio.to_thread(server.restart)
        assert engine.hang is not None
        engine.hang.set()
        assert await publishing == 1
        await eventually(lambda: engine.running == 1)
        assert await asyncio.to_thread(publisher.publish, model(1.0), timeout_s=60) == 2
        assert engine.running == 2
        await asyncio.to_thread(publisher.close)


async def test_a_lease_that_ends_between_decision_and_commit(
    etcd: Etcd, arena_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd deletes the record by itself, and no compare sees that. The instance lives, registers anew and follows."""
    url = etcd.url("ended")
    async with running_fleet(url) as fleet:
        store = fleet.coordinator()._store
        engines = [await fleet.instance(name, ttl_s=6) for name in ("a", "b")]
        lease, real = fleet.participants["b"]._lease, store.txn
        assert lease is not None

        async def txn(compares: Mapping[str, int], puts: Mapping[str, bytes | None], *leases: Any) -> int:
            if KEYS.active in puts:
                await store.revoke(lease.id)
            return await real(compares, puts, *leases)

        monkeypatch.setattr(store, "txn", txn)
        publisher = await asyncio.to_thread(Publisher, url, model="demo")
        assert await asyncio.to_thread(publisher.publish, model(1.0), timeout_s=30) == 1
        await eventually(lambda: [e.running for e in engines] == [1, 1])
        await asyncio.to_thread(publisher.close)
