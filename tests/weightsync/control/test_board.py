"""What an agent's board has, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from tests.waiting import eventually, stays
from tests.weightsync.fleet import KEYS
from weightsync.control.board import Board
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord
from weightsync.control.turn import Turn
from weightsync.store import Event, Store

SWAP = SwapRecord("s", 2, "prepare", ("a", "b", "c"), 0.0, 0.0, mode="rolling")
COMMITTED = SwapRecord("s", 2, "commit", ("a", "b", "c"), 0.0, 0.0, mode="rolling")
ACTIVE = ActiveRecord(2, 1, None, "s", 0.0)


async def keys_until(board: Board, last: str) -> list[str]:
    found: list[str] = []
    async with asyncio.timeout(20):
        while last not in found:
            event = await board.changed()
            assert event is not None
            found.append(event.kv.key)
    return found


async def test_a_board_without_the_fleet_hears_of_swaps_and_not_of_instances(store: Store) -> None:
    await store.put(KEYS.instance("a"), InstanceRecord("a", "").to_json())
    await store.put(KEYS.swap, SWAP.to_json())
    async with Board.follow(store, KEYS, fleet=False) as board:
        assert (board.swap, board.active, board.instances) == (SWAP, None, {})
        await store.put(KEYS.instance("b"), InstanceRecord("b", "").to_json())
        await store.txn({}, {KEYS.swap: COMMITTED.to_json(), KEYS.active: ACTIVE.to_json()})
        assert sorted(await keys_until(board, KEYS.active)) == [KEYS.active, KEYS.swap]
        await store.put(KEYS.active, ACTIVE.to_json())  # as a restored store is written: without a swap
        assert await keys_until(board, KEYS.active) == [KEYS.active]


async def test_a_commit_waits_for_the_swap_that_made_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of the swap is late: the agent must not take the commit for one that it follows at once."""
    real, late = store.watch, asyncio.Event()

    async def watch(prefix: str, start: int | None = None, *, first: str = "") -> AsyncGenerator[Event, None]:
        async for event in real(prefix, start, first=first):
            if first:
                await late.wait()
            yield event

    monkeypatch.setattr(store, "watch", watch)
    async with Board.follow(store, KEYS, fleet=False) as board:
        await store.put(KEYS.version(2), b"{}")
        await store.put(KEYS.swap, SWAP.to_json())
        await store.txn({}, {KEYS.swap: COMMITTED.to_json(), KEYS.active: ACTIVE.to_json()})
        assert await board.changed(0.3) is None
        late.set()
        assert await keys_until(board, KEYS.active) == [KEYS.version(2), KEYS.swap, KEYS.swap, KEYS.active]


async def test_a_swap_that_is_done_waits_for_its_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of the commit is late: who has staged must not drop it for a swap that has ended."""
    real, late = store.watch, asyncio.Event()

    async def watch(prefix: str, start: int | None = None, *, first: str = "") -> AsyncGenerator[Event, None]:
        async for event in real(prefix, start, first=first):
            if not first:
                await late.wait()
            yield event

    monkeypatch.setattr(store, "watch", watch)
    async with Board.follow(store, KEYS, fleet=False) as board:
        await store.txn({}, {KEYS.swap: COMMITTED.to_json(), KEYS.active: ACTIVE.to_json()})
        await store.put(KEYS.swap, replace(COMMITTED, phase="done").to_json())
        assert await keys_until(board, KEYS.swap) == [KEYS.swap]
        assert await board.changed(0.3) is None
        late.set()
        assert await keys_until(board, KEYS.swap) == [KEYS.active, KEYS.swap]


async def test_a_turn_comes_when_all_before_have_flipped_or_gone(store: Store) -> None:
    lease = await store.grant_lease(60)
    for name in ("a", "b"):
        await store.put(KEYS.instance(name), InstanceRecord(name, "", "STAGED").to_json(), lease)
    turn = Turn(store, KEYS)
    assert turn.ahead("a", ACTIVE, COMMITTED) == {}
    turn.end()
    assert turn.ahead("c", ACTIVE, COMMITTED)
    await store.put(KEYS.instance("b"), InstanceRecord("b", "", "SERVING", 2, 1).to_json(), lease)
    (task,) = turn.waiting
    await stays(lambda: not task.done(), 0.3)  # a has still to flip
    assert turn.ahead("c", ACTIVE, COMMITTED)
    await store.revoke(lease)
    await eventually(lambda: not turn.ahead("c", ACTIVE, COMMITTED))
    assert turn.ahead("c", ACTIVE, SWAP) == {}  # not the agent's own: it is asked only after the commit
    turn.end()
