"""What an instance is given to open: the slots of its own host, waited for while the peer fetches them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import eventually
from tests.weightsync.fleet import running_fleet
from tests.weightsync.peer.hosts import KEYS, MODEL, Fetching, Hosts, newest, path_of, random_model
from weightsync import Adapter, Publisher, Store
from weightsync.control.hosts import slot_name
from weightsync.control.records import CopyRecord, CopyState, ErrorInfo, VersionRecord
from weightsync.errors import CopyUnavailable
from weightsync.peer.copies import wait_for_slots

STORES = ["sqlite", "etcd"]


def copy_of(
    record: VersionRecord, host: str, slot: str, state: CopyState = "ready", error: ErrorInfo | None = None
) -> CopyRecord:
    return CopyRecord(host, slot_name(slot, host), record.manifest_digest, 1, state, "x:1", 1.0, error)


async def say(store: Store, copy: CopyRecord) -> None:
    await store.put(KEYS.copy(copy.digest, copy.host), copy.to_json())


@pytest.fixture
def record(store_url: str, monkeypatch: pytest.MonkeyPatch) -> VersionRecord:
    """A version of host a."""
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    with Publisher(store_url, model=MODEL) as publisher:
        publisher.publish(random_model(1, 64 << 10), wait=False)
        return newest(publisher)


async def test_on_the_one_host_nothing_changes(store: Store, record: VersionRecord) -> None:
    plain = replace(record, slot="/dev/shm/x/slot-1")
    assert await wait_for_slots(store, KEYS, plain, "", 1.0) is plain
    with pytest.raises(CopyUnavailable, match="lies on host a: set HOTSWAP_HOST"):
        await wait_for_slots(store, KEYS, record, "", 1.0)


async def test_a_slot_of_this_host_is_opened_where_it_is(store: Store, record: VersionRecord) -> None:
    found = await wait_for_slots(store, KEYS, record, "a", 30.0)
    assert found.slot == record.slot.removeprefix("//a")
    assert replace(found, slot=record.slot) == record


async def test_a_slot_lost_in_a_restart_of_the_host_is_fetched_again(store: Store, record: VersionRecord) -> None:
    Path(record.slot.removeprefix("//a")).unlink()  # noqa: ASYNC240 - in memory
    await say(store, copy_of(record, "a", "/dev/shm/again"))
    assert (await wait_for_slots(store, KEYS, record, "a", 30.0)).slot == "/dev/shm/again"


async def test_it_waits_until_the_copy_is_whole(store: Store, record: VersionRecord) -> None:
    await say(store, copy_of(record, "b", "/dev/shm/here", state="fetching"))
    waiting = asyncio.create_task(wait_for_slots(store, KEYS, record, "b", 60.0))
    await say(store, copy_of(record, "bb", "/dev/shm/elsewhere"))  # a host whose name begins with this one's
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await say(store, copy_of(record, "b", "/dev/shm/here"))
    assert (await asyncio.wait_for(waiting, 30)).slot == "/dev/shm/here"


async def test_what_the_peer_failed_with_is_told(store: Store, record: VersionRecord) -> None:
    error = ErrorInfo("arena_full", "a slot needs more than there is")
    waiting = asyncio.create_task(wait_for_slots(store, KEYS, record, "b", 60.0))
    await say(store, copy_of(record, "b", "/dev/shm/here", state="failed", error=error))
    with pytest.raises(CopyUnavailable, match="could not fetch it; a slot needs more") as caught:
        await asyncio.wait_for(waiting, 30)
    assert caught.value.cause == "arena_full"


async def test_without_a_peer_it_ends_in_time(store: Store, record: VersionRecord) -> None:
    with pytest.raises(CopyUnavailable, match=r"after 0\.2 s; no peer of b has begun"):
        await wait_for_slots(store, KEYS, record, "b", 0.2)
    error = ErrorInfo("no_holder", "nobody has it")
    await say(store, copy_of(record, "b", "/dev/shm/here", state="fetching", error=error))
    with pytest.raises(CopyUnavailable, match="nobody has it") as caught:
        await wait_for_slots(store, KEYS, record, "b", 0.2)
    assert caught.value.cause == "no_holder"


async def test_what_nobody_wants_any_more_is_not_waited_for(
    store: Store, record: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.peer.copies.STILL_WANTED_S", 0.1)
    await store.delete(KEYS.target)
    with pytest.raises(CopyUnavailable, match="nobody wants it any more"):
        await wait_for_slots(store, KEYS, record, "b", 60.0)


async def test_instances_of_other_hosts_swap_with_those_of_the_publisher(hosts: Hosts) -> None:
    """A coordinator, and instances on a and on b, real but for their engines; a part comes along with its base."""
    hosts.start("ab")
    publisher = hosts.publisher("a")
    async with running_fleet(hosts.store_url) as fleet:
        fleet.coordinator()
        engines = [Fetching(fleet.store(), host) for host in "ab"]
        for number, engine in enumerate(engines):
            await fleet.instance(f"i{number}", engine)
        first = await asyncio.to_thread(publisher.publish, random_model(1))
        await eventually(lambda: all(e.running == first for e in fleet.engines.values()), 30)
        adapter = Adapter({"x.lora_A.weight": np.ones((2, 8), np.float32)}, {"r": 2})
        second = await asyncio.to_thread(publisher.publish, random_model(2), parts={"lora/x": adapter})
        await eventually(lambda: all(e.running == second for e in fleet.engines.values()), 30)
    record = newest(publisher)
    on_a, on_b = (engine.opened for engine in engines)
    assert on_a is not None
    assert on_b is not None
    assert on_a.slot == record.slot.removeprefix("//a")
    digests = [record.manifest_digest, *(part.manifest_digest for part in record.parts)]
    slots = [on_b.slot, *(part.slot for part in on_b.parts)]
    assert slots == [str(path_of(hosts.copies(digest)["b"])) for digest in digests]
