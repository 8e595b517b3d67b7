"""What holders that were left still bring about: answers, chunks and tickets that come late."""

from __future__ import annotations

import asyncio

import pytest

from tests.weightsync.peer.reading import GUARD_S, Reader, nobody_reads
from tests.weightsync.peer.served import Served
from weightsync.errors import PeerRefused, PeerUnreachable, WeightSyncError
from weightsync.peer.fetch import first_answer
from weightsync.peer.left_out import BUSY_S, FIRST_TRY_S, STALLED_S, WRONG_S, LeftOut
from weightsync.peer.messages import ALL, Have, Open, Opened


async def test_a_chunk_that_comes_late_does_not_bring_a_holder_back(reader: Reader) -> None:
    """Of two chunks that were read at once, one had wrong bytes."""
    source = await asyncio.wait_for(first_answer(reader.sources), GUARD_S)
    reader.sources.leave(source, WRONG_S)
    reader.sources.came(source, 1)
    assert not reader.left_out.is_able("a", needed=True)
    await reader.sources.close()


@pytest.mark.parametrize(
    "late", [PeerRefused("a", 404, "unknown_ticket", "as told"), PeerUnreachable("a", "as told"), Have(ALL, 1)]
)
async def test_an_answer_that_comes_late_does_not_bring_a_holder_back(
    reader: Reader, late: WeightSyncError | Have, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked what it has, and stalled meanwhile: its ticket is gone when the question arrives."""
    source = await asyncio.wait_for(first_answer(reader.sources), GUARD_S)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def have(*_: object) -> tuple[Have, float]:
        asked.set()
        await answer.wait()
        if isinstance(late, WeightSyncError):
            raise late
        return late, 0.0

    monkeypatch.setattr(reader.served.client, "have", have)
    reader.sources.refresh()
    async with asyncio.timeout(GUARD_S):
        await asked.wait()
        reader.sources.stalled(source)
        problem = reader.sources.problem
        answer.set()
        while reader.sources._asking:  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0)
    assert not reader.left_out.is_able("a", needed=True)
    assert reader.sources.problem is problem
    assert reader.sources._patience._idle == {}
    await reader.sources.close()


async def test_a_ticket_that_comes_late_is_given_back(
    served: Served, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch is over before the holder has answered: it would have one place less for half a minute."""
    asked, go_on, inner = asyncio.Event(), asyncio.Event(), served.tickets.open

    async def slow(wish: Open) -> Opened:
        opened = await inner(wish)
        asked.set()
        await go_on.wait()
        return opened

    monkeypatch.setattr(served.tickets, "open", slow)
    reader.sources.refresh()
    await asyncio.wait_for(asked.wait(), GUARD_S)
    await reader.sources.close()
    go_on.set()
    await nobody_reads(served)


def test_a_holder_may_stall_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("weightsync.peer.left_out.time.monotonic", lambda: now)
    out = LeftOut()
    for _ in range(3000):
        out.stalled("a")
    now += 30
    assert out.is_able("a", needed=True)


def test_a_holder_that_stalled_and_is_busy_now_is_left_out_no_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("weightsync.peer.left_out.time.monotonic", lambda: now)
    out = LeftOut()
    out.stalled("a")
    now += FIRST_TRY_S  # nobody else had what was missing
    out.leave("a", BUSY_S)
    now += BUSY_S
    assert out.is_able("a", needed=True)
    assert not out.is_able("a", needed=False)
    now += STALLED_S
    assert out.is_able("a", needed=False)
