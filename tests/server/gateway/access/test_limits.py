"""Limits of keys through a real gateway: what passes, what does not, what the headers say, what is settled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from server.gateway import UpstreamSettings
from server.gateway.access.costs import BYTES_PER_TOKEN
from server.gateway.openapi import components
from server.instance import generate
from server.instance.inflight import Inflight
from server.instance.middleware import ProvenanceMiddleware
from server.instance.provenance import traced
from server.key_limits import LIMITS
from tests.server.gateway.harness import RunningGateway, admin, code, get, new_key, post, running_gateway
from tests.server.gateway.upstream import (
    Answer,
    Link,
    Received,
    Upstream,
    answering,
    never_answer,
    streaming,
    upstream,
)
from tests.waiting import eventually, wait_until

API = Path(__file__).parents[4] / "docs" / "api.md"
SETTINGS = UpstreamSettings(scrape_interval_s=3600.0, hold_s=0.0)
CHAT = "/v1/chat/completions"
USED = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("limits"), upstream=SETTINGS, require_key=True) as g:
        yield g


@pytest.fixture
async def instance(gateway: RunningGateway) -> AsyncIterator[Upstream]:
    async with gateway.instance(answering(USED)) as up:
        yield up
        gateway.unregister()


async def key_with(gateway: RunningGateway, **limits: Any) -> str:
    """Header lines with a new key that has `limits`."""
    return (await new_key(gateway, limits=limits))[1]


def remaining(answer: Answer, kind: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{kind}"])


async def test_requests_are_counted_down_and_then_refused(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, requests_per_min=3)
    before = gateway.gateway.stats.limited["requests"]
    answers = [await gateway.ask(post(headers=key)) for _ in range(5)]
    assert [a.status for a in answers] == [200, 200, 200, 429, 429]
    assert [remaining(a, "requests") for a in answers] == [2, 1, 0, 0, 0]
    assert {a.headers["x-ratelimit-limit-requests"] for a in answers} == {"3"}
    assert all(re.fullmatch(r"(1m)?\d+s", a.headers["x-ratelimit-reset-requests"]) for a in answers)
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    error = orjson.loads(answers[3].body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_exceeded", "requests_limit")
    assert 1 <= int(answers[3].headers["retry-after"]) <= 61
    assert len(instance.requests) == 3
    assert gateway.gateway.stats.limited["requests"] == before + 2


async def test_what_is_sent_of_limits_is_what_pages_clients_and_readers_are_told_of(tmp_path: Path) -> None:
    origins = ("https://page.example",)
    with running_gateway(tmp_path, upstream=SETTINGS, allowed_origins=origins) as gateway:
        async with gateway.instance(answering(USED)):
            key = await key_with(gateway, **{field: 1000 for field, limit in LIMITS.items() if limit.counts})
            answer = await gateway.ask(post(headers=f"{key}Origin: {origins[0]}\r\n"))
    sent = {name for name in answer.headers if name.startswith("x-ratelimit-")}
    assert len(sent) == 3 * 3
    assert sent == {name for name in answer.headers["access-control-expose-headers"].split(", ") if "rate" in name}
    assert sent == {name for name in components()["headers"] if "rate" in name}
    assert sent == set(re.findall(r"`(x-ratelimit-[\w-]+)`", API.read_text()))


async def test_one_keys_limit_is_not_anothers(gateway: RunningGateway, instance: Upstream) -> None:
    one, two = await key_with(gateway, requests_per_min=1), await key_with(gateway, requests_per_min=1)
    free = await key_with(gateway)
    assert (await gateway.ask(post(headers=one))).status == 200
    assert (await gateway.ask(post(headers=one))).status == 429
    assert (await gateway.ask(post(headers=two))).status == 200
    for _ in range(3):
        answer = await gateway.ask(post(headers=free))
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_estimated_and_then_settled(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, tokens_per_min=1000)
    body = {"prompt": "x" * 100, "max_tokens": 200}
    estimate = len(orjson.dumps(body)) // 4 + 1 + 200
    first = await gateway.ask(post(body=body, headers=key))
    assert (first.status, remaining(first, "tokens")) == (200, 1000 - estimate)
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    second = await gateway.ask(post(body=body, headers=key))
    assert remaining(second, "tokens") == 1000 - 7 - estimate  # of the first, what it really took


async def test_tokens_over_the_limit(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, tokens_per_min=300, requests_per_min=100)
    never = await gateway.ask(post(body={"prompt": "x", "max_tokens": 300}, headers=key))
    assert code(never) == (400, "request_over_limit")
    assert remaining(never, "requests") == 100
    # With "hello" the estimate is 9 + 250 tokens.
    instance.handler = never_answer
    raw = post(body={"prompt": "hello", "max_tokens": 250}, headers=key)
    async with gateway.client(raw):
        await eventually(lambda: bool(instance.requests))
        assert code(await gateway.ask(raw)) == (429, "tokens_limit")


@pytest.mark.parametrize(
    ("stream", "seconds_a_token", "charged"),
    [(True, 0.0, 0), (True, 1e-9, 0), (False, 0.0, 40), (False, 3600.0, 0), (False, 1e-9, 40)],
)
async def test_an_answer_that_its_client_left_costs_what_was_written(
    gateway: RunningGateway, instance: Upstream, stream: bool, seconds_a_token: float, charged: int
) -> None:
    key = await key_with(gateway, tokens_per_min=1000)
    instance.handler = never_answer
    gateway.gateway.default.fleet.instances["i0"].pace.seconds_a_token = seconds_a_token
    body = orjson.dumps({"prompt": "hello", "max_tokens": 20, "n": 2, "stream": stream})
    async with gateway.client(post(body=body, headers=key)):
        await eventually(lambda: bool(instance.requests))
    await eventually(lambda: not gateway.gateway.default.stats.inflight)
    instance.handler = answering(USED)
    left = remaining(await gateway.ask(get("/v1/models", key)), "tokens")
    assert left == 1000 - (len(body) // BYTES_PER_TOKEN + 1) - charged


async def test_whole_answers_tell_the_pace_of_their_instance(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, tokens_per_min=10_000)
    pace = gateway.gateway.default.fleet.instances["i0"].pace
    for body, learned in (({"stream": True}, False), ({"n": 4}, True)):
        assert (await gateway.ask(post(body={"prompt": "x", **body}, headers=key))).status == 200
        await eventually(lambda: not gateway.gateway.default.stats.inflight)
        assert (pace.seconds_a_token > 0) is learned


async def test_a_failed_request_costs_no_tokens(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, tokens_per_min=500)
    instance.handler = answering(b'{"error":{"message":"no"}}', b"400 Bad Request")
    for _ in range(10):
        assert (await gateway.ask(post(body={"prompt": "x", "max_tokens": 400}, headers=key))).status == 400
    gateway.unregister()
    refused = await gateway.ask(post(body={"prompt": "x", "max_tokens": 400}, headers=key))
    assert code(refused) == (503, "no_instance")
    assert "x-ratelimit-remaining-tokens" in refused.headers
    gateway.register(instance)
    assert (await gateway.ask(post(body={"prompt": "x", "max_tokens": 400}, headers=key))).status == 400


async def test_concurrency(gateway: RunningGateway, instance: Upstream) -> None:
    go_on = asyncio.Event()
    instance.handler = streaming(go_on)
    key = await key_with(gateway, concurrency=2)
    asked = [asyncio.create_task(gateway.ask(post(headers=key))) for _ in range(2)]
    await eventually(lambda: len(instance.requests) == 2)
    refused = await gateway.ask(post(headers=key))
    assert code(refused) == (429, "concurrency_limit")
    assert refused.headers["retry-after"] == "1"
    go_on.set()
    assert [a.status for a in await asyncio.gather(*asked)] == [200, 200]
    assert (await gateway.ask(post(headers=key))).status == 200


async def test_places_come_back_however_a_request_ends(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, concurrency=1)
    instance.handler = streaming(b"data: {}\n\n", cut=True)
    assert not (await gateway.ask(post(headers=key))).complete
    instance.handler = never_answer
    seen = len(instance.requests)
    async with gateway.client(post(headers=key)):
        await eventually(lambda: len(instance.requests) > seen)
    bad = await gateway.ask(post(body=b"not json", headers=key))
    assert code(bad) == (400, "invalid_json")
    await eventually(lambda: not gateway.gateway.default.stats.inflight)
    instance.handler = answering(USED)
    assert (await gateway.ask(post(headers=key))).status == 200
    gateway.unregister()
    for _ in range(2):
        assert code(await gateway.ask(post(headers=key))) == (503, "no_instance")
    gateway.register(instance)


async def test_a_streams_usage_is_settled(gateway: RunningGateway, instance: Upstream) -> None:
    said = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    counted = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":90}}\n\n'
    key = await key_with(gateway, tokens_per_min=10_000)
    instance.handler = streaming(said, counted, b"data: [DONE]\n\n")
    body = {"messages": [], "stream": True, "max_completion_tokens": 5000}
    assert (await gateway.ask(post(CHAT, body, key))).complete
    answer = await gateway.ask(get("/v1/models", key))  # costs nothing, and says where the key stands
    assert remaining(answer, "tokens") == 9_900


def generating(tokens: int) -> Any:
    """An instance whose engine gives so many tokens one by one, and then nothing, nor an end."""

    async def outputs(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for end in range(1, tokens + 1):
            one = {"index": 0, "text": "a", "token_ids": [end], "logprobs": None, "finish_reason": None}
            spans = [SimpleNamespace(version="1", start=0, end=end)]
            yield SimpleNamespace(outputs=[SimpleNamespace(**one, weight_versions=spans)], prompt_token_ids=[5, 6, 7])
        await asyncio.Event().wait()

    async def rendered(asked: list[Any]) -> list[Any]:
        return asked

    app = FastAPI()
    app.include_router(generate.router)
    app.state.hotswap_models, app.state.hotswap_adapters = ["m"], SimpleNamespace(find=lambda _: None)
    app.state.engine_client = SimpleNamespace(
        generate=traced(outputs, Inflight()),
        renderer=SimpleNamespace(render_cmpl_async=rendered),
        model_config=SimpleNamespace(max_model_len=100_000),
    )
    return ProvenanceMiddleware(app, lambda: 1)


@pytest.mark.parametrize("interval", [1, 3, 100, 1000])
async def test_a_stream_that_is_hung_up_costs_what_was_sent(
    gateway: RunningGateway, instance: Upstream, interval: int
) -> None:
    app, sent = generating(4000), 4000 // interval * interval

    async def handler(link: Link, received: Received) -> None:
        messages = [{"type": "http.request", "body": received.body}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await link.sse_head()
            elif message["body"]:
                await link.chunk(message["body"])

        headers = [(name.encode(), value.encode()) for name, value in received.headers.items()]
        scope = {"type": "http", "method": "POST", "path": received.target, "headers": headers, "query_string": b""}
        asked = asyncio.create_task(app(scope, receive, send))
        await link.gone()
        asked.cancel()

    key = await key_with(gateway, tokens_per_min=50_000)
    instance.handler = handler
    body = {"prompt_token_ids": [5, 6, 7], "max_tokens": 4500, "stream_interval": interval}
    last = b',%d],"logprobs"' if interval > 1 else b'[%d],"logprobs"'
    async with gateway.client(post("/generate", body, key)) as client:
        async for line in client.reader:
            if last % sent in line:
                break
    await eventually(lambda: not gateway.gateway.default.stats.inflight)
    instance.handler = answering(USED)
    cost = 50_000 - remaining(await gateway.ask(get("/v1/models", key)), "tokens")
    prompt = 3 if interval > 1 else len(orjson.dumps(body)) // 4 + 1  # a token an event: an estimate
    assert cost == pytest.approx(prompt + sent, abs=0 if interval > 1 else 0.01 * sent)


async def test_a_batch_costs_an_answer_to_each_conversation(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, tokens_per_min=1000)
    body = {"messages": [[{"role": "user", "content": "hi"}]] * 60, "max_tokens": 200}
    assert code(await gateway.ask(post(f"{CHAT}/batch", body, key))) == (400, "request_over_limit")
    few = body | {"messages": body["messages"][:2]}
    assert remaining(await gateway.ask(post(f"{CHAT}/batch", few, key)), "tokens") == 1000 - (
        len(orjson.dumps(few)) // 4 + 1 + 2 * 200
    )


@pytest.mark.parametrize(
    ("path", "body", "arrives"),
    [
        (CHAT, b'{"messages":[]}', b'{"messages":[],"max_completion_tokens":50}'),
        (CHAT, b'{"messages":[],"max_tokens":50}', None),
        (CHAT, b'{ "n": 1, "max_tokens": null }\n', b'{ "n": 1, "max_tokens": null,"max_completion_tokens":50}'),
        ("/v1/responses", b"{}", b'{"max_output_tokens":50}'),
        ("/v1/responses", b'{"max_output_tokens":1}', None),
        ("/v1/messages", b' { } ', b' {"max_tokens":50}'),
        ("/v1/completions", b'{"prompt":"x"}', None),
        ("/generate", b'{"prompt":"x"}', None),
        ("/v1/embeddings", b'{"input":"x","max_tokens":99999}', None),
        ("/tokenize", b'{"prompt":"x"}', None),
    ],
)  # fmt: skip
async def test_the_bound_on_answers_is_written_in(
    gateway: RunningGateway, instance: Upstream, path: str, body: bytes, arrives: bytes | None
) -> None:
    answer = await gateway.ask(post(path, body, await key_with(gateway, max_output_tokens=50)))
    assert answer.status == 200
    assert instance.requests[-1].body == (body if arrives is None else arrives)
    orjson.loads(instance.requests[-1].body)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, b'{"max_completion_tokens":51}', "max_output_exceeded"),
        (CHAT, b'{"max_completion_tokens":1,"max_tokens":51}', "max_output_exceeded"),
        (CHAT, b'{"max_completion_tokens":1,"max_completion_tokens":51}', "max_output_exceeded"),
        (CHAT, b'{"max\\u005ftokens":51}', "max_output_exceeded"),
        (CHAT, b'{"max_tokens":"40"}', "invalid_parameter"),
        (CHAT, b'{"max_tokens":40.0}', "invalid_parameter"),
        (CHAT, b'{"max_tokens":-1}', "invalid_parameter"),
        (CHAT, b'{"max_tokens":true}', "invalid_parameter"),
        (CHAT, b'{"max_tokens":1' + b"0" * 40 + b"}", "invalid_parameter"),
        ("/v1/responses", b'{"max_output_tokens":51}', "max_output_exceeded"),
        ("/v1/completions", b'{"max_tokens":51}', "max_output_exceeded"),
        ("/generate", b'{"max_tokens":51}', "max_output_exceeded"),
        ("/v1/messages", b'{"max_tokens":51}', "max_output_exceeded"),
    ],
)
async def test_more_than_the_bound_is_refused(
    gateway: RunningGateway, instance: Upstream, path: str, body: bytes, expected: str
) -> None:
    answer = await gateway.ask(post(path, body, await key_with(gateway, max_output_tokens=50)))
    assert code(answer) == (400, expected)
    assert not instance.requests


async def test_the_usual_bound_of_a_route_is_lowered_too(gateway: RunningGateway, instance: Upstream) -> None:
    key = await key_with(gateway, max_output_tokens=5)
    await gateway.ask(post("/v1/completions", b'{"prompt":"x","hotswap":{"policy":"keep"}}', key))
    assert instance.requests[-1].body == b'{"prompt":"x","max_tokens":5}'


async def test_limits_can_be_changed_while_requests_come_in(gateway: RunningGateway, instance: Upstream) -> None:
    key_id, key = await new_key(gateway, limits={"requests_per_min": 2})
    assert [(await gateway.ask(post(headers=key))).status for _ in range(3)] == [200, 200, 429]
    assert (await admin(gateway, "PATCH", f"/{key_id}", limits={"requests_per_min": 4})).status == 200
    wait_until(lambda: gateway.gateway.keys.limits[key_id].requests_per_min == 4)
    assert [(await gateway.ask(post(headers=key))).status for _ in range(3)] == [200, 200, 429]
    assert (await admin(gateway, "PATCH", f"/{key_id}", limits={"requests_per_min": None})).status == 200
    wait_until(lambda: gateway.gateway.keys.limits[key_id].requests_per_min is None)
    assert (await gateway.ask(post(headers=key))).status == 200


async def test_hits_are_in_the_metrics_without_keys(gateway: RunningGateway, instance: Upstream) -> None:
    key_id, key = await new_key(gateway, limits={"requests_per_min": 1})
    for _ in range(3):
        await gateway.ask(post(headers=key))
    page = (await gateway.ask(get("/metrics"))).body.decode()
    kinds = set(re.findall(r'hotswap_gateway_limited_total\{limit="(\w+)"\}', page))
    assert kinds == {"requests", "tokens", "month_tokens", "concurrency", "max_output"}
    assert key_id not in page


async def test_a_request_in_flight_keeps_its_place_when_limits_come_and_go(
    gateway: RunningGateway, instance: Upstream
) -> None:
    go_on = asyncio.Event()
    instance.handler = streaming(go_on)
    key_id, key = await new_key(gateway, limits={"requests_per_min": 100})
    async with gateway.client(post(headers=key)) as client:
        await eventually(lambda: bool(instance.requests))
        await admin(gateway, "PATCH", f"/{key_id}", limits={"concurrency": 1, "tokens_per_min": 1000})
        wait_until(lambda: gateway.gateway.keys.limits[key_id].concurrency == 1)
        assert code(await gateway.ask(post(headers=key))) == (429, "concurrency_limit")
        go_on.set()
        assert (await client.answer()).status == 200
    answer = await gateway.ask(post(headers=key))
    assert (answer.status, remaining(answer, "tokens")) == (200, 1000 - 1 - 16)


async def test_limits_outlive_a_restart(tmp_path: Path) -> None:
    async with upstream(answering(USED)) as up:
        with running_gateway(tmp_path, upstream=SETTINGS) as first:
            first.register(up)
            _, key = await new_key(first, limits={"requests_per_min": 5})
            assert [(await first.ask(post(headers=key))).status for _ in range(3)] == [200] * 3
        with running_gateway(tmp_path, upstream=SETTINGS) as second:
            second.register(up)
            statuses: list[int] = []

            async def two_pass() -> bool:
                """Units that another gateway held need a moment to come over."""
                answer = await second.ask(post(headers=key))
                assert answer.status == 200 or code(answer) == (429, "requests_limit")
                statuses.append(answer.status)
                return statuses.count(200) == 2

            await eventually(two_pass)
            assert (await second.ask(post(headers=key))).status == 429


def test_a_second_gateway_takes_part_when_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.access.sharing.INTERVAL_S", 3600.0)  # nothing comes with the next second
    with running_gateway(tmp_path, upstream=SETTINGS), running_gateway(tmp_path, upstream=SETTINGS) as second:
        assert second.gateway.sharing.entered.is_set()
