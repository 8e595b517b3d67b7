"""Requests that come while no instance can be asked: held until one can, for a bounded time, in bounded number."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import pytest

from server.errors import HttpError
from server.gateway import UpstreamSettings
from server.gateway.fleet import retries
from server.gateway.fleet.retries import Patience, WaitingRoom
from tests.server.gateway.harness import KEYS, RunningGateway, get, post
from tests.server.gateway.upstream import Answer, Link, Received, upstream
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, DeviceRecord

UPSTREAM = UpstreamSettings(scrape_interval_s=3600.0, hold_s=60.0, max_held=2)
SHORT = UpstreamSettings(scrape_interval_s=3600.0, hold_s=0.3)


async def held(gateway: RunningGateway) -> asyncio.Task[Answer]:
    """The answer to a request that waits."""
    before = len(gateway.gateway.default.fleet.room)
    answer = asyncio.create_task(gateway.ask(post(body={"prompt": "x"})))
    await eventually(lambda: len(gateway.gateway.default.fleet.room) == before + 1)
    return answer


async def test_a_gateway_that_never_saw_an_instance_answers_at_once(gateway: RunningGateway) -> None:
    answer = await gateway.ask(post())
    assert answer.refusal == (503, "no_instance")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("state", ["STARTING", "COMMITTING", "TORN", "DRAINING", "STOPPED"])
async def test_held_until_it_serves(gateway: RunningGateway, state: str) -> None:
    async with gateway.instance(state=state) as up:
        answer = await held(gateway)
        assert up.requests == []
        gateway.register(up)
        assert (await answer).status == 200
        assert up.requests[0].body == b'{"prompt":"x"}'
        assert gateway.gateway.default.stats.holds["fleet", "served"] == 1


async def test_held_while_the_only_instance_restarts(gateway: RunningGateway) -> None:
    async with gateway.instance() as up, upstream() as restarted:
        gateway.unregister()
        answer = await held(gateway)
        gateway.register(restarted)
        assert (await answer).status == 200
        assert (up.requests, len(restarted.requests)) == ([], 1)


async def test_held_until_a_stale_instance_has_caught_up(gateway: RunningGateway) -> None:
    async with upstream() as up:
        active = ActiveRecord(2, 2, previous=1, swap_id="s", committed_at=0.0, fingerprint="f2")
        gateway.store.put(KEYS.active, active.to_json())
        for stale in ({"active_epoch": 1}, {"active_epoch": 2, "active_version": 2, "fingerprint": "f1"}):
            gateway.register(up, **stale)
            answer = await held(gateway)
            assert up.requests == []
            gateway.register(up, active_version=2, active_epoch=2, fingerprint="f2")
            assert (await answer).status == 200
            up.requests.clear()


async def test_a_connection_refused_is_held_for_who_comes_next(gateway: RunningGateway) -> None:
    async with upstream() as up:
        gateway.register("http://127.0.0.1:1", "dead")
        gateway.register(up, "flipping", state="COMMITTING")
        answer = await held(gateway)
        gateway.register(up, "flipping")
        assert (await answer).status == 200


async def test_held_after_a_refusal_which_leaves_its_connection_good(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only instance has other weights than the gateway believes: the request waits until it says so itself."""
    monkeypatch.setattr(retries, "RETRY_S", 60.0)  # until the test has seen it held
    refusals = [b"x-hotswap-refused: version\r\n"]

    async def refuses_once(link: Link, _: Received) -> None:
        if refusals:
            await link.json(b'{"error":{}}', b"409 Conflict", refusals.pop())
        else:
            await link.json()

    async with gateway.instance(refuses_once) as up:
        answer = await held(gateway)
        gateway.register(up, active_version=2, active_epoch=2)
        assert (await answer).status == 200
        assert (len(up.requests), up.connections) == (2, 1)


async def test_who_was_turned_away_by_one_that_looked_well_tries_again_before_anything_changes() -> None:
    room, woken = WaitingRoom(1), asyncio.Event()
    held = Mock(started=time.monotonic(), wake=woken.set)
    room.enter(held, Patience("fleet", 3600.0, HttpError(503, "nobody came")), soon=True)
    async with asyncio.timeout(60):
        await woken.wait()
    room.leave(held)
    assert len(room) == 0


@pytest.mark.parametrize("gateway", [SHORT], indirect=True)
async def test_the_hold_is_over(gateway: RunningGateway) -> None:
    async with gateway.instance(state="STARTING"):
        answer = await gateway.ask(post())
        assert answer.refusal == (503, "no_instance")
        assert "i0 is STARTING" in answer.error["message"]
        assert gateway.gateway.default.stats.holds["fleet", "refused"] == 1
        gateway.register("http://127.0.0.1:1")
        assert (await gateway.ask(post())).refusal == (503, "instance_unreachable")
        answer = await gateway.ask(post(headers="X-Hotswap-Version: 1\r\nX-Hotswap-Wait-S: 0.2\r\n"))
        assert answer.refusal == (504, "version_wait_timeout")


@pytest.mark.parametrize("gateway", [SHORT], indirect=True)
async def test_who_has_just_left_is_not_to_be_started(gateway: RunningGateway) -> None:
    assert "start one" in (await gateway.ask(post())).error["message"]
    gateway.register("http://127.0.0.1:1")
    gateway.unregister()
    answer = await gateway.ask(post())
    assert answer.refusal == (503, "no_instance")
    assert "Try again" in answer.error["message"]
    assert "start one" not in answer.error["message"]


async def test_those_held_are_bounded(gateway: RunningGateway) -> None:
    async with gateway.instance(state="STARTING") as up:
        clients = [await held(gateway) for _ in range(2)]
        assert (await gateway.ask(post())).refusal == (503, "overloaded")
        gateway.register(up)
        for answer in clients:
            assert (await answer).status == 200


async def test_what_metrics_say(gateway: RunningGateway) -> None:
    active = ActiveRecord(2, 2, previous=1, swap_id="s", committed_at=0.0)
    gateway.store.put(KEYS.active, active.to_json())
    async with gateway.instance(instance_id="stale", active_version=1, active_epoch=1) as up:
        answer = await held(gateway)
        assert {
            'hotswap_gateway_held{model="toy"} 1.0',
            'hotswap_instance_fresh{instance_id="stale",model="toy"} 0.0',
        } <= await metrics(gateway)
        ranks = (DeviceRecord("GPU-8a", 1), DeviceRecord("MIG-51", 0, "b"))
        gateway.register(up, "fresh", active_version=2, active_epoch=2, devices=ranks)
        assert (await answer).status == 200
        of_rank = (
            'hotswap_instance_device{{device="{}",host="{}",instance_id="fresh",model="toy",rank="{}",uuid="{}"}} 1.0'
        )
        assert await metrics(gateway) >= {
            of_rank.format(1, "", 0, "GPU-8a"),
            of_rank.format(0, "b", 1, "MIG-51"),
            'hotswap_gateway_held{model="toy"} 0.0',
            'hotswap_gateway_holds_total{for="fleet",model="toy",outcome="served"} 1.0',
            'hotswap_gateway_hold_seconds_count{model="toy"} 1.0',
            'hotswap_instance_active_epoch{instance_id="stale",model="toy"} 1.0',
            'hotswap_instance_active_epoch{instance_id="fresh",model="toy"} 2.0',
            'hotswap_instance_fresh{instance_id="fresh",model="toy"} 1.0',
            'hotswap_instance_eligible{instance_id="stale",model="toy"} 0.0',
            'hotswap_instance_eligible{instance_id="fresh",model="toy"} 1.0',
            'hotswap_gateway_version_refusals_total{instance_id="fresh",model="toy"} 0.0',
            'hotswap_gateway_refusal_retries_total{model="toy"} 0.0',
        }


async def metrics(gateway: RunningGateway) -> set[str]:
    return set((await gateway.ask(get("/metrics"))).body.decode().splitlines())
