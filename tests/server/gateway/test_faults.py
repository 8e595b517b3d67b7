"""Faults of the gateway's own code: what it does goes on, whoever waits gets an answer, and that answer has its id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import orjson
import pytest

from server.gateway import UpstreamSettings, app
from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Finished, Stats
from server.gateway.wire.pool import Pool
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway, get, post
from tests.server.gateway.upstream import Link, Received
from tests.waiting import eventually
from weightsync.control.records import InstanceRecord
from weightsync.store import Event, KeyValue

UPSTREAM = UpstreamSettings(scrape_interval_s=3600.0, max_idle_s=3600.0, hold_s=0.0)


class Fault(Exception):
    """An exception that no code expects."""


async def test_a_task_that_fails_begins_again(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet's watcher and the sweeper, for all tasks."""
    failed: list[str] = []
    ahead_s = 0.0
    changed, sweep = Fleet._changed, Pool.sweep

    def fail_once(fleet: Fleet) -> None:
        if "watcher" not in failed:
            failed.append("watcher")
            raise Fault
        changed(fleet)

    def fail_to_sweep_once(pool: Pool, now: float) -> None:
        if "sweeper" not in failed:
            failed.append("sweeper")
            raise Fault
        sweep(pool, now + ahead_s)

    monkeypatch.setattr(Fleet, "_changed", fail_once)
    monkeypatch.setattr(Pool, "sweep", fail_to_sweep_once)
    async with gateway.instance() as up:
        await eventually(lambda: len(failed) == 2)
        gateway.register(up, "i1")
        await eventually(lambda: len(gateway.gateway.default.fleet.serving) == 2)
        assert (await gateway.ask(post())).status == 200
        pools = [i.pool for i in gateway.gateway.default.fleet.instances.values()]
        assert sum(pool.idle for pool in pools) == 1
        ahead_s = 3601.0
        await eventually(lambda: not sum(pool.idle for pool in pools))  # swept after its idle time


async def test_a_fault_in_connecting_ends_the_request(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(pool: Pool) -> None:
        raise Fault

    async with gateway.instance():
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "connect", fail)
            got = await gateway.ask(post())
        assert got.refusal == (500, "internal_error")
        assert gateway.gateway.default.stats.inflight == 0
        assert gateway.gateway.default.fleet.instances["i0"].inflight == 0
        assert (await gateway.ask(post())).status == 200


async def test_an_answer_to_a_fault_of_the_app_has_its_id_and_its_line(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object, *__: object) -> bytes:
        raise Fault

    ends: list[Finished] = []
    gateway.gateway.stats.watchers.append(SimpleNamespace(begin=lambda _: None, end=ends.append))
    monkeypatch.setattr(type(gateway.gateway.document), "get", fail)
    got = await gateway.ask(get("/openapi.json"))
    assert got.refusal == (500, "internal_error")
    (line,) = await eventually(lambda: ends)
    assert (line.request_id, line.status) == (got.headers["x-request-id"], 500)


async def test_readiness_asks_all_instances_at_once_and_for_all_who_ask(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PROBE_TIMEOUT_S", 60.0)  # who is asked after one that is silent is asked too late
    asked = asyncio.Event()

    async def silent(link: Link, _: Received) -> None:
        await asked.wait()

    async def well(link: Link, _: Received) -> None:
        asked.set()
        await link.json()

    async with contextlib.AsyncExitStack() as stack:
        for i in range(8):
            await stack.enter_async_context(gateway.instance(silent, f"a{i}"))
        await stack.enter_async_context(gateway.instance(well, "z"))
        answers = await asyncio.gather(*(gateway.ask(get("/readyz")) for _ in range(20)))
        assert {a.status for a in answers} == {200}
        assert {orjson.loads(a.body)["instance"] for a in answers} == {"z"}


class Burst:
    """A store whose watch tells of many instances at once."""

    async def list(self, _: str) -> tuple[list[KeyValue], int]:
        return [], 0

    async def watch(self, _: str, __: int) -> AsyncIterator[Event]:
        for i in range(64):
            record = InstanceRecord(f"i{i}", "http://127.0.0.1:9", "SERVING", active_version=1, active_epoch=1)
            yield Event("put", KeyValue(KEYS.instance(record.id), record.to_json(), i, i))
        await asyncio.Event().wait()


async def test_records_that_change_together_are_worked_out_once() -> None:
    fleet = Fleet(Burst(), MODEL, UPSTREAM, Stats())  # type: ignore[arg-type]
    changes: list[int] = []
    fleet.on_change = lambda: changes.append(len(fleet.serving))
    task = asyncio.create_task(fleet.run())
    await eventually(lambda: len(fleet.serving) == 64)
    assert changes == [0, 64]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_errors_do_not_say_where_instances_are(gateway: RunningGateway) -> None:
    gateway.register("http://127.0.0.1:9")
    got = await gateway.ask(post())
    assert got.status == 503
    assert b"127.0.0.1" not in got.body
    assert b":9" not in got.body
