"""What etcd and the processes that follow it can do on this machine: a real etcd of one member, and its own CPU time.

Clients, etcd and everything else share the machine, so times say little; CPU seconds per write and per event do.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from loadtest.hosts.etcd import MISSING, binary
from loadtest.scale.store_latency import own_etcd
from weightsync.store import Store, open_store

WRITES, WRITERS, WATCHERS = 2000, 32, 32
VALUE = b"x" * 400  # an instance record


def measure(writes: int = WRITES, watchers: int = WATCHERS) -> dict[str, Any]:
    """{"skipped": why} without etcd."""
    found = binary()
    if found is None:
        return {"skipped": MISSING}
    return asyncio.run(_measure(found, writes, watchers))


async def _measure(executable: str, writes: int, watchers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hotswap-scale-") as directory:
        async with own_etcd(executable, Path(directory)) as url:
            process = _etcd_process()
            async with contextlib.aclosing(_Stores(url, 1 + watchers)) as stores:
                store = stores.all[0]
                alone = await _burst(process, store, [], writes)
                followed = await _burst(process, store, stores.all[1:], writes // 4)
    delivered = followed["events"]
    extra = followed["etcd_cpu_s"] - alone["etcd_cpu_s"] * followed["writes"] / alone["writes"]
    return {
        "writes_per_s": alone["writes"] / alone["seconds"],
        "etcd_cpu_us_per_write": 1e6 * alone["etcd_cpu_s"] / alone["writes"],
        "watchers": watchers,
        "events_per_s": delivered / followed["seconds"],
        "etcd_cpu_us_per_event": 1e6 * extra / delivered,
    }


class _Stores:
    """Connections of their own."""

    def __init__(self, url: str, count: int) -> None:
        self.all = [open_store(url) for _ in range(count)]

    async def aclose(self) -> None:
        for store in self.all:
            await store.close()


def _etcd_process() -> psutil.Process:
    return next(child for child in psutil.Process().children() if child.name() == "etcd")


async def _burst(process: psutil.Process, store: Store, watching: list[Store], writes: int) -> dict[str, Any]:
    """`writes` puts, WRITERS at a time, until every watcher has seen them all."""
    revision = await store.put("scale/begin", VALUE)
    seen = [asyncio.create_task(_see(watcher, revision + 1, writes)) for watcher in watching]
    cpu, started = sum(process.cpu_times()[:2]), time.perf_counter()
    numbers = iter(range(writes))

    async def write() -> None:
        for number in numbers:
            await store.put(f"scale/{number % 1000:04d}", VALUE)

    await asyncio.gather(*(write() for _ in range(WRITERS)), *seen)
    return {
        "writes": writes,
        "events": writes * len(watching),
        "seconds": time.perf_counter() - started,
        "etcd_cpu_s": sum(process.cpu_times()[:2]) - cpu,
    }


async def _see(store: Store, since: int, events: int) -> None:
    async with contextlib.aclosing(store.watch("scale/", since)) as watch:
        for _ in range(events):
            await anext(watch)
