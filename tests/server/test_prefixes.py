"""Prefixes as both sides name them, and the report that an instance makes of them."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from server import api
from server.gateway.access.keys import ANONYMOUS
from server.gateway.access.scope import CacheScopes
from server.gateway.fleet import affinity
from server.instance.inflight import Wish
from server.instance.middleware import ProvenanceMiddleware
from server.instance.prefixes import with_shares
from server.instance.provenance import current_trace
from server.prefixes import PROMPT_FIELDS, SIZES, Report, decode
from tests.server.instance.asgi import head, sent_by

ROUTES = sorted(PROMPT_FIELDS)


def body(route: str, nbytes: int) -> bytes:
    field = PROMPT_FIELDS[route][0].decode().strip('"')
    return orjson.dumps({"model": "toy", field: random.Random(nbytes).randbytes(nbytes).hex()[:nbytes], "stream": True})


async def seen_by_the_instance(route: str, raw: bytes, line: bytes) -> list[tuple[int, float]]:
    """What goes to the engine of a request that comes in two parts, under this header line for the cache scope."""
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
