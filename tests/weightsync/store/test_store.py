"""The store contract: what every implementation promises, on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from server.up.forks import Forked
from tests.waiting import eventually, stays
from tests.warm import SYNC, warm
from weightsync.errors import Conflict, LeaseLost, StoreUnavailable, WatchCompacted
from weightsync.store import MISSING, Event, Store, SyncStore, open_store

STORES = ("sqlite", "etcd")
WRITER = "tests.weightsync.store.writer"


async def take(store: Store, prefix: str, start: int, count: int) -> list[Event]:
    async with asyncio.timeout(120), contextlib.aclosing(store.watch(prefix, start)) as events:
        found = []
        async for event in events:
            found.append(event)
            if len(found) == count:
                return found
    raise AssertionError("the watch ended")


async def test_what_is_put_is_there_until_it_is_deleted(store: Store) -> None:
    assert await store.get("a") is None
    first = await store.put("a", b"1")
    second = await store.put("a", b"2")
    found = await store.get("a")
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.lease) == (b"2", first, second, None)
    assert second == first + 1
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.get("a") is None


async def test_list_is_sorted_and_knows_its_revision(store: Store) -> None:
    for key in ("m/b", "m/a", "m", "m0", "l/z"):
        revision = await store.put(key, b"")
    found, at = await store.list("m/")
    assert [kv.key for kv in found] == ["m/a", "m/b"]
    assert at == revision
    assert len((await store.list(""))[0]) == 5


async def test_compare_and_swap(store: Store) -> None:
    revision = await store.compare_and_swap("a", MISSING, b"1")
    with pytest.raises(Conflict) as refused:
        await store.compare_and_swap("a", MISSING, b"2")
    assert (refused.value.key, refused.value.expected, refused.value.found) == ("a", 0, revision)
    assert await store.compare_and_swap("a", revision, b"3") == revision + 1


async def test_a_transaction_is_all_or_nothing(store: Store) -> None:
    at = await store.put("a", b"1")
    with pytest.raises(Conflict):
        await store.txn({"a": at, "b": at}, {"a": b"2", "c": b"2"})
    assert (await store.get("a")).value == b"1"  # type: ignore[union-attr]
    assert await store.get("c") is None
    after = await store.txn({"a": at, "b": MISSING}, {"a": None, "b": b"2", "c": b"2"})
    found, _ = await store.list("")
    assert {kv.key: kv.mod_revision for kv in found} == {"b": after, "c": after}


async def test_a_transaction_compares_all_keys_of_a_prefix(store: Store) -> None:
    """However many there are; what was written since is a conflict, what has gone is not."""
    lease = await store.grant_lease(60)
    for number in range(150):  # more than etcd takes operations
        newest = await store.put(f"m/i/{number:03d}", b"1", lease)
    outside = await store.put("m/j", b"1")
    await store.txn({"m/i/": newest, "m/j": outside}, {"a": b"1"})
    await store.delete("m/i/003")
    await store.txn({"m/i/": newest}, {"a": b"2"})
    again = await store.put("m/i/003", b"1", lease)
    with pytest.raises(Conflict) as refused:
        await store.txn({"m/i/": newest}, {"a": b"3"})
    assert (refused.value.key, refused.value.expected, refused.value.found) == ("m/i/", newest, again)
    await store.revoke(lease)
    await store.txn({"m/i/": MISSING}, {"a": b"4"})
    found = await store.get("a")
    assert found is not None
    assert found.value == b"4"


async def test_a_list_and_a_watch_may_begin_at_a_key(store: Store) -> None:
    for key in ("m/a", "m/s", "m/t", "n"):
        revision = await store.put(key, b"")
    found, at = await store.list("m/", first="m/s")
    assert ([kv.key for kv in found], at) == (["m/s", "m/t"], revision)
    for key in ("m/a", "m/t", "n", "m/s"):
        await store.put(key, b"1")
    async with asyncio.timeout(120), contextlib.aclosing(store.watch("m/", revision + 1, first="m/s")) as events:
        assert [(await anext(events)).kv.key for _ in range(2)] == ["m/t", "m/s"]


async def test_a_lease_takes_its_keys_along(store: Store) -> None:
    lease = await store.grant_lease(3.0)
    start = await store.put("leased/a", b"1", lease)
    await store.put("leased/b", b"2", lease)
    await store.put("leased/free", b"3")
    events = await take(store, "leased/", start, 5)
    assert [(e.kind, e.kv.key) for e in events[3:]] == [("delete", "leased/a"), ("delete", "leased/b")]
    assert events[3].kv.value == b"1"
    assert [kv.key for kv in (await store.list("leased/"))[0]] == ["leased/free"]


async def test_a_lease_that_is_kept_alive_stays(store: Store) -> None:
    ttl_s = 3.0
    lease = await store.grant_lease(ttl_s)
    await store.put("a", b"1", lease)
    for _ in range(13):  # etcd looks for ended leases twice a second
        await asyncio.sleep(ttl_s / 10)
        await store.keep_alive(lease)
    assert await store.get("a") is not None


async def test_an_ended_lease_stays_ended(store: Store) -> None:
    lease = await store.grant_lease(2.0)
    await store.put("a", b"1", lease)

    async def has_ended() -> bool:
        return await store.get("a") is None

    await eventually(has_ended)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    with pytest.raises(LeaseLost):
        await store.put("a", b"1", lease)
    with pytest.raises(LeaseLost):
        await store.txn({}, {"b": b"1"}, {"b": 12345})
    assert (await store.list(""))[0] == []


async def test_revoking_deletes_at_once_what_was_last_put_with_the_lease(store: Store) -> None:
    lease = await store.grant_lease(60)
    for key in ("a", "b"):
        await store.put(key, b"1", lease)
    await store.put("b", b"2")
    for _ in range(2):
        await store.revoke(lease)
        assert [(kv.key, kv.value) for kv in (await store.list(""))[0]] == [("b", b"2")]


async def test_a_watch_starts_where_a_list_ended(store: Store) -> None:
    await store.put("w/a", b"1")
    _, revision = await store.list("w/")
    await store.put("w/b", b"2")
    await store.put("other", b"3")
    await store.delete("w/a")
    events = await take(store, "w/", revision + 1, 2)
    assert [(e.kind, e.kv.key) for e in events] == [("put", "w/b"), ("delete", "w/a")]
    assert events[0].kv.mod_revision == revision + 1
    assert events[1].kv.mod_revision == revision + 3
    with pytest.raises(WatchCompacted):  # a revision that is not there yet is of another store
        await take(store, "w/", revision + 5, 1)


async def test_events_of_one_transaction_come_in_its_order(store: Store) -> None:
    await store.put("t/z", b"0")
    _, revision = await store.list("t/")
    await store.txn({}, {"t/m": b"1", "t/z": None, "t/a": b"2"})
    events = await take(store, "t/", revision + 1, 3)
    assert [e.kv.key for e in events] == ["t/m", "t/z", "t/a"]
    assert {e.kv.mod_revision for e in events} == {revision + 1}


def writer(url: str, name: str, count: int) -> Forked:
    """A process that writes that many values, one after the other, to the key `w/NAME`."""
    return warm(SYNC).start([WRITER, url, name, str(count)], os.environ, Path(os.devnull), {2: 2})


async def test_a_watch_misses_nothing_of_several_processes(store: Store, store_url: str) -> None:
    _, revision = await store.list("")
    writers = [writer(store_url, name, 150) for name in ("x", "y")]
    events = await take(store, "w/", revision + 1, 300)
    assert [await asyncio.to_thread(w.wait, 120) for w in writers] == [0, 0]
    for name in ("x", "y"):
        assert [int(e.kv.value) for e in events if e.kv.key == f"w/{name}"] == list(range(150))
    assert [e.kv.mod_revision for e in events] == list(range(revision + 1, revision + 301))


async def test_several_processes_may_create_it_at_once(tmp_path: Path) -> None:
    writers = [writer(f"sqlite://{tmp_path}/new/store.db", name, 5) for name in "abcd"]
    assert [await asyncio.to_thread(w.wait, 120) for w in writers] == [0] * 4


async def test_events_are_kept_for_a_while_only(
    store: Store, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("weightsync.store.sqlite_db.EVENTS_KEPT", 100)
    for _ in range(520):
        revision = await store.put("a", b"")
    if store.url.startswith("etcd"):
        request.getfixturevalue("etcd").compact(revision - 100)
    with pytest.raises(WatchCompacted) as gone:
        await take(store, "a", revision - 519, 1)
    assert await take(store, "a", gone.value.oldest, 1)
    assert gone.value.oldest > revision - 520
    with pytest.raises(WatchCompacted):
        await take(store, "a", gone.value.oldest - 1, 1)


async def test_a_watch_ends_with_its_store(store_url: str) -> None:
    client = open_store(store_url)

    async def drain() -> int:
        return len([event async for event in client.watch("")])

    watching = asyncio.create_task(drain())
    await stays(lambda: not watching.done(), 0.05)
    await client.close()
    assert await asyncio.wait_for(watching, 60) == 0
    with pytest.raises(StoreUnavailable, match="closed"):
        await client.get("a")
    await client.close()


def test_the_blocking_store(store_url: str) -> None:
    store = SyncStore(store_url)
    revision = store.put("a", b"1")
    assert store.compare_and_swap("a", revision, b"2") == revision + 1
    lease = store.grant_lease(60)
    assert store.txn({}, {"b": b"3"}, {"b": lease}) == revision + 2
    store.keep_alive(lease)
    store.revoke(lease)
    assert [kv.key for kv in store.list("")[0]] == ["a"]
    assert store.get("a").value == b"2"  # type: ignore[union-attr]
    assert store.delete("a")
    store.close()
    store.close()
