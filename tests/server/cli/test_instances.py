"""`hotswap instances` against a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import instances
from server.cli.app import app
from server.errors import CliError
from server.gateway import UpstreamSettings
from server.orders import SleeperRecord, sleepers
from server.up.paths import ServerInfo
from tests.server.gateway.harness import ADMIN_KEY, KEYS, RunningGateway, post, running_gateway
from tests.server.gateway.upstream import Link, Received
from tests.waiting import eventually, wait_until
from weightsync.control.records import (
    ActiveRecord,
    DeviceRecord,
    ErrorInfo,
    PastSwapRecord,
    ShareRecord,
    SplitRecord,
    VersionRecord,
)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(instances, "SETTLED_S", 0.3)
    monkeypatch.setattr(instances, "POLL_S", 0.02)
    with running_gateway(tmp_path, upstream=UpstreamSettings(scrape_interval_s=0.02), run_coordinator=False) as g:
        yield g


async def run(gateway: RunningGateway, *arguments: str) -> str:
    where = ["--url", f"http://127.0.0.1:{gateway.admin_port}", "--admin-key-file", "/dev/null"]
    done = await asyncio.to_thread(CliRunner().invoke, app, ["instances", *arguments, *where], terminal_width=200)
    if done.exception is not None:
        raise done.exception
    return done.output


class Engine:
    """Answers requests when it is told to; says on `/metrics` how many it has."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.running = 0

    async def __call__(self, link: Link, received: Received) -> None:
        if received.target == "/metrics":
            await link.json(b"vllm:num_requests_running %d\n" % self.running)
            return
        if received.method == "POST":
            self.running += 1
            await self.release.wait()
            self.running -= 1
        await link.json()


async def test_list_drain_resume(gateway: RunningGateway) -> None:
    async with gateway.instance(Engine(), "left") as up:
        gateway.register(up, "right", state="STARTING")
        out = await run(gateway, "list")
        assert "left" in out
        assert "STARTING (gets no requests)" in out
        assert "left gets no new requests\n" in await run(gateway, "drain", "left")
        wait_until(lambda: not gateway.gateway.default.fleet.serving)
        assert "DRAINING" in await run(gateway, "list")
        assert "left gets requests again" in await run(gateway, "resume", "left")
        wait_until(lambda: len(gateway.gateway.default.fleet.serving) == 1)
        gateway.register(up, "left", state="DRAINING")
        assert "about to stop by itself" in await run(gateway, "resume", "left")


async def test_the_list_says_how_many_versions_have_room_on_gpus(gateway: RunningGateway) -> None:
    async with gateway.instance(Engine(), "on-a-cpu") as up:
        assert "copies" not in await run(gateway, "list")
        gateway.register(up, "on-a-gpu", device_copies=0)
        wait_until(lambda: len(gateway.gateway.default.fleet.serving) == 2)
        out = (await run(gateway, "list")).splitlines()
        assert next(line for line in out if "instance" in line).split()[-1] == "copies"
        assert next(line for line in out if "on-a-gpu" in line).split()[-1] == "0"


async def test_each_instance_is_listed_with_its_gpus(gateway: RunningGateway) -> None:
    ranks = (DeviceRecord("GPU-8a", 0, "a"), DeviceRecord("GPU-51", 0, "b"))
    async with gateway.instance(Engine(), "one", devices=(DeviceRecord("GPU-99", 2),)) as up:
        gateway.register(up, "apart", devices=ranks)
        gateway.register(up, "unknown", devices=(DeviceRecord("GPU-03"),))
        gateway.register(up, "cpu")
        lines = (await run(gateway, "list")).splitlines()
    assert [line for line in lines if ": on " in line] == [
        "one: on GPU 2 (GPU-99)",
        "apart: on GPU 0 (GPU-8a) of a, GPU 0 (GPU-51) of b",
        "unknown: on GPU-03",
    ]


async def test_status_shows_shares_and_who_answers_for_whom(gateway: RunningGateway) -> None:
    split = SplitRecord((ShareRecord(2, 10.0, ("right",)),))
    gateway.store.put(KEYS.active, ActiveRecord(1, 1, None, "s", 0.0, split=split).to_json())
    async with gateway.instance(Engine(), "left") as up:
        out = await run(gateway, "list")
        assert "version 1 has 90 % of the requests\n" in out
        assert "version 2 has 10 % of the requests; nobody runs it now, so others answer them" in out
        gateway.register(up, "right", active_version=2)
        wait_until(lambda: len(gateway.gateway.default.fleet.serving) == 2)
        assert "version 2 has 10 % of the requests\n" in await run(gateway, "list")


async def test_status_says_what_keeps_a_server_that_starts_from_serving(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    error = ErrorInfo("checksum_mismatch", "tensor 'x' has checksum 1 as built")
    async with gateway.instance(instance_id="instance-0", state="STARTING", error=error):
        url = f"http://127.0.0.1:{gateway.admin_port}"
        for state, said in (("starting", True), ("ready", False)):
            ServerInfo(url, url, "toy", "", "/dev/null", 1, state).write(tmp_path)
            done = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--state-dir", str(tmp_path)])
            assert done.exception is None
            assert ("toy is starting" in done.output) is said
            assert "no version is active" in done.output
            assert "instance-0: tensor 'x' has checksum 1 as built" in done.output


async def test_status_shows_the_active_version_and_the_last_swaps(gateway: RunningGateway, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        ready = VersionRecord(version, "ready", "", 0, "", None, None, "t", 1, 0.0, "", 0)
        gateway.store.put(KEYS.version(version), ready.to_json())
    split = SplitRecord((ShareRecord(1, 10.0),))
    gateway.store.put(KEYS.active, ActiveRecord(2, 1, 1, "s", 0.0, split=split).to_json())
    for number in range(4):
        past = PastSwapRecord(f"s{number}", number, "done", "rolling", number, number + 0.5)
        past = replace(past, outcome="aborted", reason="has NaN") if number == 1 else past
        past = replace(past, split=split) if number == 2 else past
        gateway.store.put(KEYS.past_swap(number), past.to_json())
    url = f"http://127.0.0.1:{gateway.admin_port}"
    ServerInfo(url, url, "toy", "", "/dev/null", 1).write(tmp_path)
    done = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--state-dir", str(tmp_path)])
    assert done.exception is None
    shared = "version 1 beside version 2 (10 % of the requests)"
    assert f"active: {shared}\npublished, and not active: 3\n" in done.output
    swaps = [line for line in done.output.splitlines() if line.startswith("swap ")]
    assert [line.partition(" s, ")[0] for line in swaps] == [
        "swap to version 3, rolling: done in 0.50",
        f"swap to {shared}, rolling: done in 0.50",
        "swap to version 1, rolling: aborted in 0.50",
    ]
    assert swaps[2].endswith(" s ago: has NaN")
    elsewhere = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--url", url], env={"COLUMNS": "200"})
    assert f"active: {shared}" in elsewhere.output, "it needs no state directory"


async def test_one_that_sleeps_is_listed_with_what_wakes_it(gateway: RunningGateway) -> None:
    sleeper = SleeperRecord("instance-0", 1, 1, "here", 0.0)
    gateway.store.put(f"{sleepers(KEYS)}instance-0", sleeper.to_json())
    assert "instance-0: asleep; `hotswap instances wake instance-0` wakes it\n" in await run(gateway, "list")


async def test_drain_waits_for_what_is_there(gateway: RunningGateway) -> None:
    engine = Engine()
    async with gateway.instance(engine, "left"):
        request = asyncio.create_task(gateway.ask(post()))
        await eventually(lambda: engine.running == 1)
        with pytest.raises(CliError, match="still has 1 request"):
            await run(gateway, "drain", "left", "--wait", "0.1")
        waiting = asyncio.create_task(run(gateway, "drain", "left", "--wait", "60"))
        await asyncio.sleep(0)
        engine.release.set()
        assert "and has none" in await waiting
        assert (await request).status == 200


async def test_who_is_not_there(gateway: RunningGateway) -> None:
    with pytest.raises(CliError, match="No instance 'nobody' is registered"):
        await run(gateway, "drain", "nobody")
