"""Swaps of a thousand agents on one real etcd: the agents, the client of the store, coordinators and a publisher as
they are, with engines that do nothing.

Some processes hold the agents, each agent with a connection of its own. Everything shares the machine, so seconds say
little; etcd's CPU seconds and the events that it has sent do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json as jsonlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from loadtest.hosts.etcd import MISSING, binary
from server.ports import free_port
from weightsync import CommitResult, Coordinator, Participant, Publisher, StageResult, open_store
from weightsync.control.records import ActiveRecord, InstanceRecord, VersionRecord
from weightsync.memory.ledger import ensure_arena

MODEL = "live"
FLEETS = (100, 300, 1000)
IN_A_PROCESS = 250
SWAPS = 3
IDLE_S = 10.0
SERVING_S = 300.0


@dataclass(frozen=True)
class Fleet:
    """One fleet. `events` that etcd sent, its CPU seconds and wall seconds are medians of a swap; `idle_cpu` is the
    share of a core that etcd needs for the leases, between swaps. Memory in MB."""

    agents: int
    seconds: float
    etcd_cpu_s: float
    agents_cpu_s: float
    events: float
    idle_cpu: float
    agent_mb: float
    etcd_mb: float


def measure(fleets: tuple[int, ...] = FLEETS, swaps: int = SWAPS, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """{"skipped": why} without etcd. `flags`: more of etcd's."""
    executable = binary()
    if executable is None:
        return {"skipped": MISSING}
    return {"fleets": [asdict(_fleet(executable, agents, swaps, flags)) for agents in fleets]}


def _fleet(executable: str, agents: int, swaps: int, flags: tuple[str, ...]) -> Fleet:
    with (
        tempfile.TemporaryDirectory(prefix="hotswap-live-", dir="/dev/shm") as directory,
        contextlib.ExitStack() as stack,
    ):
        etcd, url, metrics = stack.enter_context(_etcd(executable, Path(directory) / "etcd", flags))
        asyncio.run(_arena(url, Path(directory) / "arena"))
        groups = [stack.enter_context(_agents(url, first, min(IN_A_PROCESS, agents - first)))
                  for first in range(0, agents, IN_A_PROCESS)]  # fmt: skip
        for group in groups:
            line = group.stdout.readline() if group.stdout is not None else ""
            if line != "serving\n":
                raise RuntimeError(f"agents did not begin to serve: {line}")
        return asyncio.run(_swaps(url, metrics, etcd, [psutil.Process(group.pid) for group in groups], agents, swaps))


async def _swaps(
    url: str, metrics: str, etcd: psutil.Process, groups: list[psutil.Process], agents: int, swaps: int
) -> Fleet:
    stores = [open_store(url) for _ in range(2)]
    coordinators = [Coordinator(store, MODEL) for store in stores]
    for coordinator in coordinators:
        coordinator.start()
    publisher = await asyncio.to_thread(Publisher, url, model=MODEL)
    rows = []
    try:
        for step in range(swaps + 1):  # the first retires nothing
            before = time.perf_counter(), _cpu(etcd), sum(map(_cpu, groups)), _events(metrics)
            await asyncio.to_thread(publisher.publish, _weights(step), timeout_s=SERVING_S)
            after = time.perf_counter(), _cpu(etcd), sum(map(_cpu, groups)), _events(metrics)
            rows.append([b - a for a, b in zip(before, after, strict=True)])
        idle = _cpu(etcd)
        await asyncio.sleep(IDLE_S)
        idle = (_cpu(etcd) - idle) / IDLE_S
    finally:
        await asyncio.to_thread(publisher.close)
        for coordinator in coordinators:
            await coordinator.stop()
        for store in stores:
            await store.close()
    seconds, etcd_cpu_s, agents_cpu_s, events = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    memory = sum(group.memory_info().rss for group in groups) / agents / 1e6
    return Fleet(agents, seconds, etcd_cpu_s, agents_cpu_s, events, idle, memory, etcd.memory_info().rss / 1e6)


@contextlib.contextmanager
def _etcd(executable: str, data: Path, flags: tuple[str, ...]) -> Iterator[tuple[psutil.Process, str, str]]:
    client, peer = free_port(), free_port()
    urls = [f"--{name}-client-urls=http://127.0.0.1:{client}" for name in ("listen", "advertise")]
    urls += [f"--{name}-peer-urls=http://127.0.0.1:{peer}" for name in ("listen", "initial-advertise")]
    command = [executable, f"--data-dir={data}", *urls, f"--initial-cluster=default=http://127.0.0.1:{peer}"]
    process = subprocess.Popen([*command, "--log-level=error", *flags], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not _answers(f"http://127.0.0.1:{client}/health"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("etcd does not start")
            time.sleep(0.1)
        yield psutil.Process(process.pid), f"etcd://127.0.0.1:{client}/live", f"http://127.0.0.1:{client}/metrics"
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=2).is_success
    return False


def _events(url: str) -> float:
    """What etcd counts as sent to watchers."""
    text = httpx.get(url, timeout=30).text
    found = re.search(r"^etcd_debugging_mvcc_events_total (\S+)", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("etcd does not tell how many events it has sent")
    return float(found[1])


def _cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _weights(step: int) -> list[tuple[str, Any]]:
    return [("weight", np.full(64, step, np.float32))]


async def _arena(url: str, directory: Path) -> None:
    store = open_store(url)
    try:
        await ensure_arena(store, directory)
    finally:
        await store.close()


@contextlib.contextmanager
def _agents(url: str, first: int, count: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "loadtest.scale.live", "--agents", url, str(first), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def _serve(url: str, first: int, count: int) -> None:
    """So many agents, until standard input ends."""
    fleet = [_participant(url, f"instance-{number:04d}") for number in range(first, first + count)]
    for participant in fleet:
        participant.start()
    async with asyncio.timeout(SERVING_S):
        for participant in fleet:
            await participant.serving()
    print("serving", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def _participant(url: str, name: str) -> Participant:
    async def stage(version: VersionRecord) -> StageResult:
        return StageResult(version.fingerprint, 1.0, "vllm/packed")

    async def commit(_active: ActiveRecord, _version: VersionRecord) -> CommitResult:
        return CommitResult(1.0)

    record = InstanceRecord(name, "http://10.200.100.100:8000", pid=100_000, model_dir="/models/served")
    return Participant(open_store(url), MODEL, record, stage, commit, lease_ttl_s=15.0)


def show(found: dict[str, Any], console: Console) -> None:
    """As a table."""
    columns = (
        "swap, s",
        "etcd's CPU, s",
        "agents' CPU, s",
        "events",
        "an agent",
        "etcd's CPU between swaps",
        "MB an agent",
        "etcd, MB",
    )
    table = Table("agents", *columns, title="swaps on one real etcd")
    for row in found.get("fleets", ()):
        table.add_row(
            str(row["agents"]), f"{row['seconds']:.2f}", f"{row['etcd_cpu_s']:.2f}", f"{row['agents_cpu_s']:.2f}",
            f"{row['events']:,.0f}", f"{row['events'] / row['agents']:.1f}", f"{row['idle_cpu']:.1%}",
            f"{row['agent_mb']:.2f}", f"{row['etcd_mb']:.0f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """`python -m loadtest.scale.live`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", nargs=3, metavar=("URL", "FIRST", "COUNT"), help="be so many of them")
    parser.add_argument("--fleets", type=int, nargs="*", default=FLEETS)
    parser.add_argument("--etcd-flag", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.agents:
        url, first, count = args.agents
        asyncio.run(_serve(url, int(first), int(count)))
        return
    found = measure(tuple(args.fleets), flags=tuple(args.etcd_flag))
    show(found, Console(width=140))
    if args.json is not None:
        args.json.write_text(jsonlib.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
