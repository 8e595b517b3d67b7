"""Prefixes as gateway and instance name them, the report of an instance, and the ledger of what it holds."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI

from server import api
from server.gateway.access.keys import ANONYMOUS
from server.gateway.access.scope import CacheScopes
from server.gateway.fleet import affinity
from server.instance import prefixes
from server.instance.inflight import Wish
from server.instance.middleware import ProvenanceMiddleware
from server.instance.prefixes import Holdings, Ledger, router, with_shares
from server.instance.provenance import current_trace
from server.prefixes import PATH, PROMPT_FIELDS, SIZES, Report, decode
from tests.server.instance.asgi import head, sent_by
from weightsync.errors import WeightSyncError
from weightsync.vllm_engine.engine_core.prefixes import Changes

ROUTES = sorted(PROMPT_FIELDS)


def body(route: str, nbytes: int) -> bytes:
    field = PROMPT_FIELDS[route][0].decode().strip('"')
    return orjson.dumps({"model": "toy", field: random.Random(nbytes).randbytes(nbytes).hex()[:nbytes], "stream": True})


async def seen_by_the_instance(route: str, raw: bytes, line: bytes) -> list[tuple[int, float]]:
    """The parts that go to the engine, of a request that comes in two, under this header line for the cache scope."""
    found: list[tuple[int, float]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        trace = current_trace.get()
        assert trace is not None
        found.extend(trace.prefixes)
        await send(head())

    name, _, value = line.removesuffix(b"\r\n").partition(b": ")
    parts = raw[: len(raw) // 3], raw[len(raw) // 3 :]
    await sent_by(ProvenanceMiddleware(app, lambda: 1), route, *parts, headers=[(name, value)])
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("nbytes", [100, 300, 5000, 100_000])
async def test_both_sides_come_to_the_same_numbers(route: str, nbytes: int) -> None:
    line = CacheScopes(shared=False).line(ANONYMOUS)
    raw = body(route, nbytes)
    hint = affinity.hint(route, raw, line, None)
    there = await seen_by_the_instance(route, raw, line)
    assert [prefix for prefix, _ in there] == hint.prefixes
    assert len(hint.prefixes) == sum(size <= nbytes for size in SIZES) or nbytes == 300
    assert with_shares(route, raw, Wish.of([]).scope) == there, "without a key it is the public scope"
    assert with_shares(route, raw, "of-another-key") != there or not there


def test_shares_are_of_the_whole_prompt() -> None:
    raw = body("/v1/completions", 100_000)
    shares = [share for _, share in with_shares("/v1/completions", raw, "s")]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(SIZES[-1] / len(raw), rel=0.01)


def test_routes_without_a_prompt_have_no_prefixes() -> None:
    for route in {route.path for route in api.ROUTES} - set(ROUTES):
        assert with_shares(route, b'{"prompt": "' + b"x" * 1000, "s") == []


def test_a_report_says_what_was_written() -> None:
    report = decode(Report("ab-12", True, {0: [1, 2**64 - 1], 7: []}, {3: (5,)}).encode())
    assert (report.cursor, report.whole) == ("ab-12", True)
    assert (report.held, report.dropped) == ({0: (1, 2**64 - 1), 7: ()}, {3: (5,)})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        orjson.dumps({"ok": True}),
        Report("a-1", False, {}, {}).encode()[:-1],
        Report("a-1", False, {}, {}).encode() + b"x",
        Report("", True, {}, {}).encode(),
        Report("a b", True, {}, {}).encode(),
        Report("a\r\nx: y", True, {}, {}).encode(),
        Report("é", True, {}, {}).encode(),
        Report("a-1", False, {1: [7]}, {}).encode().replace(b"\xc4\x08", b"\xc4\x07").replace(b"\0\0\xc4", b"\0\xc4"),
    ],
)
def test_what_is_no_report_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode(raw)


def test_any_bytes_are_a_report_or_refused() -> None:
    rng = random.Random(5)
    good = Report("abc-9", False, {1: [1, 2, 3]}, {2: [4]}).encode()
    for _ in range(3000):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            report = decode(bytes(raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.2 else raw))
        except ValueError:
            continue
        assert report.cursor.isascii()
        told = [prefix for side in (report.held, report.dropped) for each in side.values() for prefix in each]
        assert all(0 <= prefix < 2**64 for prefix in told)


# the ledger


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


def asking(ask: Callable[[], Awaitable[list[Changes]]]) -> httpx.AsyncClient:
    """A client of the route of an instance whose engine answers so."""
    app = FastAPI()
    app.state.hotswap_prefixes = Holdings(ask)
    app.include_router(router)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://i")


async def test_the_route_answers_and_asks_the_engine_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "REFRESH_S", 3600.0)
    asked: list[list[Changes]] = []

    async def ask() -> list[Changes]:
        asked.append([[("7", [1, 2], [])]])
        return asked[-1]

    async with asking(ask) as client:
        first = decode((await client.get(PATH)).content)
        again = decode((await client.get(PATH, params={"after": first.cursor})).content)
    assert (first.whole, first.held, again.whole, again.held) == (True, {7: (1, 2)}, False, {})
    assert len(asked) == 1


async def test_an_engine_that_has_died_is_no_fault_of_the_route() -> None:
    async def ask() -> list[Changes]:
        raise WeightSyncError("gone")

    async with asking(ask) as client:
        assert (await client.get(PATH)).status_code == 503
