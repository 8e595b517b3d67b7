"""Instances that die of a request or in its stream: every place to be cut in, which goes on, and when none does."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.errors import BadUpstream
from server.gateway.config import FailoverSettings, HealthSettings, UpstreamSettings
from server.gateway.fleet import retries
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.retries import GONE_S, Continuation, go_on, silent
from server.gateway.fleet.routing import Need
from server.gateway.wire.journal import ReplayMemory
from server.resume import RESUMABLE, RESUME, RESUMED
from tests.server.continued import END, HEAD, STAMPED, Fleet, chat, framed
from tests.server.gateway.fleet.test_fleet import CHAT, HALF_A_HEAD
from tests.server.gateway.harness import RunningGateway, post, running_gateway
from tests.server.gateway.upstream import Answer, Handler, Link, Received, answering, cut, sending, upstream
from tests.waiting import eventually
from weightsync.control.agent import LAST_RETRY_S
from weightsync.control.records import InstanceRecord

ASKS = post(CHAT, {"stream": True})
TOKENS = [11, 12, 13]
# Instances break here on purpose, again and again: none is ejected for it, and nobody is waited for.
HARDY = HealthSettings(eject_after=10**9, min_requests=10**9)


def settings(**failover: Any) -> UpstreamSettings:
    more = FailoverSettings(**failover)
    return UpstreamSettings(scrape_interval_s=3600.0, hold_s=0.0, health=HARDY, failover=more)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=settings()) as g:
        yield g


@pytest.fixture(autouse=True)
def nothing_is_left(gateway: RunningGateway) -> Iterator[None]:
    yield
    for instance_id in list(gateway.gateway.default.fleet.instances):
        gateway.unregister(instance_id)
    assert gateway.gateway.default.fleet.replay.used == 0
    assert gateway.gateway.buffered == 0


@asynccontextmanager
async def serving(g: RunningGateway, fleet: Fleet, *versions: int) -> AsyncIterator[None]:
    """An instance for each version, all with the handler of `fleet`."""
    async with AsyncExitStack() as stack:
        for i, version in enumerate(versions or (1, 1)):
            await stack.enter_async_context(g.instance(fleet.handle, f"i{i}", active_version=version))
        yield


def failovers(g: RunningGateway) -> dict[str, int]:
    return dict(g.gateway.default.stats.failovers)


async def ask(g: RunningGateway, fleet: Fleet, *versions: int, headers: str = "", body: Any = None) -> Answer:
    async with serving(g, fleet, *versions):
        return await g.ask(post(CHAT, body or {"stream": True}, headers))


def error_code(answer: Answer) -> str:
    last = answer.body.split(b"\n\n")[-2]
    name, _, data = last.partition(b"\ndata: ")
    assert name == b"event: error", answer.body
    return str(orjson.loads(data)["error"]["code"])


async def test_cut_at_every_byte_the_stream_is_what_it_would_have_been(gateway: RunningGateway) -> None:
    fleet = Fleet(chat(TOKENS))
    whole = b"".join(fleet.events)
    wire = framed(fleet.events) + END
    before = failovers(gateway)
    async with serving(gateway, fleet):
        for cut in range(len(wire)):
            fleet.cuts = [cut]
            answer = await gateway.ask(post(CHAT, b'{"stream":true,"n":1}'))
            assert (answer.status, answer.complete, answer.body) == (200, True, whole), cut
    after = failovers(gateway)
    closed = len(END) + 2  # the events were all there, and only the end of the body was missing
    assert after["complete"] - before["complete"] == closed
    assert after["resumed"] - before["resumed"] == len(wire) - closed
    assert set(fleet.bodies) == {b'{"stream":true,"n":1}'}
    assert {tuple(r.tokens) for r in fleet.resumes} == {(), (11,), (11, 12), (11, 12, 13)}
    assert {(r.id, r.created) for r in fleet.resumes if r.tokens} == {("chat-a", 7)}
    assert {r.version for r in fleet.resumes} == {1}
    assert {r.finish_reason for r in fleet.resumes} == {None, "stop"}
    assert {r.usage_sent for r in fleet.resumes} == {False, True}
    assert {r.lead for r in fleet.resumes} == {0, 1}


@pytest.mark.parametrize("usage", [False, True])
async def test_long_streams_cut_anywhere(gateway: RunningGateway, usage: bool) -> None:
    """Long enough to be read in bundles."""
    tokens = [random.Random(3).randrange(150_000) for _ in range(600)]
    fleet = Fleet(chat(tokens, usage=usage))
    chance = random.Random(4)
    async with serving(gateway, fleet):
        for _ in range(24):
            fleet.resumes.clear()
            fleet.cuts = [chance.randrange(len(framed(fleet.events)) - 200)]
            answer = await gateway.ask(ASKS)
            assert answer.complete
            assert answer.body == b"".join(fleet.events)
            (resume,) = fleet.resumes
            told = len(resume.tokens)
            assert resume.tokens == tokens[:told]
            assert resume.resumed_at == [told]
            assert [(s.version, s.start, s.end) for s in resume.spans] == [(1, 0, told)][:told]


async def test_an_instance_that_begins_to_talk_nonsense(gateway: RunningGateway) -> None:
    fleet = Fleet(chat(TOKENS))
    arrived = asyncio.Event()

    async def derail(link: Link, _: Received) -> None:
        await link.send(HEAD % (STAMPED % 1) + framed(fleet.events[:2]))
        await arrived.wait()
        await link.send(b"no size\r\n")

    here, there = gateway.instance(derail, "a"), gateway.instance(fleet.handle, "b", state="STAGING")
    async with here, there, gateway.client(ASKS) as client:
        got = await asyncio.wait_for(client.reader.readuntil(fleet.events[1]), 60)
        arrived.set()
        got += await asyncio.wait_for(client.reader.readuntil(END), 60)
    assert got.count(b"data: ") == len(fleet.events)
    assert b"event: error" not in got
    assert [r.tokens for r in fleet.resumes] == [TOKENS[:1]]


async def test_the_third_instance_that_dies_is_the_last(gateway: RunningGateway) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[400, 10, 10])
    before = failovers(gateway)["given_up"]
    answer = await ask(gateway, fleet)
    assert not answer.complete
    assert error_code(answer) == "upstream_died"
    assert failovers(gateway)["given_up"] == before + 1


async def test_the_connection_serves_on(gateway: RunningGateway) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[300])
    async with serving(gateway, fleet), gateway.client() as client:
        for _ in range(3):
            client.writer.write(ASKS)
            assert (await client.answer()).body == b"".join(fleet.events)
    assert len(fleet.asked) == 4


async def test_http_1_0(gateway: RunningGateway) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[300])
    async with serving(gateway, fleet):
        answer = await gateway.ask(post(CHAT, {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert answer.body == b"".join(fleet.events)
    assert len(fleet.resumes) == 1


async def test_clients_see_none_of_the_talk_between_gateway_and_instance(gateway: RunningGateway) -> None:
    answer = await ask(gateway, Fleet(chat(TOKENS), cuts=[300]))
    assert not [name for name in answer.headers if "resum" in name]


# who goes on


@pytest.mark.parametrize("headers", ["", "x-hotswap-version: 1\r\n"])
async def test_only_the_same_version_goes_on(gateway: RunningGateway, headers: str) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[300])
    before = failovers(gateway)["nobody"]
    async with gateway.instance(fleet.handle, "i0", active_version=1), upstream(fleet.handle) as other:
        gateway.register(other, "i1", active_version=2, state="STAGING")  # asked when nobody better is there
        answer = await gateway.ask(post(CHAT, {"stream": True}, headers))
    assert error_code(answer) == "upstream_died"
    assert (len(fleet.asked), fleet.resumes) == (1, []), "another version is not even asked"
    assert failovers(gateway)["nobody"] == before + 1


@pytest.mark.parametrize(("versions", "bound"), [((1, 2), None), ((1, 1), 1)])
async def test_any_version_goes_on_where_the_client_allows_it(
    gateway: RunningGateway, versions: tuple[int, int], bound: int | None
) -> None:
    """One of the same version is asked first, though."""
    fleet = Fleet(chat(TOKENS), cuts=[300])
    async with upstream(fleet.handle) as first, upstream(fleet.handle) as second:
        gateway.register(first, "i0", active_version=versions[0])
        gateway.register(second, "i1", active_version=versions[1], state="STAGING")  # asked after the other one
        answer = await gateway.ask(post(CHAT, {"stream": True, "hotswap": {"failover": "any"}}))
    assert answer.body == b"".join(fleet.events)
    assert [r.version for r in fleet.resumes] == [bound]


async def test_an_instance_that_has_other_weights_by_now_is_passed_over(gateway: RunningGateway) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[300])
    refusals = [b"HTTP/1.1 409 Conflict\r\nx-hotswap-refused: version\r\ncontent-length: 3\r\n\r\nno\n"]

    async def refuse_once(link: Link) -> bool:
        if not refusals:
            return False
        await link.send(refusals.pop())
        return True

    fleet.before_resumed = refuse_once
    answer = await ask(gateway, fleet, 1, 1, 1)
    assert answer.body == b"".join(fleet.events)
    assert len(fleet.resumes) == 2


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\nagain\r\n",
        b"not HTTP\r\n\r\n",
    ],
)
async def test_what_is_no_continuation_never_reaches_the_client(gateway: RunningGateway, head: bytes) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[300])

    async def answer_otherwise(link: Link) -> bool:
        await link.send(head)
        return True

    fleet.before_resumed = answer_otherwise
    answer = await ask(gateway, fleet)
    sent, _, _ = answer.body.rpartition(b"event: error")
    assert b"".join(fleet.events).startswith(sent)
    assert error_code(answer) == "bad_upstream"


async def test_somebody_is_waited_for(tmp_path: Path) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[300])
    with running_gateway(tmp_path, upstream=replace(settings(), hold_s=60.0)) as g:
        async with serving(g, fleet, 1), upstream(fleet.handle) as other:
            asking = asyncio.create_task(g.ask(ASKS))
            await eventually(lambda: g.gateway.default.stats.upstream_failures["upstream_died"] == 1)
            g.register(other, "i9")
            assert (await asking).body == b"".join(fleet.events)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRY_S", 60.0)  # the client leaves before a request goes back to the instance
    fleet = Fleet(chat(TOKENS), cuts=[300], version=5)
    with running_gateway(tmp_path, upstream=replace(settings(), hold_s=60.0)) as g:
        async with serving(g, fleet, 5, 6):
            async with g.client(post(CHAT, {"stream": True}, "x-hotswap-version: 5\r\n")):
                await eventually(lambda: g.gateway.default.stats.upstream_failures["upstream_died"] == 1)
                g.unregister("i0")
            await eventually(lambda: (g.gateway.default.stats.inflight, g.gateway.default.fleet.replay.used) == (0, 0))
            assert g.gateway.default.stats.disconnects["held"] == 1
            assert len(g.gateway.default.fleet.room) == 0


async def test_a_stream_whose_instance_has_left_the_store_and_is_silent(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its host is gone: no packet ever says so."""
    monkeypatch.setattr(retries, "GONE_S", 0.05)
    fleet = Fleet(chat(TOKENS))
    cut_off = asyncio.Event()

    async def freeze(link: Link, _: Received) -> None:
        await link.send(HEAD % (STAMPED % 1) + framed(fleet.events[:2])[:-9])
        cut_off.set()
        await link.gone()

    async with gateway.instance(freeze, "frozen"), upstream(fleet.handle) as well:
        asking = asyncio.create_task(gateway.ask(ASKS))
        await cut_off.wait()
        gateway.register(well, "well")
        gateway.unregister("frozen")
        answer = await asking
    assert answer.body == b"".join(fleet.events)


async def test_an_instance_that_registers_again_has_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an outage of the store that outlived the leases: over its limit, nothing is sent to it."""
    monkeypatch.setattr(retries, "GONE_S", 600.0)  # it is back in time
    fleet = Fleet(chat(TOKENS))
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(link: Link, _: Received) -> None:
        await link.send(HEAD % (STAMPED % 1) + framed(fleet.events[:1]))
        arrived.set()
        await go_on.wait()
        await link.send(framed(fleet.events[1:]) + END)

    up_settings = replace(settings(), max_in_flight=1)
    async with upstream(slow) as up:
        with running_gateway(tmp_path, upstream=up_settings) as g:
            g.register(up)
            first = asyncio.create_task(g.ask(ASKS))
            await arrived.wait()
            g.unregister()
            g.register(up)
            assert g.gateway.default.fleet.instances["i0"].working == 1
            second = asyncio.create_task(g.ask(ASKS))
            await eventually(lambda: g.gateway.default.gate.queue.waiting == 1)
            assert len(up.requests) == 1
            go_on.set()
            answers = [await asyncio.wait_for(each, 60) for each in (first, second)]
            await eventually(lambda: g.gateway.default.fleet.instances["i0"].working == 0)
            connections = up.connections
            assert (await g.ask(ASKS)).complete
            assert up.connections == connections, "its connections are kept again"
    assert [answer.body for answer in answers] == [b"".join(fleet.events)] * 2


def test_silence_counts_from_when_it_left_the_store() -> None:
    """A stream may be silent for long (a long prompt); an outage of the store must not turn that into a death."""
    settled = UpstreamSettings()
    instance = Instance(InstanceRecord("i", "http://127.0.0.1:1"), settled)
    assert not silent(instance, since=100.0, now=400.0, limit_s=0.0)
    instance.left(400.0)
    assert not silent(instance, since=100.0, now=400.0 + GONE_S, limit_s=0.0)
    assert silent(instance, since=100.0, now=400.1 + GONE_S, limit_s=0.0)
    assert not silent(instance, since=401.0, now=400.1 + GONE_S, limit_s=0.0), "it has spoken since"
    instance.returned()
    assert not silent(instance, since=100.0, now=1000.0, limit_s=0.0)
    assert silent(instance, since=100.0, now=131.0, limit_s=30.0)
    assert not silent(instance, since=100.0, now=130.0, limit_s=30.0)
    assert GONE_S > LAST_RETRY_S, "an instance must have had the time to register again"


def test_what_the_client_asked_for_holds_again_where_any_version_may_go_on() -> None:
    """It holds for every continuation, not what the one before needed: that version may be gone by now."""
    journal = ReplayMemory(2**20, 2**20).open(0)
    assert journal is not None
    asked = Need(None, 2, 1.0)
    error = BadUpstream("it died")
    first = go_on(journal, None, error, 0.0, asked, 3)
    assert (first.need, first.own_need) == (Need(3, None, 0.0), asked)
    second = go_on(journal, first, error, 1.0, first.need, None)
    assert (second.need, second.own_need) == (asked, asked)


def test_a_broken_stream_is_held_from_when_it_broke() -> None:
    """Waiters count from the start of their request; a stream may have run for minutes before."""
    continuation = Continuation(BadUpstream("it died"), 400.0, None, None, b"")
    assert continuation.patience(started=100.0, hold_s=5.0).seconds == 305.0


# who does not


@pytest.mark.parametrize(
    ("headers", "body"),
    [("x-hotswap-failover: off\r\n", {}), ("", {"hotswap": {"failover": "off"}})],
)
async def test_a_client_that_does_not_want_it(gateway: RunningGateway, headers: str, body: dict[str, Any]) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[len(framed(chat(TOKENS)[:2]))])
    answer = await ask(gateway, fleet, headers=headers, body={"stream": True, **body})
    assert error_code(answer) == "upstream_died"
    assert not [h for h in fleet.asked if RESUMABLE.decode() in h]


async def test_a_gateway_that_is_told_not_to(tmp_path: Path) -> None:
    fleet = Fleet(chat(TOKENS), cuts=[len(framed(chat(TOKENS)[:2]))])
    with running_gateway(tmp_path, upstream=settings(mode="off")) as g:
        assert error_code(await ask(g, fleet)) == "upstream_died"
        assert not fleet.resumes


@pytest.mark.parametrize(
    "word", ["x-hotswap-failover: maybe\r\n", "x-hotswap-failover: any\r\nx-hotswap-policy: finish\r\n"]
)
async def test_wishes_that_cannot_be_met(gateway: RunningGateway, word: str) -> None:
    answer = await gateway.ask(post(CHAT, {}, word))
    assert answer.status == 400
    assert orjson.loads(answer.body)["error"]["code"] in ("invalid_parameter", "contradictory_parameters")


async def test_a_stream_that_the_instance_cannot_promise_to_continue(gateway: RunningGateway) -> None:
    before = failovers(gateway)["not_resumable"]

    async def unstamped(link: Link, _: Received) -> None:
        await link.sse_head()
        await link.chunk(b"data: 1\n\n")
        link.writer.close()

    async with gateway.instance(unstamped, "a") as up, gateway.instance(unstamped, "b") as other:
        answer = await gateway.ask(ASKS)
    assert answer.body.startswith(b"data: 1\n\nevent: error\n")
    assert (error_code(answer), answer.complete) == ("upstream_died", False)
    assert len(up.requests) + len(other.requests) == 1
    assert failovers(gateway)["not_resumable"] == before + 1


async def test_memory_is_bounded(tmp_path: Path) -> None:
    """A request that is too long to be kept, and an answer that becomes too long: both pass, neither is continued."""
    tokens = list(range(10_000))
    fleet = Fleet(chat(tokens))
    with running_gateway(tmp_path, upstream=settings(max_stream_bytes=40_000, max_bytes=50_000)) as g:
        for body in ({"stream": True, "prompt": "x" * 30_000}, {"stream": True}):
            fleet.cuts = [len(framed(fleet.events[:-2]))]
            answer = await ask(g, fleet, body=body)
            assert answer.body.startswith(b"".join(fleet.events[:-2]))
            assert error_code(answer) == "upstream_died"
        assert not fleet.resumes
        assert g.gateway.default.fleet.replay.used == 0


# a request that kills instances reaches two of them at most

EVENTS = chat(TOKENS)
INSTANCES = 5


async def cut_in_the_stream(link: Link, request: Received) -> None:
    """After the first token, of a stream that others may go on with."""
    resumed = RESUMED + b": 1\r\n" if RESUME.decode() in request.headers else b""
    await link.send(HEAD % (STAMPED % 1 + resumed) + framed(EVENTS[:2]))
    link.cut()


async def streamed(link: Link, request: Received) -> None:
    if RESUME.decode() in request.headers:
        await link.send(HEAD % (STAMPED % 1 + RESUMED + b": 1\r\n") + framed(EVENTS[2:]) + END)
    else:
        await link.send(HEAD % (STAMPED % 1) + framed(EVENTS) + END)


refused = answering(b"{}", b"409 Conflict", b"x-hotswap-refused: version\r\n")
dead_before = answering(b"{}", b"503 Service Unavailable", b"x-hotswap-refused: engine\r\n")
NOT_BEGUN: tuple[Handler, ...] = (refused, dead_before)
nonsense = sending(b"no HTTP\r\n\r\n")
failed = answering(b'{"error":{"message":"m","type":"t","code":"c"}}', b"500 Internal Server Error")
engine_lost = answering(b"{}", b"503 Service Unavailable", b"x-hotswap-refused: lost\r\n")
cut_in_the_body = sending(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n{"a"')
BEGUN: tuple[Handler, ...] = (
    cut, HALF_A_HEAD, nonsense, failed, engine_lost, cut_in_the_body, cut_in_the_stream, answering(), streamed,
)  # fmt: skip
DEADLY: tuple[Handler, ...] = (cut, engine_lost, cut_in_the_stream)


class Hosts:
    """Instances that answer by chance; `begun` has the numbers of those that began with a request, by its name."""

    def __init__(self, seed: int, likely: tuple[Handler, ...]) -> None:
        self.chance, self.likely = random.Random(seed), likely
        self.begun: dict[str, set[int]] = defaultdict(set)

    def one(self, number: int) -> Handler:
        async def handle(link: Link, request: Received) -> None:
            does = self.chance.choice((*BEGUN, *NOT_BEGUN, *self.likely * 3))
            if does not in NOT_BEGUN:
                body = request.body[int(request.headers.get(RESUME.decode(), 0)) :]
                self.begun[orjson.loads(body)["user"]].add(number)
            await does(link, request)

        return handle


@pytest.mark.parametrize("likely", [(), DEADLY, (refused, engine_lost), (cut_in_the_stream,)])
@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/generate", "/v1/responses"])
async def test_a_request_reaches_two_instances_at_most(
    gateway: RunningGateway, route: str, likely: tuple[Handler, ...]
) -> None:
    hosts = Hosts(len(likely), likely)
    async with AsyncExitStack() as stack:
        for number in range(INSTANCES):
            await stack.enter_async_context(gateway.instance(hosts.one(number), f"i{number}"))
        asked = [post(route, {"stream": n % 2 == 0, "user": f"r{n}"}) for n in range(60)]
        for few in range(0, len(asked), 6):  # several at a time, so that some get pooled connections
            await asyncio.gather(*(gateway.ask(request) for request in asked[few : few + 6]))
    assert hosts.begun
    assert max(map(len, hosts.begun.values())) <= 2
    if likely == DEADLY and route != "/v1/responses":
        assert max(map(len, hosts.begun.values())) == 2  # one more try is made


async def test_an_instance_that_is_gone_after_it_cut_a_pooled_connection_counts_as_killed(
    gateway: RunningGateway,
) -> None:
    """The request may have killed it: the second try is that of a request that was lost, and there is no third."""
    async with AsyncExitStack() as stack:

        async def handle(link: Link, request: Received) -> None:
            if first.connections == len(first.requests) == 1:
                await link.json()
                return
            for number, other in enumerate(others):
                gateway.register(other, f"i{number}")
            first.close()
            link.cut()

        first = await stack.enter_async_context(upstream(handle))
        others = [await stack.enter_async_context(upstream(cut)) for _ in range(2)]
        gateway.register(first, "first")
        assert (await gateway.ask(post())).status == 200
        assert (await gateway.ask(post())).status == 502
    assert [len(first.requests), sum(len(other.requests) for other in others)] == [2, 1]
