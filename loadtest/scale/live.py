"""A swap of many agents on one real etcd: what it costs etcd, and what an agent takes.

The agents are the product's own (`Participant`), each with a store client and a connection of its own, many to a
process; only their engines do nothing. A real publisher and a real coordinator drive the swap. Agents, coordinator and
etcd share this machine, so seconds of wall time say how busy it is; etcd's CPU seconds, its events and bytes do not
depend on that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from loadtest.hosts.etcd import MISSING, alone, binary
from loadtest.measure.machine import machine
from loadtest.measure.run import write
from weightsync import CommitResult, Coordinator, Participant, Publisher, StageResult, open_store
from weightsync.control.arenas import ensure_arena
from weightsync.control.records import ActiveRecord, InstanceRecord, VersionRecord

MODEL = "bench"
AGENTS = (100, 300, 1000)
PROCESSES = 2
LEASE_TTL_S = 30.0  # two cores run a thousand agents at once: none may lose its place for want of a turn
IDLE_S = 10.0
SWAPS = 3  # after a first one; the middle one of them counts
MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Of one swap, from `publish` until every agent serves it. `etcd_idle_share` is of one core, between swaps."""

    agents: int
    seconds: float
    etcd_cpu_s: float
    events: int
    events_an_agent: float
    sent_nbytes: int
    agent_cpu_ms: float
    agent_nbytes: int
    etcd_nbytes: int
    etcd_idle_share: float


def run(json: Path | None, fleets: Iterable[int] = AGENTS) -> dict[str, Any]:
    """Measure, print the table, and put the figures into `json` under `live`, beside what is there."""
    found = {"machine": machine(), **measure(fleets)}
    columns = ("etcd, CPU s", "seconds", "events", "an agent", "sent, MB", "agent, CPU ms", "agent, KiB", "etcd, MiB")
    table = Table("agents", *columns, title="one swap, measured on this machine")
    for cost in (Cost(**figures) for figures in found.get("fleets", {}).values()):
        times = f"{cost.agents:,}", f"{cost.etcd_cpu_s:.2f}", f"{cost.seconds:.2f}", f"{cost.events:,}"
        sizes = f"{cost.agent_cpu_ms:.1f}", f"{cost.agent_nbytes / 1024:.0f}", f"{cost.etcd_nbytes / MIB:.0f}"
        table.add_row(*times, f"{cost.events_an_agent:.1f}", f"{cost.sent_nbytes / 1e6:.1f}", *sizes)
    Console().print(table if "fleets" in found else found["skipped"])
    there = loads(json.read_text()) if json is not None and json.exists() else {}
    write({**there, "live": found}, json)
    return found


def measure(fleets: Iterable[int] = AGENTS) -> dict[str, Any]:
    """By number of agents; {"skipped": why} without etcd."""
    found = binary()
    if found is None:
        return {"skipped": MISSING}
    figures = {str(agents): asdict(_measured(found, agents)) for agents in fleets}
    return {"processes": PROCESSES, "lease_ttl_s": LEASE_TTL_S, "fleets": figures}


def _measured(executable: str, agents: int) -> Cost:
    with (
        tempfile.TemporaryDirectory(prefix="hotswap-live-", dir="/dev/shm") as directory,
        alone(executable, Path(directory)) as (url, pid),
    ):
        return asyncio.run(_measure(url, psutil.Process(pid), Path(directory) / "arena", agents))


async def _measure(url: str, etcd: psutil.Process, arena: Path, agents: int) -> Cost:
    store = open_store(url)
    await ensure_arena(store, arena)
    coordinator = Coordinator(store, MODEL)
    coordinator.start()
    share = -(-agents // PROCESSES)
    starts = range(0, agents, share)
    fleet = [await _Agents.started(url, first, min(share, agents - first)) for first in starts]
    publisher = await asyncio.to_thread(Publisher, url, model=MODEL)
    try:
        await _swap(publisher, fleet, etcd, url, -1)
        costs = [await _swap(publisher, fleet, etcd, url, step) for step in range(SWAPS)]
        before, _ = _used(etcd, url)
        await asyncio.sleep(IDLE_S)
        idle = (_used(etcd, url)[0] - before) / IDLE_S
        said = [await agents_.ask("say") for agents_ in fleet]
    finally:
        await asyncio.to_thread(publisher.close)
        for agents_ in fleet:
            await agents_.end()
        await coordinator.stop()
        await store.close()
    nbytes = sum(s["nbytes"] for s in said) // agents
    seconds, cpu, events, sent, agent_cpu = sorted(costs, key=lambda cost: cost[1])[SWAPS // 2]
    return Cost(
        agents, seconds, cpu, int(events), events / agents, int(sent), 1e3 * agent_cpu / agents, nbytes,
        etcd.memory_info().rss, idle,
    )  # fmt: skip


async def _swap(
    publisher: Publisher, fleet: list[_Agents], etcd: psutil.Process, url: str, step: int
) -> tuple[float, float, float, float, float]:
    """Seconds, etcd's CPU seconds, events and bytes sent, the agents' CPU seconds."""
    (cpu, counts), agents = _used(etcd, url), [await each.ask("say") for each in fleet]
    started = time.perf_counter()
    version = await asyncio.to_thread(publisher.publish, [("weight", np.full(64, step, np.float32))], timeout_s=300)
    await asyncio.gather(*(each.ask(f"await {version}") for each in fleet))
    seconds = time.perf_counter() - started
    (cpu_after, after), agents_after = _used(etcd, url), [await each.ask("say") for each in fleet]
    used = sum(b["cpu_s"] - a["cpu_s"] for a, b in zip(agents, agents_after, strict=True))
    return seconds, cpu_after - cpu, after[0] - counts[0], after[1] - counts[1], used


COUNTED = ("etcd_debugging_mvcc_events_total", "etcd_network_client_grpc_sent_bytes_total")


def _used(etcd: psutil.Process, url: str) -> tuple[float, tuple[float, float]]:
    """etcd's CPU seconds so far, and the events and bytes that it has sent."""
    cpu = sum(etcd.cpu_times()[:2])
    address = url.removeprefix("etcd://").partition("/")[0]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith(COUNTED)]
    found = {name: float(value) for name, value in lines}
    return cpu, (found[COUNTED[0]], found[COUNTED[1]])


class _Agents:
    """A process of agents, seen from the bench: a line in, a line of JSON out."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def started(cls, url: str, first: int, count: int) -> _Agents:
        """Returns when all serve."""
        command = (sys.executable, "-m", "loadtest.scale.live", url, str(first), str(count))
        pipe = asyncio.subprocess.PIPE
        found = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        await found.ask("say")
        return found

    async def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        answer: dict[str, Any] = loads(await self._process.stdout.readline())
        return answer

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class _Engine:
    """Does nothing, at once."""

    def __init__(self) -> None:
        self.version = 0

    async def stage(self, version: VersionRecord) -> StageResult:
        return StageResult(version.fingerprint, 1.0, "vllm/packed")

    async def commit(self, active: ActiveRecord, _version: VersionRecord) -> CommitResult:
        self.version = active.version
        return CommitResult(1.0)

    async def pause(self) -> None:
        pass


async def _run(url: str, first: int, count: int) -> None:
    """Run `count` agents until the input ends."""
    before = psutil.Process().memory_info().rss
    engines, fleet, stores = [], [], []
    for number in range(first, first + count):
        engine, store = _Engine(), open_store(url)
        record = InstanceRecord(
            f"instance-{number:04d}", "http://10.200.100.100:8000", pid=os.getpid(), model_dir="/models/served",
            max_num_seqs=256,
        )  # fmt: skip
        agent = Participant(
            store, MODEL, record, engine.stage, engine.commit, pause=engine.pause, resume=engine.pause,
            lease_ttl_s=LEASE_TTL_S,
        )  # fmt: skip
        agent.start()
        await agent.serving()
        engines.append(engine)
        fleet.append(agent)
        stores.append(store)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode():
        what, _, version = line.strip().partition(" ")
        while what == "await" and not all(  # noqa: ASYNC110 - agents have no event for it
            agent.record.state == "SERVING" and agent.record.active_version == int(version) for agent in fleet
        ):
            await asyncio.sleep(0.02)
        nbytes = psutil.Process().memory_info().rss - before
        print(dumps({"nbytes": nbytes, "cpu_s": time.process_time()}), flush=True)
    for agent in fleet:
        await agent.stop()
    for store in stores:
        await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The agents of one process of the bench.")
    parser.add_argument("url")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    asked = parser.parse_args()
    asyncio.run(_run(asked.url, asked.first, asked.count))
