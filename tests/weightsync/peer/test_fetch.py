"""A fetch beside holders that stall, go, come and leave, and what it leaves behind at them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.waiting import eventually, stays
from tests.weightsync.codes import refused
from tests.weightsync.peer.served import GUARD_S, Reader, Served, nobody_reads
from weightsync.control.records import CopyRecord
from weightsync.errors import PeerRefused, PeerUnreachable, WeightSyncError
from weightsync.peer import holders
from weightsync.peer.fetch import Fetch, first_answer, to_the_end
from weightsync.peer.holders import BUSY_S, FIRST_TRY_S, OPEN_AT_ONCE, STALLED_S, WRONG_S, LeftOut
from weightsync.peer.messages import ALL, Have, Open, Opened

FOR_EVER_S = 3600.0


async def test_the_only_holder_is_tried_again_though_it_stalled(
    served: Served, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "STALLED_S", FOR_EVER_S)
    monkeypatch.setattr(holders, "FIRST_TRY_S", 0.01)
    reader.wrapped.stalls = 4
    async with asyncio.timeout(GUARD_S):
        copy = await reader.claim()
        await reader.fetch(copy).run()
    assert reader.wrapped.stalls == 0
    assert copy.head is not None
    copy.head.write(copy.mapped.view)
    assert bytes(copy.mapped.view) == served.path.read_bytes()
    await nobody_reads(served)


def test_a_holder_that_stalled_is_left_out_while_others_have_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("weightsync.peer.holders.time.monotonic", lambda: now)
    out, tried = LeftOut(), list[float]()
    out.stalled("a")
    while now < 400:
        now += 0.5
        if out.is_able("a", needed=True):
            tried.append(now)
            out.stalled("a")
    assert [b - a for a, b in zip([100.0, *tried], tried, strict=False)] == [1, 2, 4, 8, 16, *[30] * (len(tried) - 5)]
    assert not out.is_able("a", needed=False)
    for _ in range(3000):  # for days
        out.stalled("a")
    now += 30
    assert out.is_able("a", needed=True)
    out.came("a")
    assert out.is_able("a", needed=False)
    out.leave("a", 60)  # for wrong bytes: however much it is needed
    now += 59
    assert not out.is_able("a", needed=True)
    out.stalled("b")
    now += FIRST_TRY_S  # nobody else had what was missing
    out.leave("b", BUSY_S)
    now += BUSY_S
    assert out.is_able("b", needed=True)
    assert not out.is_able("b", needed=False), "one that stalled and is busy now is left out no shorter"
    now += STALLED_S
    assert out.is_able("b", needed=False)


async def test_a_fetch_waits_while_the_store_knows_of_a_holder_and_fails_when_it_does_not(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "SILENT_S", 0.1)
    reader.offered = [replace(reader.served.copy, address="127.0.0.1:1")]
    waiting = asyncio.create_task(first_answer(reader.sources))
    problem = await eventually(lambda: reader.sources.held_up(), GUARD_S)
    assert problem is not None
    assert problem.code == "no_holder"
    await stays(lambda: not waiting.done(), 0.3)
    reader.offered = []
    with refused("no_holder", match="cannot be reached"):
        await asyncio.wait_for(waiting, GUARD_S)
    await reader.sources.close()


async def test_what_cannot_be_connected_to_is_given_its_ticket_back(served: Served, reader: Reader) -> None:
    """Its data port may be closed to this host: it would soon have no place left for others."""

    def refuse() -> None:
        raise PeerUnreachable("a", "as told")

    reader.wrapped.connecting = refuse
    waiting = asyncio.create_task(first_answer(reader.sources))
    await eventually(lambda: reader.sources.problem is not None, GUARD_S)
    await nobody_reads(served)
    waiting.cancel()
    await reader.sources.close()


async def test_who_is_stopped_while_it_connects_leaves_nothing_open(served: Served, reader: Reader) -> None:
    connecting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        connecting.set()
        go_on.wait(GUARD_S)

    reader.wrapped.connecting = wait
    reader.sources.refresh()
    assert await asyncio.to_thread(connecting.wait, GUARD_S)
    await reader.sources.close()
    go_on.set()
    await nobody_reads(served)
    await eventually(lambda: reader.wrapped.closed, GUARD_S)


async def test_slow_answers_do_not_make_it_open_ever_more_holders(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "OPENING_S", FOR_EVER_S)
    asked = list[int]()

    async def silent(incoming: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)
        await incoming.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server, asyncio.timeout(GUARD_S):
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reader.offered = [replace(reader.served.copy, host=f"h{n}", address=address) for n in range(30)]
        for _ in range(10):
            reader.sources.refresh()
        await eventually(lambda: len(asked) >= OPEN_AT_ONCE, GUARD_S)

        def asks_no_more() -> bool:
            reader.sources.refresh()
            return len(asked) == OPEN_AT_ONCE

        await stays(asks_no_more, 0.1)
        await reader.sources.close()


async def test_nothing_is_written_after_a_fetch_that_was_cancelled_twice(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the store is lost while it is being stopped."""
    reading, go_on = threading.Event(), threading.Event()
    copy = await asyncio.wait_for(reader.claim(), GUARD_S)
    fetch = reader.fetch(copy)
    inner = Fetch._read_now

    def slow(self: Fetch, *read: object) -> None:
        reading.set()
        go_on.wait(GUARD_S)
        inner(self, *read)  # type: ignore[arg-type]

    monkeypatch.setattr(Fetch, "_read_now", slow)
    task = asyncio.create_task(fetch.run())
    assert await asyncio.to_thread(reading.wait, GUARD_S)
    for _ in range(3):
        task.cancel()
        await stays(lambda: not task.done(), 0.05)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, GUARD_S)
    assert not fetch._threads


async def test_work_that_must_end_ends_before_its_cancelled_caller() -> None:
    go_on, ended = asyncio.Event(), list[str]()

    async def work() -> int:
        await go_on.wait()
        ended.append("work")
        return 7

    async def caller() -> None:
        try:
            await to_the_end(work())
        finally:
            ended.append("caller")

    task = asyncio.create_task(caller())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work", "caller"]
    assert await to_the_end(work()) == 7


async def test_near_holders_are_known_by_their_racks(reader: Reader) -> None:
    near, far = (replace(reader.served.copy, rack=rack) for rack in ("r1", "r2"))
    assert [holders.distance(near, "r1", s) for s in (0.0, 0.05)] == [0, 0]
    assert [holders.distance(far, "r1", s) for s in (0.0, 0.004, 0.05)] == [1, 1, 2]
    assert [holders.distance(far, "", s) for s in (0.0, 0.05)] == [0, 2]  # by the round trip, where racks are not known
    fetching: CopyRecord = replace(far, state="fetching")
    assert holders.known_holder(near, "r1").have is None
    assert holders.known_holder(fetching, "r1").have is not None


async def test_holders_are_told_before_a_peer_ends(served: Served, reader: Reader) -> None:
    await asyncio.wait_for(reader.claim(), GUARD_S)
    assert served.readers() == 1
    await reader.sources.close()
    await reader.background.end(GUARD_S)
    assert served.readers() == 0
    go_on = asyncio.Event()
    reader.background.begin(asyncio.wait_for(go_on.wait(), FOR_EVER_S))  # type: ignore[arg-type]
    await reader.background.end(0.01)  # one that does not answer
    assert not reader.background._tasks


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

    async def slow(wish: Open, *, told: bool) -> Opened:
        opened = await inner(wish, told=told)
        asked.set()
        await go_on.wait()
        return opened

    monkeypatch.setattr(served.tickets, "open", slow)
    reader.sources.refresh()
    await asyncio.wait_for(asked.wait(), GUARD_S)
    await reader.sources.close()
    go_on.set()
    await nobody_reads(served)
