"""The serving benchmark's parts: prompts, arrivals, figures; and all of it once, small."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from loadtest.serving.arrivals import CUT, Load, Plan, Seen, Stream
from loadtest.serving.goodput import Target, figures, jain, quantile
from loadtest.serving.prompts import SYSTEMS, Prompts
from tests.server.gateway.upstream import Link, Received, upstream
from tests.waiting import eventually

STARTS = ()  # `up` starts nothing here


def test_prompts_are_varied_repeatable_and_share_beginnings() -> None:
    def some(seed: int) -> list[str]:
        supply = Prompts(seed, shared=0.5)
        return [supply.prompt() for _ in range(400)]

    prompts = some(1)
    assert prompts == some(1) != some(2)
    assert len(set(prompts)) > 390
    assert 0.4 < sum(p.startswith(SYSTEMS) for p in prompts) / 400 < 0.6
    lengths = sorted(len(p) for p in prompts)
    assert lengths[0] >= 24
    assert lengths[-1] > 2 * lengths[len(lengths) // 2]
    assert all(32 <= ord(c) < 127 or c == "\n" for p in prompts for c in p)


def test_fairness_and_quantiles() -> None:
    assert jain([3.0, 3.0]) == 1.0
    assert jain([5.0, 1.0]) == pytest.approx(36 / 52)
    assert jain([4.0, 0.0]) == 0.5
    assert jain([0.0, 0.0]) == 1.0
    values = [float(v) for v in range(1, 101)]
    assert [quantile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert quantile([], 0.5) is None


def test_goodput_counts_what_meets_both_bounds() -> None:
    seen = [
        Seen("a", 0.0, 200, first=0.1, gap=0.01, tokens=10, seconds=0.2),
        Seen("a", 0.0, 200, first=0.9, gap=0.01, tokens=10, seconds=1.0),
        Seen("a", 0.0, 200, first=0.1, gap=0.09, tokens=10, seconds=1.0),
        Seen("a", 0.0, 429),
        Seen("a", 0.0, 504),
        Seen("a", 0.0, 500),
        Seen("a", 0.0),
    ]
    found = figures(seen, 2.0, Target(0.5, 0.05))
    assert (found["offered_per_s"], found["completed_per_s"], found["goodput_per_s"]) == (3.5, 1.5, 0.5)
    assert (found["good_tokens_per_s"], found["tokens_per_s"]) == (5.0, 15.0)
    assert (found["refused"], found["unfinished"], found["failed"]) == ({"429": 1, "504": 1}, 1, 1)
    assert found["first_token_ms_p99"] == pytest.approx(900.0)


@contextlib.asynccontextmanager
async def answering(tokens: int, broken: bool = False) -> AsyncIterator[str]:
    async def handler(link: Link, received: Received) -> None:
        asked = orjson.loads(received.body)
        assert asked["stream"]
        assert received.headers["x-mark"] == "yes"
        if asked["max_tokens"] % 5 == 0:
            await link.json(b"{}", status=b"429 Too Many Requests")
            return
        await link.sse_head()
        for _ in range(tokens):
            await link.chunk(b'data: {"choices":[{"text":"x"}]}\n\n')
            await asyncio.sleep(0.001)
        if broken:
            link.cut()
            return
        await link.chunk(b"data: [DO")
        await link.chunk(b"NE]\n\n")
        await link.end()

    async with upstream(handler) as up:
        yield up.address


def planned(url: str, seconds: float, grace_s: float, clients: int = 0) -> Load:
    return Load(Plan(url, "m", seconds, grace_s, 3, [Stream("a", 60.0, {"x-mark": "yes"})], clients))


async def offered(url: str, grace_s: float = 60.0) -> list[Seen]:
    load = planned(url, 0.5, grace_s)
    await load.run()
    return load.seen


async def one_after_the_other(url: str) -> list[Seen]:
    """The answers that three clients have seen, once each kind of answer has come."""
    load = planned(url, 60.0, 60.0, clients=3)
    running = asyncio.create_task(load.run())
    await eventually(lambda: len(load.seen) > 3 and {200, 429} <= {seen.status for seen in load.seen}, 60)
    load._end = 0.0
    await running
    return load.seen


async def test_arrivals_do_not_wait_for_answers_and_tell_what_became_of_them() -> None:
    async with answering(5) as url:
        seen = await offered(url)
        of_three = await one_after_the_other(url)
    assert 10 < len(seen) < 60
    assert {s.status for s in seen} == {s.status for s in of_three} == {200, 429}
    for s in (s for s in seen if s.status == 200):
        assert s.first is not None
        assert s.gap is not None
        assert 0 < s.first < (s.seconds or 0.0)
        assert s.gap > 0
        assert s.tokens % 5


async def test_broken_and_late_answers_are_no_good_ones() -> None:
    async with answering(5, broken=True) as url:
        assert {0} <= {s.status for s in await offered(url)} <= {0, 429}
    async with answering(10**6) as url:
        assert {CUT} <= {s.status for s in await offered(url, grace_s=0.0)} <= {CUT, 429}
    assert {s.status for s in await offered("http://127.0.0.1:1")} == {0}


async def test_two_runs_of_a_plan_offer_the_same() -> None:
    async with answering(1) as url:
        first, second = await offered(url), await offered(url)
    count = min(len(first), len(second)) - 5
    assert count > 10
    assert [s.tokens or s.status for s in first[:count]] == [s.tokens or s.status for s in second[:count]]


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.slow
def test_all_of_it_once(tmp_path: Path) -> None:
    report = tmp_path / "serve.json"
    command = [sys.executable, "-m", "server.cli", "bench", "serve", "--small", "--json", str(report)]
    subprocess.run(command, check=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = orjson.loads(report.read_bytes())
    assert found["saturation"]["completed_per_s"] > 0
    assert found["machine"]["cores"]
    for load in found["loads"].values():
        assert load["queue"]["completed_per_s"] > 0
        assert load["queue"]["failed"] == load["direct"]["failed"] == 0
    assert set(found["fairness"]["queue"]) >= {"jain_tokens", "heavy", "light"}
    assert set(found["urgent"]["queue"]) == {"urgent", "patient"}
