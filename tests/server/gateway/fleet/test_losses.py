"""A request that kills instances reaches two of them at most, whatever they do after they got it."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from server.gateway.config import FailoverSettings, HealthSettings, UpstreamSettings
from server.instance.middleware import Admission
from server.resume import RESUME, RESUMED
from tests.server.continued import END, HEAD, STAMPED, chat, framed
from tests.server.gateway.fleet.test_fleet import CHAT, half_a_head
from tests.server.gateway.harness import RunningGateway, post, running_gateway
from tests.server.gateway.upstream import Link, Received, answer_json, cut, upstream

HARDY = HealthSettings(eject_after=10**9, min_requests=10**9)
EVENTS = chat([11, 12, 13])
INSTANCES = 5


async def nonsense(link: Link, _: Received) -> None:
    await link.send(b"no HTTP\r\n\r\n")
    link.cut()


async def failed(link: Link, _: Received) -> None:
    await link.json(b'{"error":{"message":"m","type":"t","code":"c"}}', b"500 Internal Server Error")


async def engine_lost(link: Link, _: Received) -> None:
    await link.json(b"{}", b"503 Service Unavailable", b"x-hotswap-refused: lost\r\n")


async def cut_in_the_body(link: Link, _: Received) -> None:
    await link.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n{"a"')
    link.cut()


async def cut_in_the_stream(link: Link, request: Received) -> None:
    """After the first token, of a stream that others may go on with."""
    resumed = RESUMED + b": 1\r\n" if RESUME.decode() in request.headers else b""
    await link.send(HEAD % (STAMPED % 1 + resumed) + framed(EVENTS[:2]))
    link.cut()


async def refused(link: Link, _: Received) -> None:
    """It has not begun with it."""
    await link.json(b"{}", b"409 Conflict", b"x-hotswap-refused: version\r\n")


async def dead_before(link: Link, _: Received) -> None:
    await link.json(b"{}", b"503 Service Unavailable", b"x-hotswap-refused: engine\r\n")


async def streamed(link: Link, request: Received) -> None:
    if RESUME.decode() in request.headers:
        await link.send(HEAD % (STAMPED % 1 + RESUMED + b": 1\r\n") + framed(EVENTS[2:]) + END)
    else:
        await link.send(HEAD % (STAMPED % 1) + framed(EVENTS) + END)


Behaviour = Callable[[Link, Received], Coroutine[Any, Any, None]]
NOT_BEGUN: tuple[Behaviour, ...] = (refused, dead_before)
BEGUN: tuple[Behaviour, ...] = (
    cut, half_a_head, nonsense, failed, engine_lost, cut_in_the_body, cut_in_the_stream, answer_json, streamed,
)  # fmt: skip
DEADLY: tuple[Behaviour, ...] = (cut, engine_lost, cut_in_the_stream)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    settings = UpstreamSettings(scrape_interval_s=3600.0, hold_s=0.0, health=HARDY, failover=FailoverSettings())
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=settings) as running:
        yield running


class Hosts:
    """Instances that do with each request whatever the chance says; who has begun with which request is noted."""

    def __init__(self, seed: int, likely: tuple[Behaviour, ...]) -> None:
        self.chance, self.likely = random.Random(seed), likely
        self.begun: dict[str, set[int]] = defaultdict(set)

    def one(self, number: int) -> Behaviour:
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
    gateway: RunningGateway, route: str, likely: tuple[Behaviour, ...]
) -> None:
    hosts = Hosts(len(likely), likely)
    async with AsyncExitStack() as stack:
        for number in range(INSTANCES):
            await stack.enter_async_context(gateway.instance(hosts.one(number), f"i{number}"))
        asked = [post(route, {"stream": n % 2 == 0, "user": f"r{n}"}) for n in range(60)]
        for few in range(0, len(asked), 6):  # several at a time, so that some get pooled connections
            await asyncio.gather(*(gateway.ask(request) for request in asked[few : few + 6]))
        for number in range(INSTANCES):
            gateway.unregister(f"i{number}")
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
        answer = await gateway.ask(post())
        for name in ("first", "i0", "i1"):
            gateway.unregister(name)
    assert answer.status == 502
    assert [len(first.requests), sum(len(other.requests) for other in others)] == [2, 1]


@pytest.mark.parametrize(("dies", "why"), [(False, b"engine"), (True, b"lost")])
async def test_an_instance_says_whether_its_engine_had_the_request(dies: bool, why: bytes) -> None:
    """Dead before it came, or dead of it for all that is known."""
    state = {"dead": not dies}
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state["dead"] = True
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"EngineDeadError"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    await Admission(app, dead=lambda: state["dead"])(scope, None, send)
    assert sent[0]["status"] == 503
    assert (b"x-hotswap-refused", why) in sent[0]["headers"]
    assert orjson.loads(sent[1]["body"])["error"]["code"] == "engine_died"
