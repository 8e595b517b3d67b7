"""The ledger of what an instance holds, and who hears what of it."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from server.instance import prefixes
from server.instance.prefixes import Holdings, Ledger, router
from server.prefixes import PATH, Report, decode
from weightsync.errors import WeightSyncError
from weightsync.vllm_engine.engine_core.prefixes import Changes


class Gateway:
    """Asks for reports, and keeps what they say."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.cursor = ""
        self.held: set[tuple[int, int]] = set()
        self.wholes = 0

    def ask(self) -> Report:
        report = decode(self.ledger.after(self.cursor).encode())
        self.cursor = report.cursor
        if report.whole:
            self.held.clear()
            self.wholes += 1
        self.held |= {(version, each) for version, told in report.held.items() for each in told}
        self.held -= {(version, each) for version, told in report.dropped.items() for each in told}
        return report


def test_each_gateway_hears_what_is_new_to_it() -> None:
    ledger = Ledger()
    early, late = Gateway(ledger), Gateway(ledger)
    early.ask()
    ledger.take_in([[("7", [1, 2], []), ("default", [9], [])]])
    early.ask()
    assert early.held == {(7, 1), (7, 2), (0, 9)}
    ledger.take_in([[("7", [3], [1])]])
    report = early.ask()
    assert (report.whole, report.held, report.dropped) == (False, {7: (3,)}, {7: (1,)})
    late.ask()
    assert early.held == late.held == {(7, 2), (7, 3), (0, 9)}
    assert early.ask().held == early.ask().dropped == {}
    assert (early.wholes, late.wholes) == (1, 1)


def test_what_came_and_went_is_told_as_it_is() -> None:
    ledger = Ledger()
    gateway = Gateway(ledger)
    gateway.ask()
    for _ in range(3):
        ledger.take_in([[("7", [1], [])]])
        ledger.take_in([[("7", [], [1])]])
    assert gateway.ask().dropped == {7: (1,)}
    assert gateway.held == set()


def test_it_holds_what_any_rank_holds() -> None:
    ledger = Ledger()
    gateway = Gateway(ledger)
    ledger.take_in([[("7", [1], [])], [("7", [1, 2], [])]])
    gateway.ask()
    ledger.take_in([[("7", [], [1])], []])
    assert gateway.ask().dropped == {}
    ledger.take_in([[], [("7", [], [1])]])
    gateway.ask()
    assert gateway.held == {(7, 2)}


@pytest.mark.parametrize("cursor", ["", "x", "-", "0-0", "{name}-", "{name}-x", "{name}-²", "{name}--1", "{name}-9999"])
def test_who_has_no_cursor_of_this_process_is_told_all(cursor: str) -> None:
    ledger = Ledger()
    ledger.take_in([[("7", [1], [])]])
    report = ledger.after(cursor.format(name=ledger.after("").cursor.partition("-")[0]))
    assert (report.whole, report.held) == (True, {7: [1]})


def test_who_has_missed_too_much_is_told_all_and_memory_is_bounded() -> None:
    ledger = Ledger(most=8)
    fast, slow = Gateway(ledger), Gateway(ledger)
    slow.ask()
    for n in range(100):
        ledger.take_in([[("7", [n], [n - 2] if n > 1 else [])]])
        fast.ask()
    slow.ask()
    assert fast.held == slow.held == {(7, 98), (7, 99)}
    assert (fast.wholes, slow.wholes) == (1, 2)
    assert len(ledger._changes) <= 8


async def test_the_route_answers_and_asks_the_engine_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "REFRESH_S", 3600.0)
    asked = 0

    async def ask() -> list[Changes]:
        nonlocal asked
        asked += 1
        return [[("7", [1, 2], [])]]

    app = FastAPI()
    app.state.hotswap_prefixes = Holdings(ask)
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://i") as client:
        first = decode((await client.get(PATH)).content)
        again = decode((await client.get(PATH, params={"after": first.cursor})).content)
    assert (first.whole, first.held, again.whole, again.held) == (True, {7: (1, 2)}, False, {})
    assert asked == 1


async def test_an_engine_that_has_died_is_no_fault_of_the_route() -> None:
    async def ask() -> list[Changes]:
        raise WeightSyncError("gone")

    app = FastAPI()
    app.state.hotswap_prefixes = Holdings(ask)
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://i") as client:
        assert (await client.get(PATH)).status_code == 503
