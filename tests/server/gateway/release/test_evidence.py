"""What a release counts of requests, through a gateway: each counts for the version that was drawn for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import orjson
import pytest

from server.gateway import UpstreamSettings
from server.gateway.release.evidence import Observer, Watched, summed
from server.gateway.release.judge import Evidence, examine, key_of
from server.gateway.release.policy import Condition
from tests.server.gateway.harness import KEYS, RunningGateway, post, running_gateway
from tests.server.gateway.upstream import Handler, Link, Received, answering, cut, sending
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, ShareRecord, SplitRecord

ANSWER = {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
REFUSED = b"x-hotswap-refused: %b\r\n"
CANDIDATE, STABLE = 13, 12


def writes(version: int) -> Handler:
    return answering(orjson.dumps(ANSWER), extra=b"x-hotswap-weight-version: %d\r\n" % version)


async def breaks_off(link: Link, received: Received) -> None:
    await link.send(b"HTTP/1.1 200 OK\r\nx-hotswap-weight-version: 13\r\ncontent-length: 50\r\n\r\n{")
    await cut(link, received)


FAILURES: dict[str, Handler] = {
    "its engine dies of it": answering(b"{}", b"503 Service Unavailable", REFUSED % b"lost"),
    "its connection ends": cut,
    "it answers with 500": answering(b"{}", b"500 Internal Server Error"),
    "its answer breaks off": breaks_off,
    "it answers no HTTP": sending(b"no HTTP\r\n\r\n" * 100),
}


def every(count: int, bad: Handler, good: Handler) -> Handler:
    """The first request of so many gets `bad`, however often it is sent."""
    seen: list[str] = []

    async def answer(link: Link, received: Received) -> None:
        if received.method != "POST":
            await good(link, received)
            return
        name = received.headers["x-request-id"]
        if name not in seen:
            seen.append(name)
        await (good if seen.index(name) % count else bad)(link, received)

    return answer


def evidence(observer: Observer, *conditions: Condition) -> list[Evidence]:
    _, record = observer.taken() or (None, None)
    assert record is not None
    found = summed([record], conditions, CANDIDATE, STABLE)
    return [found[key_of(condition)] for condition in conditions]


async def divided(gateway: RunningGateway) -> Observer:
    """Each version has half of the requests, and is counted."""
    fleet, stats = gateway.gateway.default.fleet, gateway.gateway.default.stats
    active = ActiveRecord(STABLE, 1, None, "s", 0.0, split=SplitRecord((ShareRecord(CANDIDATE, 50.0, ("i13",)),)))
    gateway.store.put(KEYS.active, active.to_json())
    await eventually(lambda: fleet.active == active and len(fleet.serving) == 2)
    observer = Observer(stats.watchers)
    observer.watch(Watched("r", 0, frozenset({CANDIDATE, STABLE})))
    return observer


async def asked(gateway: RunningGateway, count: int, headers: str = "") -> Counter[int]:
    """Requests one after the other: how many got which status, 0 for an answer that broke off."""
    found: Counter[int] = Counter()
    for _ in range(count):
        try:
            found[(await gateway.ask(post(body={"prompt": "x"}, headers=headers))).status] += 1
        except asyncio.IncompleteReadError:
            found[0] += 1
    return found


ERRORS = Condition("errors", max_increase=0.05)


@pytest.mark.parametrize("way", FAILURES)
async def test_each_failure_counts_for_the_version_that_was_drawn(tmp_path: Path, way: str) -> None:
    """Also where another version answers in its place: the clients see nothing, and the judge sees all of it."""
    with running_gateway(tmp_path, run_coordinator=False, upstream=UpstreamSettings(scrape_interval_s=3600)) as gateway:
        bad = gateway.instance(every(3, FAILURES[way], writes(CANDIDATE)), "i13", active_version=CANDIDATE)
        async with gateway.instance(writes(STABLE), "i12", active_version=STABLE), bad as candidate:
            observer = await divided(gateway)
            statuses = await asked(gateway, 300)
            (errors,) = evidence(observer, ERRORS)
            wrote = len({r.headers["x-request-id"] for r in candidate.requests if r.method == "POST"}) * 2 // 3
            assert (errors.stable.count, errors.stable.total) == (150, 0), "no other version's failure is its own"
            assert errors.candidate.count == 150, "each request that was drawn for it is there"
            assert abs(errors.candidate.total - (150 - wrote)) <= 1, "and it failed all that it did not write"
            assert examine(ERRORS, errors, 0.01).state == "harmed"
            if way in ("its engine dies of it", "its connection ends"):
                assert statuses == {200: 300}


async def test_a_request_that_chose_its_version_is_no_evidence(tmp_path: Path) -> None:
    """A comparison is of what chance has assigned: clients that pin the candidate may ask otherwise than others."""
    with running_gateway(tmp_path, run_coordinator=False) as gateway:
        good = gateway.instance(writes(CANDIDATE), "i13", active_version=CANDIDATE)
        async with gateway.instance(writes(STABLE), "i12", active_version=STABLE), good:
            observer = await divided(gateway)
            for pin in ("x-hotswap-version: 13\r\n", "x-hotswap-min-version: 13\r\n"):
                assert await asked(gateway, 5, pin) == {200: 5}
            assert observer.taken() is None
            assert await asked(gateway, 10, "x-hotswap-min-version: 12\r\n") == {200: 10}
            (errors,) = evidence(observer, ERRORS)
            assert (errors.candidate.count, errors.stable.count) == (5, 5)
