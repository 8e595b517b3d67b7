"""Records of copies: what an instance is given to open on its own host, and what peers read of each other's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import eventually
from tests.weightsync.codes import refused
from tests.weightsync.fleet import running_fleet
from tests.weightsync.peer.hosts import KEYS, MODEL, Fetching, Hosts, newest, path_of, random_model
from weightsync import Adapter, Publisher, Store
from weightsync.control.records import CopyRecord, ErrorInfo, VersionRecord
from weightsync.errors import PeerError
from weightsync.peer.copies import Announcer, CopyBoard, own_copies, parse_key, wait_for_slots

STORES = ["sqlite", "etcd"]
GUARD_S = 60.0
X, Y = "x" * 32, "y" * 32


def copy(host: str, digest: str = X, **fields: object) -> CopyRecord:
    values = {"slot": f"//{host}/slot", "nbytes": 1, "state": "ready", "address": "127.0.0.1:1", "since": 0.0} | fields
    return CopyRecord(host=host, digest=digest, **values)  # type: ignore[arg-type]


async def put(store: Store, record: CopyRecord) -> None:
    await store.put(KEYS.copy(record.digest, record.host), record.to_json())


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
    with refused("copy_unavailable", match="lies on host a: set HOTSWAP_HOST"):
        await wait_for_slots(store, KEYS, record, "", 1.0)


async def test_a_slot_of_this_host_is_opened_where_it_is(store: Store, record: VersionRecord) -> None:
    found = await wait_for_slots(store, KEYS, record, "a", 30.0)
    assert found.slot == record.slot.removeprefix("//a")
    assert replace(found, slot=record.slot) == record


async def test_a_slot_lost_in_a_restart_of_the_host_is_fetched_again(store: Store, record: VersionRecord) -> None:
    Path(record.slot.removeprefix("//a")).unlink()  # noqa: ASYNC240 - in memory
    await put(store, copy("a", record.manifest_digest, slot="//a/dev/shm/again"))
    assert (await wait_for_slots(store, KEYS, record, "a", 30.0)).slot == "/dev/shm/again"


async def test_it_waits_until_the_copy_is_whole(store: Store, record: VersionRecord) -> None:
    await put(store, copy("b", record.manifest_digest, slot="//b/dev/shm/here", state="fetching"))
    waiting = asyncio.create_task(wait_for_slots(store, KEYS, record, "b", 60.0))
    other = copy("bb", record.manifest_digest, slot="//bb/dev/shm/elsewhere")  # whose name begins with this one's
    await put(store, other)
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await put(store, copy("b", record.manifest_digest, slot="//b/dev/shm/here"))
    assert (await asyncio.wait_for(waiting, 30)).slot == "/dev/shm/here"


async def test_what_the_peer_failed_with_is_told(store: Store, record: VersionRecord) -> None:
    error = ErrorInfo("arena_full", "a slot needs more than there is")
    waiting = asyncio.create_task(wait_for_slots(store, KEYS, record, "b", 60.0))
    await put(store, copy("b", record.manifest_digest, slot="//b/dev/shm/here", state="failed", error=error))
    with refused("copy_unavailable", match="could not fetch it; a slot needs more") as caught:
        await asyncio.wait_for(waiting, 30)
    assert caught.value.cause == "arena_full"


async def test_without_a_peer_it_ends_in_time(store: Store, record: VersionRecord) -> None:
    with refused("copy_unavailable", match=r"after 0\.2 s; no peer of b has begun"):
        await wait_for_slots(store, KEYS, record, "b", 0.2)
    error = ErrorInfo("no_holder", "nobody has it")
    await put(store, copy("b", record.manifest_digest, slot="//b/dev/shm/here", state="fetching", error=error))

    async def said() -> PeerError | None:
        with refused("copy_unavailable") as caught:
            await wait_for_slots(store, KEYS, record, "b", 0.2)
        return caught.value if "nobody has it" in str(caught.value) else None  # a slow store has said nothing by then

    assert (await eventually(said)).cause == "no_holder"


async def test_what_nobody_wants_any_more_is_not_waited_for(
    store: Store, record: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.peer.copies.STILL_WANTED_S", 0.1)
    await store.delete(KEYS.target)
    with refused("copy_unavailable", match="nobody wants it any more"):
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
        await eventually(lambda: all(e.running == first for e in fleet.engines.values()), 60)
        adapter = Adapter({"x.lora_A.weight": np.ones((2, 8), np.float32)}, {"r": 2})
        second = await asyncio.to_thread(publisher.publish, random_model(2), parts={"lora/x": adapter})
        await eventually(lambda: all(e.running == second for e in fleet.engines.values()), 60)
    record = newest(publisher)
    on_a, on_b = (engine.opened for engine in engines)
    assert on_a is not None
    assert on_b is not None
    assert on_a.slot == record.slot.removeprefix("//a")
    digests = [record.manifest_digest, *(part.manifest_digest for part in record.parts)]
    slots = [on_b.slot, *(part.slot for part in on_b.parts)]
    assert slots == [str(path_of(hosts.copies(digest)["b"])) for digest in digests]


# what peers read of each other's records


async def seen(board: CopyBoard, found: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not found():
            board.changed.clear()
            await board.changed.wait()


def offered(board: CopyBoard, digest: str) -> set[str]:
    return {record.host for record in board.offered(digest)}


async def test_the_board_follows_what_is_fetched_and_nothing_else(store: Store) -> None:
    board = CopyBoard(KEYS, "me")
    older = copy("c", delta_of=Y)  # of the release before, which has a difference, too
    for record in (copy("a"), copy("me"), copy("b", slot=""), copy("a", Y), older):
        await put(store, record)
    following = asyncio.create_task(board.follow(store))
    board.keep_to({X})
    await seen(board, lambda: offered(board, X) == {"a", "c"})
    assert offered(board, Y) == set()
    await store.delete(KEYS.copy(X, "c"))
    await put(store, copy("d"))
    await seen(board, lambda: offered(board, X) == {"a", "d"})
    board.keep_to({Y})
    await seen(board, lambda: offered(board, Y) == {"a"})
    assert offered(board, X) == set()
    following.cancel()


async def test_what_is_not_wanted_any_more_when_the_store_is_back_is_forgotten(store: Store) -> None:
    board = CopyBoard(KEYS, "me")
    await put(store, copy("a"))
    following = asyncio.create_task(board.follow(store))
    board.keep_to({X})
    await seen(board, lambda: offered(board, X) == {"a"})
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert offered(board, X) == {"a"}  # what is being read goes on without the store
    board.keep_to(set())
    following = asyncio.create_task(board.follow(store))
    await eventually(lambda: not board._asked.is_set(), GUARD_S)
    assert offered(board, X) == set()
    following.cancel()


async def test_a_record_that_cannot_be_read_keeps_nobody_from_the_others(store: Store) -> None:
    """Another release has a field more, and somebody writes another's name."""
    newer = json.dumps(json.loads(copy("newer").to_json()) | {"moon": "full"}).encode()
    await store.put(KEYS.copy(X, "newer"), newer)
    await store.put(KEYS.copy(X, "liar"), copy("a").to_json())
    await put(store, copy("a", rack="r1"))
    board = CopyBoard(KEYS, "me")
    following = asyncio.create_task(board.follow(store))
    board.keep_to({X})
    await seen(board, lambda: offered(board, X) == {"a"})
    await put(store, copy("b"))
    await store.put(KEYS.copy(X, "newer"), newer)
    await seen(board, lambda: offered(board, X) == {"a", "b"})
    assert set(await own_copies(store, KEYS, "a")) == {X}
    following.cancel()


async def test_what_an_earlier_process_said_is_taken_back(store: Store, shortest_lease_s: float) -> None:
    for record in (copy("me"), copy("me", Y), copy("other")):
        await put(store, record)
    announcer = Announcer(store, KEYS, "me", max(10.0, shortest_lease_s))
    await announcer.begin()
    await announcer.say([copy("me", Y, since=1.0)], [X, Y])
    found = {
        kv.key: CopyRecord.from_json(kv.value).since
        for kv in (await store.list(KEYS.copies))[0]
        if parse_key(KEYS, kv.key)
    }
    assert found == {KEYS.copy(Y, "me"): 1.0, KEYS.copy(X, "other"): 0.0}
    first = announcer.lease
    await announcer.begin()  # as after the store was away
    assert first is not None
    assert first.lost.is_set()
    await announcer.say([copy("me", Y, since=1.0)], [X, Y])
    found_at = await store.get(KEYS.copy(Y, "me"))
    assert announcer.lease is not None
    assert found_at is not None
    assert found_at.lease == announcer.lease.id
    await announcer.end()
    assert await store.get(KEYS.copy(Y, "me")) is None
