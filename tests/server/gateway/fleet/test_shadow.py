"""A share of live requests is repeated on a version that is tried out, and the originals never feel it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.answers.desk import about_of
from server.answers.parse import parse
from server.gateway import UpstreamSettings
from server.gateway.fleet import shadow
from server.gateway.fleet.shadow import Repeated
from server.gateway.fleet.view import Fleet
from server.gateway.wire.bodies import Usage
from tests.server.gateway.harness import KEYS, RunningGateway, get, new_key, post, running_gateway
from tests.server.gateway.upstream import Handler, Link, Received, Upstream, answering, cut, never_answer, sending
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, ShareRecord, SplitRecord

HEAD = b"x-hotswap-weight-version: %d\r\n"


def saying(version: int, text: str) -> Handler:
    async def answer(link: Link, received: Received) -> None:
        if not (received.method == "POST" and orjson.loads(received.body).get("stream")):
            usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
            told = {"choices": [{"index": 0, "text": text}], "usage": usage}
            await link.json(orjson.dumps(told), extra=HEAD % version)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + HEAD % version
        await link.send(head + b"transfer-encoding: chunked\r\n\r\n")
        for letter in text:
            await link.chunk(b"data: %b\n\n" % orjson.dumps({"choices": [{"index": 0, "text": letter}]}))
        await link.chunk(b"data: [DONE]\n\n")
        await link.end()

    return answer


@dataclass
class Trial:
    """Version 12 has all requests, and a share of them is repeated on version 13."""

    gateway: RunningGateway
    live: Upstream
    tried: Upstream

    @property
    def fleet(self) -> Fleet:
        return self.gateway.gateway.default.fleet

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: n for (version, outcome), n in dict(self.fleet.shadows.outcomes).items() if version == 13}

    async def share(self, percent: float) -> None:
        split = SplitRecord((ShareRecord(13, 0.0, ("i13",), shadow=percent),))
        active = ActiveRecord(12, 1, None, "s", 0.0, split=split)
        self.gateway.store.put(KEYS.active, active.to_json())
        await eventually(lambda: self.fleet.active == active and len(self.fleet.serving) == 2)

    async def ask(self, count: int, headers: str = "", **body: Any) -> Counter[int]:
        """Statuses of requests one after the other; no client is answered by the version that is tried out."""
        found: Counter[int] = Counter()
        async with self.gateway.client() as client:
            for _ in range(count):
                client.writer.write(post(body={"prompt": "x", **body}, headers=headers))
                answer = await client.answer()
                assert b"tried" not in answer.body
                found[answer.status] += 1
        return found


@contextlib.asynccontextmanager
async def trial(directory: Path, **settings: Any) -> AsyncIterator[Trial]:
    with running_gateway(directory, run_coordinator=False, **settings) as gateway:
        first = gateway.instance(saying(12, "live"), "i12", active_version=12)
        second = gateway.instance(saying(13, "tried"), "i13", active_version=13)
        async with first as live, second as tried:
            yield Trial(gateway, live, tried)


def text_of(answer: Repeated) -> str:
    """As a judge reads it."""
    about = about_of(answer.finished, answer.capture.wanted)
    return parse(answer.capture.body, b"".join(answer.capture.pieces), about).choices[0].text


def generations(at: Upstream) -> list[Received]:
    return [received for received in at.requests if received.method == "POST"]


async def test_a_share_of_the_requests_is_repeated_unseen(tmp_path: Path) -> None:
    async with trial(tmp_path) as t:
        await t.share(25.0)
        judge = t.fleet.shadows.listen()
        headers = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nx-request-id: mine\r\n"
        assert await t.ask(40, headers) == {200: 40}
        await eventually(lambda: t.outcomes == {"answered": 10})
        assert len(generations(t.live)) == 40, "the version has no requests of its own"
        repeated = generations(t.tried)
        assert [r.body for r in repeated] == [generations(t.live)[0].body] * 10
        head = repeated[0].headers
        assert (head["x-hotswap-priority"], head["x-request-id"]) == ("10", "mine-shadow")
        assert "traceparent" not in head
        await eventually(lambda: judge.qsize() == 10)
        answer = judge.get_nowait()
        told = answer.finished
        assert (told.request_id, told.route, told.status, told.instance) == ("mine", "/v1/completions", 200, "i13")
        assert (told.first_version, told.drawn_version) == (13, 13)
        assert 0 < (told.ttft_s or 0.0) <= told.duration_s
        assert text_of(answer) == "tried"
        assert (told.usage, answer.capture.body) == (Usage(3, 5), repeated[0].body)
        answer.capture.close()
        assert t.fleet.shadows.memory.used == 9 * (len(repeated[0].body) + told.bytes_out)
        page = (await t.gateway.ask(get("/metrics"), admin=True)).body.decode()
        assert 'hotswap_shadow_requests_total{model="toy",outcome="answered",version="13"} 10.0' in page
        assert 'hotswap_shadow_duration_seconds_count{model="toy",version="13"} 10.0' in page


async def test_streams_are_repeated_and_compared(tmp_path: Path) -> None:
    async with trial(tmp_path) as t:
        await t.share(100.0)
        judge = t.fleet.shadows.listen()
        assert await t.ask(3, stream=True) == {200: 3}
        await eventually(lambda: judge.qsize() == 3)
        answer = judge.get_nowait()
        assert (text_of(answer), answer.finished.streamed) == ("tried", True)


async def test_pins_and_other_routes_are_not_repeated(tmp_path: Path) -> None:
    async with trial(tmp_path) as t:
        await t.share(100.0)
        assert await t.ask(2, "x-hotswap-version: 12\r\n") == {200: 2}
        assert (await t.gateway.ask(post("/v1/embeddings", {"input": "x"}))).status == 200
        least = post(body={"prompt": "x"}, headers="x-hotswap-min-version: 13\r\n")
        assert (await t.gateway.ask(least)).status == 200
        assert (t.outcomes, len(generations(t.tried))) == ({}, 1), "what asked for it itself, and no repetition"


async def test_a_request_that_is_sent_again_is_repeated_once(tmp_path: Path) -> None:
    async with trial(tmp_path, upstream=UpstreamSettings(scrape_interval_s=3600.0)) as t:  # no probe finds it first
        await t.share(100.0)
        t.gateway.register("http://127.0.0.1:1", "i11", active_version=12)
        for _ in range(6):
            assert await t.ask(1) == {200: 1}
        assert t.fleet.retries["not_sent"] > 0, "one that does not listen was asked first"
        await eventually(lambda: sum(t.outcomes.values()) == 6)
        assert len(generations(t.tried)) == 6


async def test_a_repetition_counts_in_no_limit(tmp_path: Path) -> None:
    async with trial(tmp_path) as t:
        await t.share(100.0)
        _, key = await new_key(t.gateway, limits={"requests_per_min": 2})
        assert await t.ask(5, key) == {200: 2, 429: 3}
        await eventually(lambda: t.outcomes == {"answered": 2})


async def never_ends(link: Link, _: Received) -> None:
    await link.sse_head()
    while True:
        await link.chunk(b"data: %b\n\n" % (b"x" * 65536))


talks_nonsense = sending(b"this is no HTTP\r\n\r\n" * 1000)
fails = answering(status=b"500 Internal Server Error")


@pytest.mark.parametrize("broken", [never_answer, cut, talks_nonsense, never_ends, fails])
async def test_nothing_that_becomes_of_it_reaches_the_original(tmp_path: Path, broken: Handler) -> None:
    """Under overload: more clients than the live instance takes at once, each request repeated as far as that goes."""
    async with trial(tmp_path, upstream=UpstreamSettings(max_in_flight=4)) as t:
        t.tried.handler = broken
        await t.share(100.0)
        running: list[int] = []

        async def watch() -> None:
            while True:
                running.append(len(t.fleet.shadows.running))
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        found = await asyncio.gather(*(t.ask(15, stream=n % 2 == 0) for n in range(8)))
        watching.cancel()
        assert sum(found, Counter[int]()) == {200: 120}, "each has its answer"
        assert max(running) <= 2, "half of what the instance takes"
        await t.ask(1)
        tried = t.fleet.instances["i13"]
        assert (tried.health.closed, tried.working, tried.inflight) == (True, 0, 0)
        await eventually(lambda: sum(t.outcomes.values()) + len(t.fleet.shadows.running) == 121)
        assert t.outcomes.get("answered", 0) == 0
        if broken is never_ends:
            await eventually(lambda: t.outcomes.get("too_large"))
        assert t.fleet.shadows.memory.used == 0


async def test_it_gives_way_to_a_request(tmp_path: Path) -> None:
    async with trial(tmp_path, upstream=UpstreamSettings(max_in_flight=1)) as t:
        t.tried.handler = never_answer
        await t.share(100.0)
        await t.ask(1)
        await eventually(lambda: len(generations(t.tried)) == 1)
        t.tried.handler = saying(13, "asked for")
        answer = await t.gateway.ask(post(body={"prompt": "x"}, headers="x-hotswap-version: 13\r\n"))
        assert (answer.status, orjson.loads(answer.body)["choices"][0]["text"]) == (200, "asked for")
        assert t.outcomes == {"cut": 1}


async def test_while_requests_wait_nothing_is_repeated(tmp_path: Path) -> None:
    async with trial(tmp_path, upstream=UpstreamSettings(max_in_flight=1)) as t:
        go_on, answers = asyncio.Event(), t.live.handler

        async def slowly(link: Link, received: Received) -> None:
            await go_on.wait()
            await answers(link, received)

        t.live.handler = slowly
        await t.share(100.0)
        asked = [asyncio.create_task(t.ask(1)) for _ in range(6)]
        await eventually(lambda: (len(t.gateway.gateway.default.gate.queue), t.outcomes) == (5, {"answered": 1}))
        go_on.set()
        assert sum(await asyncio.gather(*asked), Counter[int]()) == {200: 6}
        await eventually(lambda: sum(t.outcomes.values()) == 6)
        assert t.outcomes["no_room"] == 4, "between the first and the last of them somebody waited"


async def test_one_that_takes_too_long_ends_and_a_slow_judge_loses_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trial(tmp_path) as t:
        await t.share(100.0)
        monkeypatch.setattr(shadow, "KEPT", 2)
        judge = t.fleet.shadows.listen()
        await t.ask(5)
        await eventually(lambda: (judge.qsize(), t.fleet.shadows.dropped) == (2, 3))
        monkeypatch.setattr(shadow, "LIMIT_S", 0.1)
        t.tried.handler = never_answer
        await t.ask(1)
        await eventually(lambda: t.outcomes.get("late") == 1)
