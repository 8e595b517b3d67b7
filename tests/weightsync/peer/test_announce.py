"""What peers read of each other's records: of the slots they fetch, and only what they understand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.waiting import eventually
from tests.weightsync.peer.hosts import KEYS
from weightsync import Store
from weightsync.control.records import CopyRecord
from weightsync.peer.copies import Announcer, CopyBoard, copies_elsewhere, own_copies, parse_key
from weightsync.peer.messages import Key

STORES = ["sqlite", "etcd"]
GUARD_S = 60.0
X, Y = "x" * 32, "y" * 32


def copy(host: str, digest: str = X, **fields: object) -> CopyRecord:
    values = {"slot": f"//{host}/slot", "nbytes": 1, "state": "ready", "address": "127.0.0.1:1", "since": 0.0} | fields
    return CopyRecord(host=host, digest=digest, **values)  # type: ignore[arg-type]


async def put(store: Store, record: CopyRecord) -> None:
    await store.put(KEYS.copy(record.digest, record.host), record.to_json())


async def seen(board: CopyBoard, found: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not found():
            board.changed.clear()
            await board.changed.wait()


def hosts(board: CopyBoard, digest: str, delta_of: str = "") -> set[str]:
    return {record.host for record in board.offered(Key(digest, delta_of))}


async def test_the_board_follows_what_is_fetched_and_nothing_else(store: Store) -> None:
    board = CopyBoard(KEYS, "me")
    for record in (copy("a"), copy("me"), copy("b", slot=""), copy("a", Y), copy("c", delta_of=Y)):
        await put(store, record)
    following = asyncio.create_task(board.follow(store))
    board.keep_to({X})
    await seen(board, lambda: hosts(board, X) == {"a", "c"})
    assert hosts(board, Y) == set()
    assert hosts(board, X, delta_of=Y) == {"c"}
    await store.delete(KEYS.copy(X, "c"))
    await put(store, copy("d"))
    await seen(board, lambda: hosts(board, X) == {"a", "d"})
    board.keep_to({Y})
    await seen(board, lambda: hosts(board, Y) == {"a"})
    assert hosts(board, X) == set()
    following.cancel()


async def test_what_is_not_wanted_any_more_when_the_store_is_back_is_forgotten(store: Store) -> None:
    board = CopyBoard(KEYS, "me")
    await put(store, copy("a"))
    following = asyncio.create_task(board.follow(store))
    board.keep_to({X})
    await seen(board, lambda: hosts(board, X) == {"a"})
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert hosts(board, X) == {"a"}  # what is being read goes on without the store
    board.keep_to(set())
    following = asyncio.create_task(board.follow(store))
    await eventually(lambda: not board._asked.is_set(), GUARD_S)
    assert hosts(board, X) == set()
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
    await seen(board, lambda: hosts(board, X) == {"a"})
    await put(store, copy("b"))
    await store.put(KEYS.copy(X, "newer"), newer)
    await seen(board, lambda: hosts(board, X) == {"a", "b"})
    assert {record.host for record in await copies_elsewhere(store, KEYS, [X, Y], "b")} == {"a"}
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


@pytest.mark.parametrize("rack", [None, "r1"])
def test_where_a_host_is_goes_with_its_record(rack: str | None) -> None:
    assert CopyRecord.from_json(copy("a", rack=rack).to_json()).rack == rack
