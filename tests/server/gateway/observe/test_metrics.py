"""Histograms of latency, counts of tokens, and what is told of swaps: from the bytes and records they are made of."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from tests.server.gateway.harness import KEYS, RunningGateway, get, post, running_gateway
from tests.server.gateway.observe.test_observe import samples
from tests.server.gateway.upstream import Link, Received
from tests.waiting import eventually, wait_until
from weightsync.control.records import ActiveRecord, DiskRecord, SwapPhase, SwapRecord


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, run_coordinator=False) as g:
        yield g


class Stepwise:
    """Sends a piece, and the next one when it is told that the client has this one."""

    def __init__(self, *pieces: bytes, cut: bool = False) -> None:
        self.pieces, self.cut = pieces, cut
        self.taken = asyncio.Semaphore(0)

    async def __call__(self, link: Link, _: Received) -> None:
        await link.sse_head()
        for piece in self.pieces:
            await link.chunk(piece)
            await self.taken.acquire()
        if self.cut:
            link.cut()
        else:
            await link.end()


async def read_stepwise(gateway: RunningGateway, instance: Stepwise, path: str) -> None:
    """Asks `path`, and takes the answer piece by piece."""
    reader, writer = await gateway.connect()
    writer.write(post(path))
    for piece in instance.pieces:
        await asyncio.wait_for(reader.readuntil(piece), 10)
        instance.taken.release()
    await asyncio.wait_for(reader.read(16), 10)
    writer.close()
    await eventually(lambda: gateway.gateway.default.stats.inflight == 0)


async def test_a_stream_is_counted_token_by_token(gateway: RunningGateway) -> None:
    last = orjson.dumps({"choices": [], "hotswap_usage": {"prompt_tokens": 11, "completion_tokens": 3}})
    instance = Stepwise(b"data: 1\n\n", b"data: 2\n\n", b"data: " + last + b"\n\n")
    async with gateway.instance(instance):
        await read_stepwise(gateway, instance, "/v1/completions")
    found = await samples(gateway)
    assert found["gateway_time_to_first_token_seconds_count"][()] == 1
    assert found["gateway_time_to_first_byte_seconds_count"][()] == 1
    # The end of the body, too, where it came by itself.
    assert found["gateway_inter_token_latency_seconds_count"][()] in (2, 3)
    assert found["gateway_request_duration_seconds_count"][()] == 1
    route = ("/v1/completions",)
    assert found["gateway_prompt_tokens_total"] == {route: 11}
    assert found["gateway_completion_tokens_total"] == {route: 3}
    assert found["gateway_estimated_completion_tokens_total"] == {route: 0}


async def test_tokens_of_a_broken_stream_stand_apart(gateway: RunningGateway) -> None:
    instance = Stepwise(*(b"data: %d\n\n" % i for i in range(4)), cut=True)
    async with gateway.instance(instance):
        await read_stepwise(gateway, instance, "/v1/chat/completions")
    found = await samples(gateway)
    assert found["gateway_completion_tokens_total"] == {("/v1/chat/completions",): 0}
    assert found["gateway_estimated_completion_tokens_total"] == {("/v1/chat/completions",): 4}


async def test_a_whole_answer_has_no_gaps_and_no_first_token(gateway: RunningGateway) -> None:
    async def whole(link: Link, received: Received) -> None:
        await link.json(orjson.dumps({"usage": {"prompt_tokens": 2, "completion_tokens": 1}, "data": received.target}))

    async with gateway.instance(whole):
        for raw in (post(), post("/v1/embeddings"), get("/v1/models"), get("/v1/responses/r1")):
            await gateway.ask(raw)
    found = await samples(gateway)
    assert found["gateway_time_to_first_byte_seconds_count"][()] == 4
    assert found["gateway_time_to_first_token_seconds_count"][()] == 0
    assert found["gateway_inter_token_latency_seconds_count"][()] == 0
    # What was generated before is not counted a second time when it is fetched.
    assert found["gateway_prompt_tokens_total"] == {("/v1/completions",): 2, ("/v1/embeddings",): 2}


async def test_phases_and_stalls_of_swaps(gateway: RunningGateway) -> None:
    record = SwapRecord(id="s0", target=2, phase="done", participants=("i0",), deadline=0.0, opened_at=0.0)

    def seen(swap: SwapRecord) -> bool:
        return gateway.gateway.default.fleet.swap == swap

    def put(swap_id: str, phase: SwapPhase) -> None:
        swap = replace(record, id=swap_id, phase=phase)
        gateway.store.put(KEYS.swap, swap.to_json())
        wait_until(lambda: seen(swap))

    put("s0", "done")  # before anybody looked
    gateway.register("http://127.0.0.1:9", "i0", commit_ms=90.0)
    put("s1", "prepare")
    put("s1", "canary")
    put("s1", "commit")
    gateway.register("http://127.0.0.1:9", "i0", commit_ms=4.0, active_epoch=2, active_version=2)
    gateway.register("http://127.0.0.1:9", "i0", commit_ms=4.0, active_epoch=2, active_version=2, state="STAGING")
    put("s1", "done")
    put("s2", "prepare")
    put("s2", "aborted")
    found = await samples(gateway)
    assert found["swap_phase_duration_seconds_count"] == {("prepare",): 2, ("canary",): 1, ("commit",): 1}
    assert found["swaps_total"] == {("done",): 1, ("aborted",): 1}
    assert found["swap_duration_seconds_count"][()] == 2
    assert found["swap_stall_seconds_count"][()] == 1
    assert found["swap_stall_seconds_sum"][()] == pytest.approx(0.004)


async def test_what_hosts_have_on_disk(gateway: RunningGateway) -> None:
    gateway.store.put(KEYS.active, ActiveRecord(3, 1, None, "swap", 0.0).to_json())
    disks = gateway.gateway.default.fleet.disks
    for versions, current in (((1, 2), 0.0), ((2, 3), 1.0)):
        record = DiskRecord("", "/copies", versions, 4096, 0.0, wanted=3, failures=1)
        gateway.store.put(KEYS.disk(""), record.to_json())
        await eventually(lambda record=record: disks.get("-") == record)  # type: ignore[misc]
        found = await samples(gateway)
        wanted = {"disk_current": current, "disk_bytes": 4096.0, "disk_failures_total": 1.0}
        assert {name: found[name]["-",] for name in wanted} == wanted


async def test_the_page_says_what_runs(gateway: RunningGateway) -> None:
    page = (await gateway.ask(get("/metrics"))).body.decode()
    assert re.search(r'^hotswap_build_info\{python="[^"]+",version="(\d[^"]*|unknown)"\} 1\.0$', page, re.MULTILINE)
