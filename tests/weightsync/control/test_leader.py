"""Elections; leaders that stop, die or freeze in the middle of a swap; and leases of processes that are busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import eventually
from tests.weightsync.control.children import running
from tests.weightsync.fleet import KEYS, MODEL, Engine, Fleet
from weightsync import Coordinator
from weightsync.control.lease import LeaseKeeper, _guard
from weightsync.control.records import LeaderRecord, SwapRecord
from weightsync.store import Store

TTL_S = 1.0


async def test_one_of_many_leads_and_the_next_one_takes_over_at_once_when_it_stops(fleet: Fleet) -> None:
    candidates = [fleet.coordinator(leader_ttl_s=600) for _ in range(3)]
    await eventually(lambda: any(c.leads for c in candidates))
    while candidates:
        await eventually(lambda: sum(c.leads for c in candidates) == 1)
        first = next(c for c in candidates if c.leads)
        assert (await fleet.read(KEYS.leader, LeaderRecord)).holder == first.name
        await first.stop()
        candidates.remove(first)
    assert await fleet.store().get(KEYS.leader) is None


async def test_a_leader_whose_lease_is_taken_away_stands_again(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    await eventually(lambda: coordinator.leads)
    store = fleet.store()
    held = await store.get(KEYS.leader)
    assert held is not None
    assert held.lease is not None
    await store.revoke(held.lease)
    assert (await coordinator.activate(await fleet.publish())).ok
    again = await store.get(KEYS.leader)
    assert again is not None
    assert again.lease != held.lease


@pytest.mark.parametrize("instance_survives", [True, False])
async def test_a_leader_killed_after_prepare_is_followed_by_one_that_ends_its_swap(
    fleet: Fleet, store_url: str, instance_survives: bool
) -> None:
    async with running("coordinator_process", store_url, str(TTL_S)) as child:
        await child.says("leads")
        engine = await fleet.instance("a", Engine(hang=asyncio.Event()))
        swap = asyncio.create_task(Coordinator(fleet.store(), MODEL).activate(await fleet.publish()))
        await eventually(lambda: fleet.participants["a"].record.state == "STAGING")
        successor = fleet.coordinator()  # only now: a child that is held up must not lose its lease to it before
        child.signal(signal.SIGKILL)
        if not instance_survives:
            await fleet.participants["a"].stop()
        engine.go_on()
        report = await swap
        assert successor.leads
        assert (report.ok, report.reason) == ((True, None) if instance_survives else (False, "instance a is gone"))
        assert engine.running == (1 if instance_survives else None)


@pytest.mark.parametrize("phase", ["prepare", "canary", "commit", "done"])
async def test_a_leader_frozen_past_its_lease_writes_nothing_when_it_thaws(
    fleet: Fleet, store_url: str, phase: str
) -> None:
    """It stopped between its decision and the write; the fleet has gone on without it."""
    first = await fleet.serving("a")
    engine = fleet.engines["a"]
    await first.stop()
    async with running("coordinator_process", store_url, str(TTL_S), phase) as child:
        await child.says("leads")
        asks = Coordinator(fleet.store(), MODEL)
        swap = asyncio.create_task(asks.activate(await fleet.publish(), mode="rolling"))
        await child.says(f"stops before {phase}")
        await child.stopped()
        successor = fleet.coordinator()
        assert (await swap).ok
        assert successor.leads
        before = await fleet.store().get(KEYS.swap)
        child.signal(signal.SIGCONT)
        await child.says("refused: ")
        assert await fleet.store().get(KEYS.swap) == before
        assert before is not None
        assert SwapRecord.from_json(before.value).phase == "done"
        assert engine.running == 2
        assert (await successor.activate(1)).ok


# leases


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
    await eventually(lambda: bool(guards(store)), 120)
    return keeper


async def test_who_is_busy_keeps_its_lease(store: Store) -> None:
    keeper = await guarded(store, 6.0)  # on a busy machine a guard may have no turn for two seconds
    await store.keep_alive(keeper.id)  # the guard, which has just begun, counts from now, too
    end = time.monotonic() + 8.0
    while time.monotonic() < end:  # no turn for the event loop; a tenth of a core is work enough for a guard to see
        sum(range(100_000))
        time.sleep(0.02)  # noqa: ASYNC251 - as above
    assert await store.get("here") is not None
    await store.keep_alive(keeper.id)
    await keeper.end()
    assert await store.get("here") is None
    await eventually(lambda: not guards(store))


class Renewed(Exception):
    """The store of the next test raises this for a renewal."""


async def test_a_guard_that_starts_late_counts_from_the_last_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that counts from its own start renews after more than half the lease, 10 s."""

    class Leases:
        async def keep_alive(self, lease: int) -> None:
            raise Renewed(lease)

    ticks = itertools.count()  # the process is busy
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as lines, os.fdopen(write_end, "w") as order:
        monkeypatch.setattr("sys.stdin", lines)
        monkeypatch.setattr("weightsync.control.lease.open_store", lambda *_, **__: Leases())
        monkeypatch.setattr("weightsync.control.lease._processor_time", lambda _: next(ticks))
        renewed = time.monotonic() - 19.0
        order.write(json.dumps({"url": "", "lease": 1, "ttl_s": 20.0, "pid": os.getppid(), "renewed": renewed}) + "\n")
        order.flush()
        with pytest.raises(Renewed):
            await asyncio.wait_for(_guard(), 9.0)


STANDS = """
import asyncio, psutil, sys
from tests.waiting import eventually
from weightsync.control.lease import LeaseKeeper
from weightsync.store import open_store
async def main():
    store = open_store(sys.argv[1])
    keeper = await LeaseKeeper.grant(store, 3.0, sys.argv[1])
    await store.put("here", b"", keeper.id)
    await eventually(psutil.Process().children, 120)
    print("here", flush=True)
    await keeper.lost.wait()
    await keeper.stop()
    await eventually(lambda: not psutil.Process().children(), 120)
    print("lost", flush=True)
asyncio.run(main())
"""


async def test_who_stands_still_loses_it(store: Store) -> None:
    """In a process of its own: other threads of this one use processor time, and would be taken for its work."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", STANDS, store.url, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"here\n"
    child.send_signal(signal.SIGSTOP)

    async def gone() -> bool:
        return await store.get("here") is None

    await eventually(gone, 60)
    child.send_signal(signal.SIGCONT)
    assert await child.stdout.readline() == b"lost\n"
    assert await child.wait() == 0


DIES = """
import asyncio, os, psutil, sys
from tests.waiting import eventually
from weightsync import Coordinator
from weightsync.control.lease import LeaseKeeper
from weightsync.store import open_store
async def main():
    store = open_store(sys.argv[1])
    await LeaseKeeper.grant(store, 5.0, sys.argv[1])
    print((await eventually(psutil.Process().children, 120))[0].pid, flush=True)
    os._exit(0)
asyncio.run(main())
"""


async def test_a_guard_ends_with_what_it_watches(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, f"sqlite://{tmp_path / 'store.db'}"]
    ran = subprocess.run(command, capture_output=True, timeout=240, check=True)  # noqa: ASYNC221
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
