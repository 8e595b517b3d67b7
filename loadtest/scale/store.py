"""The capacity of etcd and of the processes that follow it here: a real etcd of one member, and its own CPU time.

Clients, etcd and everything else share the machine, so times say little; CPU seconds per write and per event do.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.hosts.etcd import MISSING, alone, binary
from weightsync.control.board import Board
from weightsync.control.records import InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.control.state import Wait, decide
from weightsync.control.swap import view_of
from weightsync.errors import StoreError
from weightsync.store import Store, open_store
from weightsync.store.protocol import Event, KeyValue

WRITES, WRITERS, WATCHERS = 2000, 32, 32
VALUE = b"x" * 400  # an instance record
TXN_LIMIT = 128  # etcd's --max-txn-ops, unless it was told otherwise


def measure(writes: int = WRITES, watchers: int = WATCHERS) -> dict[str, Any]:
    """{"skipped": why} without etcd."""
    found = binary()
    if found is None:
        return {"skipped": MISSING}
    with (
        tempfile.TemporaryDirectory(prefix="hotswap-scale-") as directory,
        alone(found, Path(directory)) as (url, pid),
    ):
        return asyncio.run(_measure(url, psutil.Process(pid), writes, watchers))


async def _measure(url: str, process: psutil.Process, writes: int, watchers: int) -> dict[str, Any]:
    async with contextlib.aclosing(_Stores(url, 1 + watchers)) as stores:
        store = stores.all[0]
        unwatched = await _burst(process, store, [], writes)
        followed = await _burst(process, store, stores.all[1:], writes // 4)
        largest = await _largest_txn(store)
    delivered = followed["events"]
    extra = followed["etcd_cpu_s"] - unwatched["etcd_cpu_s"] * followed["writes"] / unwatched["writes"]
    return {
        "writes_per_s": unwatched["writes"] / unwatched["seconds"],
        "etcd_cpu_us_per_write": 1e6 * unwatched["etcd_cpu_s"] / unwatched["writes"],
        "watchers": watchers,
        "events_per_s": delivered / followed["seconds"],
        "etcd_cpu_us_per_event": 1e6 * extra / delivered,
        "largest_txn_compares": largest,
    }


class _Stores:
    """Connections of their own."""

    def __init__(self, url: str, count: int) -> None:
        self.all = [open_store(url) for _ in range(count)]

    async def aclose(self) -> None:
        for store in self.all:
            await store.close()


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


async def _largest_txn(store: Store) -> int | None:
    """How many keys one transaction may compare, of TXN_LIMIT and one more; None: more."""
    for size in (TXN_LIMIT, TXN_LIMIT + 1):
        try:
            await store.txn({f"none/{n:05d}": 0 for n in range(size)}, {"scale/txn": VALUE})
        except StoreError:
            return size - 1
    return None


@dataclass(frozen=True)
class Follower:
    """CPU microseconds of the coordinator for a look at its board, with so many instances on it."""

    instances: int
    look_us: float


def follower(instances: int, events: int = 200) -> Follower:
    """The cost of the coordinator's board and decision when an instance's record has changed."""
    keys, never = Keys("bench"), 1e12
    records = [
        InstanceRecord(f"instance-{n:04d}", f"http://10.0.{n >> 8}.{n & 255}:8000", "SERVING") for n in range(instances)
    ]
    found = [KeyValue(keys.instance(r.id), r.to_json(), 1, 1, None) for r in records]
    swap = SwapRecord("0" * 32, 2, "prepare", tuple(r.id for r in records), never, 0.0)
    ready = VersionRecord(2, "ready", "", 0, "", None, None, "", 1, 0.0, "", 1)
    others = {keys.swap: swap.to_json(), keys.version(2): ready.to_json()}
    board = Board(keys, [*found, *(KeyValue(key, value, 1, 1, None) for key, value in others.items())], 1)
    assert isinstance(decide(view_of(board, 0.0)), Wait)
    started = time.process_time()
    for n in range(events):
        kv = found[n % instances]
        board.apply(Event("put", KeyValue(kv.key, kv.value.replace(b"10.0", b"10.1"), 1, n + 2, None)))
        decide(view_of(board, 0.0))
    return Follower(instances, 1e6 * (time.process_time() - started) / events)
