"""A lease outlives work that keeps its process from its event loop, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import eventually
from weightsync.control.lease import LeaseKeeper
from weightsync.store import Store

TTL_S = 2.0


def guards(store: Store) -> list[psutil.Process]:
    """Guards of this process that watch a lease of `store`."""
    path = store.url.removeprefix("sqlite://")
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(file.path == path for file in child.open_files()):
                found.append(child)
    return found


async def guarded(store: Store, ttl_s: float) -> LeaseKeeper:
    keeper = await LeaseKeeper.grant(store, ttl_s, store.url)
    await store.put("here", b"", keeper.id)
    await eventually(lambda: bool(guards(store)))
    return keeper


async def test_who_is_busy_keeps_its_lease(store: Store) -> None:
    keeper = await guarded(store, TTL_S)
    end = time.monotonic() + 1.75 * TTL_S
    while time.monotonic() < end:
        sum(range(10_000))  # no turn for the event loop
    assert await store.get("here") is not None
    await store.keep_alive(keeper.id)
    await keeper.end()
    assert await store.get("here") is None
    await eventually(lambda: not guards(store))


async def test_who_stands_still_loses_it(store: Store) -> None:
    """As when it is stopped, or waits for a lock for ever."""
    keeper = await guarded(store, 0.8)
    time.sleep(1.6)  # noqa: ASYNC251
    assert await store.get("here") is None
    await asyncio.wait_for(keeper.lost.wait(), 10)
    await keeper.stop()
    await eventually(lambda: not guards(store))


async def test_without_a_guard_who_is_busy_loses_it(store: Store) -> None:
    """What the guard is for."""
    keeper = await LeaseKeeper.grant(store, 0.5)
    await store.put("here", b"", keeper.id)
    time.sleep(1.0)  # noqa: ASYNC251
    assert await store.get("here") is None
    await keeper.stop()


DIES = """
import asyncio, os, psutil, sys
from tests.waiting import eventually
from weightsync.control.lease import LeaseKeeper
from weightsync.store import open_store
async def main():
    store = open_store(sys.argv[1])
    await LeaseKeeper.grant(store, 5.0, sys.argv[1])
    print((await eventually(psutil.Process().children))[0].pid, flush=True)
    os._exit(0)
asyncio.run(main())
"""


async def test_a_guard_ends_with_what_it_watches(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, f"sqlite://{tmp_path / 'store.db'}"]
    ran = subprocess.run(command, capture_output=True, timeout=60, check=True)  # noqa: ASYNC221
    guard = int(ran.stdout)

    def has_ended() -> bool:
        return not psutil.pid_exists(guard) or psutil.Process(guard).status() == psutil.STATUS_ZOMBIE

    await eventually(has_ended)
    assert not ran.stderr


async def test_a_caller_that_is_cancelled_while_it_stops_ends(store: Store) -> None:
    keeper = await LeaseKeeper.grant(store, 5.0)
    stopping = asyncio.create_task(keeper.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
