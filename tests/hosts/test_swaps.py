"""Swaps between hosts with an etcd of three: a leader cut off, a minority cut off, links that lose and delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loadtest.hosts.etcd import Etcd
from loadtest.hosts.namespaces import Hosts, Program
from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, MODEL, Engine, Fleet, running_fleet
from tests.weightsync.tensors import model
from weightsync import Coordinator, Publisher
from weightsync.control.records import ActiveRecord, LeaderRecord
from weightsync.errors import StoreError, StoreUnavailable

CANDIDATE = "tests.weightsync.control.coordinator_process"
INSTANCE = "tests.hosts.programs", "instance"
TTL_S = 2.0  # etcd's shortest
WAIT_S = 120.0
Start = Callable[..., Program]

pytestmark = pytest.mark.usefixtures("arena_directory")


async def publish(url: str, value: float) -> int:
    """A version, ready and not yet wanted."""

    def made() -> int:
        with Publisher(url, model=MODEL) as publisher:
            return publisher.publish(model(value), activate=False)

    return await asyncio.to_thread(made)


async def activate(fleet: Fleet, version: int) -> None:
    """Again after an answer that was lost, which may have been a yes."""
    store = fleet.store()
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                report = await Coordinator(store, MODEL).activate(version, deadline_s=WAIT_S)
            except StoreUnavailable:
                continue
            assert report.ok, report.reason
            return


async def leads(fleet: Fleet, candidate: Program) -> bool:
    try:
        found = await fleet.store().get(KEYS.leader)
    except StoreError:
        return False
    return found is not None and f":{candidate.process.pid}:" in LeaderRecord.from_json(found.value).holder


async def runs(instance: Program, version: int) -> None:
    """Waits until it does."""

    async def state() -> bool:
        return bool((await asyncio.to_thread(instance.ask, "state"))["running"] == version)

    await eventually(state, WAIT_S)


async def test_a_leader_that_is_cut_off_in_a_swap_is_followed_by_one_that_ends_it(
    hosts: Hosts, etcd: Etcd, start: Start
) -> None:
    url = etcd.url("leader", last=0)
    first = start(0, CANDIDATE, etcd.url("leader"), TTL_S)
    assert await asyncio.to_thread(first.line) == "leads"
    second = start(1, CANDIDATE, url, 60.0)  # it keeps its lease on a busy machine
    async with running_fleet(url) as fleet:
        engine = await fleet.instance("a", Engine(hang=asyncio.Event()), ttl_s=60)
        swap = asyncio.create_task(activate(fleet, await publish(url, 1.0)))
        await eventually(lambda: fleet.participants["a"].record.state == "STAGING", WAIT_S)
        hosts.cut(0)
        assert await asyncio.to_thread(second.line) == "leads"
        assert engine.hang is not None
        engine.hang.set()
        await swap
        await eventually(lambda: engine.running == 1, WAIT_S)
        hosts.heal(0)
        await asyncio.to_thread(etcd.settle)
        await activate(fleet, await publish(url, 2.0))
        await eventually(lambda: engine.running == 2, WAIT_S)
        assert await leads(fleet, second)


@pytest.mark.broad
async def test_a_host_cut_off_serves_on_without_a_store_and_catches_up_when_it_is_back(
    hosts: Hosts, etcd: Etcd, start: Start
) -> None:
    url = etcd.url("minority", last=2)
    async with running_fleet(url) as fleet:
        fleet.coordinator(leader_ttl_s=TTL_S)
        near = await fleet.instance("near", ttl_s=60)
        far = start(2, *INSTANCE, etcd.url("minority"), "far", TTL_S)
        assert await asyncio.to_thread(far.line) == "serves"
        await activate(fleet, await publish(url, 1.0))
        await runs(far, 1)
        hosts.cut(2)
        assert await asyncio.to_thread(far.ask, "store") == "store_unavailable"
        store = fleet.store()

        async def record_gone() -> bool:
            return await store.get(KEYS.instance("far")) is None

        await eventually(record_gone, WAIT_S)
        await activate(fleet, await publish(url, 2.0))
        await eventually(lambda: near.running == 2, WAIT_S)
        assert await asyncio.to_thread(far.ask, "state") == {"running": 1, "state": "SERVING"}
        hosts.heal(2)
        await runs(far, 2)
        assert await asyncio.to_thread(far.ask, "store") == "ok"


@pytest.mark.broad
async def test_a_swap_commits_over_links_that_lose_and_delay(hosts: Hosts, etcd: Etcd, start: Start) -> None:
    url = etcd.url("bad-links")
    candidate = start(0, CANDIDATE, url, 10.0)
    instances = [start(host, *INSTANCE, url, f"i{host}", 30.0) for host in (1, 2)]
    lines = [await asyncio.to_thread(program.line) for program in (candidate, *instances)]
    assert lines == ["leads", "serves", "serves"]
    version = await publish(url, 1.0)
    for host in range(3):
        hosts.shape(host, delay_ms=10, loss=0.05)  # between two hosts: 20 ms each way, and one frame in ten lost
    async with running_fleet(url) as fleet:
        await activate(fleet, version)
        for instance in instances:
            await runs(instance, version)
        active = await fleet.store().get(KEYS.active)
        assert active is not None
        assert ActiveRecord.from_json(active.value).version == version
