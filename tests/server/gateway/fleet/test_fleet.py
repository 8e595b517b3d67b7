"""Several instances behind one gateway: who is asked, who is left out and taken back, and what is sent again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.gateway import HealthSettings, UpstreamSettings
from server.gateway.fleet import retries
from tests.server.asking import call
from tests.server.gateway.harness import RunningGateway, code, get, post, running_gateway
from tests.server.gateway.upstream import (
    Answer,
    Handler,
    Moody,
    Received,
    Upstream,
    answer_json,
    answering,
    cut,
    sending,
    streaming,
    upstream,
)
from tests.waiting import eventually, wait_until

UPSTREAM = UpstreamSettings(  # an ejected instance stays ejected until the test is over
    connect_timeout_s=60.0, read_idle_timeout_s=60.0, scrape_interval_s=3600.0,
    health=HealthSettings(ejection_s=600.0, max_ejection_s=600.0),
)  # fmt: skip
WATCHFUL = UpstreamSettings(
    scrape_interval_s=0.02, scrape_timeout_s=10.0, health=HealthSettings(probe_timeout_s=10.0, max_ejected=0.99)
)
QUICK = UpstreamSettings(  # ejections end at once, and trials follow each other at once
    scrape_interval_s=3600.0, health=HealthSettings(ejection_s=0.01, max_ejection_s=0.01, trial_interval_s=0.0)
)
FORGIVING = UpstreamSettings(scrape_interval_s=3600.0, health=HealthSettings(eject_after=10**6, min_requests=10**6))
LONG = HealthSettings().eject_after
CHAT = "/v1/chat/completions"
HALF_A_HEAD = sending(b"HTTP/1.1 200 OK\r\ncontent-")


@asynccontextmanager
async def fleet(gateway: RunningGateway, *handlers: Handler) -> AsyncIterator[list[Upstream]]:
    """Instances i0, i1, ... that answer by these handlers."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(gateway.instance(h, f"i{n}")) for n, h in enumerate(handlers)]


def chat(application: int, question: int = 0) -> bytes:
    system = f"You answer for application {application}. " * 40
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"question {question}"}]
    return orjson.dumps({"model": "toy", "messages": messages})


async def ask(gateway: RunningGateway, body: bytes = b"{}", headers: str = "", path: str = CHAT) -> Answer:
    return await gateway.ask(post(path, body, headers))


def asked(up: Upstream) -> list[Received]:
    """Requests of clients, without the gateway's own."""
    return [r for r in up.requests if r.method == "POST"]


async def seen(gateway: RunningGateway, instance_id: str) -> dict[str, Any]:
    _, body = await call(gateway, "GET", "/admin/instances")
    return next(i for i in body["instances"] if i["id"] == instance_id)


# affinity


async def test_a_session_stays_and_moves_when_its_instance_goes(gateway: RunningGateway) -> None:
    async with fleet(gateway, *[answer_json] * 3) as ups:
        for n in range(20):  # others use the fleet meanwhile
            await ask(gateway, chat(n))
            await ask(gateway, headers="X-Session-Id: ada\r\n")
        homes = [up for up in ups if any("x-session-id" in r.headers for r in asked(up))]
        assert len(homes) == 1
        gone = ups.index(homes[0])
        gateway.unregister(f"i{gone}")
        for n in range(10):
            await ask(gateway, chat(n))
            await ask(gateway, headers="X-Session-Id: ada\r\n")
        sessions = Counter(n for n, up in enumerate(ups) for r in asked(up) if r.headers.get("x-session-id") == "ada")
        assert sorted(sessions.values()) == [10, 20]


async def test_one_instance_costs_no_thought(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.fleet.affinity.hint", None)  # it would fail
    async with fleet(gateway, answer_json):
        assert (await ask(gateway, chat(0))).status == 200
    assert gateway.gateway.default.fleet.picks["only"] == 1


# ejection


async def test_who_fails_is_left_out_and_who_is_well_is_not(gateway: RunningGateway) -> None:
    async with fleet(gateway, answering(status=b"500 Internal Server Error"), answer_json) as (bad, good):
        statuses = Counter([(await ask(gateway)).status for _ in range(4 * LONG)])
        assert statuses == {500: LONG, 200: 3 * LONG}
        assert (len(asked(bad)), len(asked(good))) == (LONG, 3 * LONG)
        ill, well = await seen(gateway, "i0"), await seen(gateway, "i1")
        assert (ill["circuit"], ill["ejections"], ill["eligible"]) == ("open", 1, True)
        assert 0 < ill["ejected_for_s"] <= UPSTREAM.health.ejection_s
        assert (well["circuit"], well["ejected_for_s"]) == ("closed", None)
    page = (await gateway.ask(get("/metrics"))).body.decode()
    assert 'hotswap_instance_circuit_state{instance_id="i0",model="toy",state="open"} 1.0' in page
    assert 'hotswap_instance_ejections_total{instance_id="i0",model="toy"} 1.0' in page


@pytest.mark.parametrize("gateway", [QUICK], indirect=True)
async def test_who_is_left_out_is_tried_again(gateway: RunningGateway) -> None:
    moody = Moody()
    async with fleet(gateway, moody, answer_json):
        health = gateway.gateway.default.fleet.instances["i0"].health
        moody.status = b"503 Service Unavailable"
        while not health.ejections:
            await ask(gateway)
        while health.ejections < 3:  # a trial that fails: out again
            await ask(gateway)
        moody.status = b"200 OK"
        async with asyncio.timeout(30):
            while not health.closed:
                await ask(gateway)
        assert not gateway.gateway.default.fleet.unwell


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        (b"400 Bad Request", b""),
        (b"503 Service Unavailable", b"x-hotswap-refused: engine\r\n"),
        (b"409 Conflict", b"x-hotswap-refused: version\r\n"),
    ],
)
async def test_what_is_no_fault_of_the_instance_does_not_count(
    gateway: RunningGateway, line: bytes, extra: bytes
) -> None:
    async with fleet(gateway, answering(status=line, extra=extra), answer_json) as (odd, _):
        while len(asked(odd)) < 3 * LONG:
            await ask(gateway)
        assert not gateway.gateway.default.fleet.unwell


async def test_who_refuses_connections_is_left_out_and_nobody_notices(gateway: RunningGateway) -> None:
    async with fleet(gateway, answer_json):
        gateway.register("http://127.0.0.1:1", "dead")
        instance = gateway.gateway.default.fleet.instances["dead"]
        for _ in range(60 * LONG):
            assert (await ask(gateway)).status == 200
            instance.failed_at = 0.0  # as if a second had passed: it may be asked again
            if instance.health.ejections:
                break
        assert not instance.health.closed
        assert gateway.gateway.default.fleet.retries["not_sent"] == LONG


@pytest.mark.parametrize("gateway", [WATCHFUL], indirect=True)
async def test_probes_take_an_instance_out_and_back(gateway: RunningGateway) -> None:
    moody = Moody()
    async with fleet(gateway, moody, Moody()) as (ill, well):
        moody.health = b"503 Service Unavailable"
        await eventually(lambda: len(gateway.gateway.default.fleet.unwell) == 1)
        before = len(asked(ill))
        for n in range(10):
            assert (await ask(gateway, chat(n))).status == 200
        assert (len(asked(ill)) - before, len(asked(well))) == (0, 10)
        row = await seen(gateway, "i0")
        assert (row["answering"], row["circuit"]) == (False, "closed")
        moody.health = b"200 OK"
        await eventually(lambda: not gateway.gateway.default.fleet.unwell)
        async with asyncio.timeout(30):
            while len(asked(ill)) == before:
                await ask(gateway)


# sent again


async def test_what_was_lost_before_the_first_byte_goes_to_another(gateway: RunningGateway) -> None:
    async with fleet(gateway, cut, answer_json) as (bad, good):
        answers = [(await ask(gateway, chat(n))).status for n in range(3 * LONG)]
        assert set(answers) == {200}
        assert 0 < len(asked(bad)) <= LONG, "and whoever loses them is left out in the end"
        assert len(asked(good)) == 3 * LONG
        assert gateway.gateway.default.fleet.retries["lost"] == len(asked(bad))
        assert gateway.gateway.default.stats.upstream_failures["upstream_died"] == len(asked(bad))


@pytest.mark.parametrize(
    ("path", "breaks", "instances", "tries"),
    [
        pytest.param(CHAT, cut, 3, 2, id="lost twice: it may be what kills instances"),
        pytest.param(CHAT, cut, 1, 1, id="there is no other instance"),
        pytest.param("/v1/responses", cut, 3, 1, id="it outlives its connection"),
        pytest.param(CHAT, HALF_A_HEAD, 3, 1, id="its answer has begun"),
    ],
)
async def test_how_often_a_request_that_breaks_is_tried(
    gateway: RunningGateway, path: str, breaks: Handler, instances: int, tries: int
) -> None:
    async with fleet(gateway, *[breaks] * instances) as ups:
        answer = await ask(gateway, chat(0), path=path)
        assert sum(len(asked(up)) for up in ups) == tries
        assert code(answer) == (502, "upstream_died")


@pytest.mark.parametrize("gateway", [FORGIVING], indirect=True)
async def test_when_the_budget_is_spent_the_fault_is_told(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet_ = gateway.gateway.default.fleet
    fleet_.budget.share = 0.0
    monkeypatch.setattr(retries, "MIN_PER_S", 0.5)  # time fills it more slowly than the requests here empty it
    async with fleet(gateway, cut, cut) as ups:
        statuses = [(await ask(gateway, chat(n))).status for n in range(int(0.5 * retries.WINDOW_S) + 30)]
        assert set(statuses) == {502}
        sent = sum(len(asked(up)) for up in ups)
        assert fleet_.budget.exhausted > 0
        assert sent + fleet_.budget.exhausted == 2 * len(statuses)
    page = (await gateway.ask(get("/metrics"))).body.decode()
    assert f'hotswap_gateway_retries_over_budget_total{{model="toy"}} {fleet_.budget.exhausted}.0' in page


# draining, coming and going


async def test_a_drained_instance_keeps_what_it_has_and_gets_nothing_new(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    release = asyncio.Event()
    stream = streaming(b"data: one\n\n", release, b"data: two\n\n")
    async with fleet(gateway, stream, answer_json) as (a, b):
        with running_gateway(tmp_path, upstream=UPSTREAM, run_coordinator=False) as other:
            wait_until(lambda: len(other.gateway.default.fleet.serving) == 2)
            gateway.register(b, "i1", state="STARTING")  # so that the stream begins at i0
            streamed = asyncio.create_task(ask(gateway, b'{"stream": true}'))
            await eventually(lambda: len(asked(a)) == 1)
            gateway.register(b, "i1")
            assert await call(gateway, "POST", "/admin/instances/i0/drain") == (200, {"id": "i0", "draining": True})
            for g in (gateway, other):
                await eventually(lambda g=g: [i.id for i in g.gateway.default.fleet.serving] == ["i1"])
                for n in range(5):
                    assert (await ask(g, chat(n))).status == 200
            assert (len(asked(a)), len(asked(b))) == (1, 10)
            row = await seen(gateway, "i0")
            assert (row["draining"], row["eligible"], row["in_flight"]) == (True, False, 1)
            release.set()
            answer = await streamed
            assert (answer.complete, answer.body) == (True, b"data: one\n\ndata: two\n\n")
            assert await call(other, "POST", "/admin/instances/i0/resume") == (200, {"id": "i0", "draining": False})
            await eventually(lambda: len(gateway.gateway.default.fleet.serving) == 2)


async def test_a_drain_ends_with_the_process_it_was_meant_for(gateway: RunningGateway) -> None:
    async with fleet(gateway, answer_json) as (up,):
        gateway.register(up, "i0", pid=7)
        assert (await call(gateway, "POST", "/admin/instances/i0/drain"))[0] == 200
        await eventually(lambda: not gateway.gateway.default.fleet.serving)
        answer = await gateway.ask(get("/readyz"))
        assert answer.status == 503
        assert b"i0 is DRAINING" in answer.body
        gateway.register(up, "i0", pid=8)
        await eventually(lambda: len(gateway.gateway.default.fleet.serving) == 1)
        gateway.unregister("i0")
        gateway.register(up, "i1")
        assert (await call(gateway, "POST", "/admin/instances/i1/drain"))[0] == 200
        await eventually(lambda: list(gateway.gateway.default.fleet.drains) == ["i1"])  # what is left of i0 is swept up


async def test_instances_come_and_go_under_load_without_a_failed_request(gateway: RunningGateway) -> None:
    """One joins, one leaves as an instance does (DRAINING, then gone), one goes without a word."""
    statuses: Counter[int] = Counter()
    stop = asyncio.Event()

    async def client(number: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            statuses[(await ask(gateway, chat(number, n))).status] += 1

    async def more(count: int) -> None:
        goal = sum(statuses.values()) + count
        await eventually(lambda: sum(statuses.values()) >= goal, 60)

    async with gateway.instance(instance_id="a") as a, gateway.instance(instance_id="b"), upstream() as late:
        clients = [asyncio.create_task(client(n)) for n in range(8)]
        await more(100)
        gateway.register(late, "late")
        async with asyncio.timeout(60):
            while not late.requests:
                await more(20)
                clients.append(asyncio.create_task(client(len(clients))))
        gateway.register(a, "a", state="DRAINING")
        await more(50)
        before = len(a.requests)
        await more(100)
        assert len(a.requests) == before
        gateway.unregister("a")
        gateway.unregister("b")
        await more(100)
        stop.set()
        await asyncio.gather(*clients)
    assert set(statuses) == {200}, statuses
