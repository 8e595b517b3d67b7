"""A model of somebody else's server, behind the gateway: a server that a test can break stands in for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from server.errors import ConfigError
from server.gateway.models import file as models_file
from server.gateway.models.external import ROUTES
from server.gateway.wire.foreign import fault_of
from tests.server.gateway.harness import ADMIN, RunningGateway, get, new_key, post, private, running_gateway
from tests.server.gateway.upstream import (
    Handler,
    Link,
    Received,
    Upstream,
    answering,
    never_answer,
    streaming,
    upstream,
)
from tests.waiting import eventually

SECRET = "sk-upstream-secret-0123456789"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def config(tmp_path: Path, port: int, more: str = "") -> Path:
    key = private(tmp_path / "key", SECRET + "\n")
    path = tmp_path / "models.yaml"
    path.write_text(
        "models:\n"
        "  - name: ours\n"
        "  - name: hosted\n"
        f"    upstream: {{url: 'http://127.0.0.1:{port}/v1', model: large-1, api-key-file: '{key}'{more}}}\n"
        "aliases: {fast: [ours, hosted], slow: [hosted, ours]}\n"
    )
    return path


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: %b\n\n" % orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


async def hosted(link: Link, asked: Received) -> None:
    """Speaks OpenAI's API, and says more than clients are to see."""
    body = orjson.loads(asked.body)
    if not body.get("stream"):
        message = {"role": "assistant", "content": "hello"}
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "large-1", "usage": USAGE}
        whole["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        await link.json(orjson.dumps(whole), extra=b"set-cookie: a=b\r\nx-hotswap-weight-version: 7\r\n")
        return
    await link.sse_head()
    for text in ("hel", "lo"):
        await link.chunk(chunk(text))
    if body.get("stream_options", {}).get("include_usage"):
        last = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
        await link.chunk(b"data: %b\n\n" % orjson.dumps(last))
    await link.chunk(b"data: [DONE]\n\n")
    await link.end()


def chat(headers: str = "", **fields: Any) -> bytes:
    body = {"model": "hosted", "messages": [{"role": "user", "content": "hi"}], **fields}
    return post("/v1/chat/completions", body, headers)


@contextlib.asynccontextmanager
async def external(tmp_path: Path, handler: Handler, more: str = "") -> AsyncIterator[tuple[Upstream, RunningGateway]]:
    """A server of another operator, and a gateway in front of it."""
    async with upstream(handler) as up:
        file = config(tmp_path, up.port, more)
        with running_gateway(tmp_path, model="", models=file, run_coordinator=False) as gateway:
            yield up, gateway


async def test_a_request_goes_there_and_nothing_of_ours_with_it(tmp_path: Path) -> None:
    async with external(tmp_path, hosted) as (up, gateway):
        _, key = await new_key(gateway, limits={"tokens_per_min": 1000})
        answer = await gateway.ask(chat(key + "X-Session-Id: mine\r\nUser-Agent: me\r\n", hotswap={"priority": 3}))
        assert answer.status == 200, answer.body
        assert orjson.loads(answer.body)["model"] == "large-1"
        assert answer.headers["x-hotswap-weights"] == "external"
        assert answer.headers["x-hotswap-upstream"] == "hosted"
        assert "x-hotswap-weight-version" not in answer.headers
        assert "set-cookie" not in answer.headers
        (asked,) = up.requests
        assert (asked.method, asked.target) == ("POST", "/v1/chat/completions")
        assert set(asked.headers) == {"host", "authorization", "content-type", "accept", "content-length"}
        assert asked.headers["authorization"] == f"Bearer {SECRET}"
        body = orjson.loads(asked.body)
        assert (body["model"], "hotswap" in body) == ("large-1", False)
        answer = await gateway.ask(get("/v1/models", key))
        entry = next(e for e in orjson.loads(answer.body)["data"] if e["id"] == "hosted")
        assert entry["hotswap"] == {"weights": "external"}
        left = int((await gateway.ask(chat(key, max_tokens=1))).headers["x-ratelimit-remaining-tokens"])
        assert 1000 - 5 - 200 < left < 1000 - 5, "the first one's true count, the second's reservation"


async def test_a_stream_passes_and_its_tokens_are_counted(tmp_path: Path) -> None:
    async with external(tmp_path, hosted) as (_, gateway):
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        for told in (False, True):
            options: Any = {"stream_options": {"include_usage": True}} if told else {}
            stream = await client.chat.completions.create(model="hosted", messages=messages, stream=True, **options)
            chunks = [each async for each in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
            assert [c.usage.total_tokens for c in chunks if c.usage is not None] == ([5] if told else [])
            assert len(chunks) == 2 + told, "the chunk of tokens is for who asked for it"
        counted = gateway.gateway.upstreams["hosted"].stats.tokens["/v1/chat/completions"]
        await eventually(lambda: (counted.prompt, counted.completion, counted.estimated) == (6, 4, 0))
        await client.close()


@pytest.mark.parametrize("http", [b"1.1", b"1.0"])
@pytest.mark.parametrize(
    "error", [b'data: {"error":{"message":"x"}}', b'event: error\r\ndata: {"type":"error","code":"x"}']
)
@pytest.mark.parametrize("route", sorted(ROUTES - {"/v1/embeddings"}))
async def test_nothing_follows_an_error_in_a_stream(tmp_path: Path, route: str, error: bytes, http: bytes) -> None:
    """Bytes of the error may arrive in any pieces. Text that looks like an error is none."""
    first = chunk('say "error": {} and "type":"error"')
    whole = first + error + b"\n\n" + b"data: [DONE]\n\n" + chunk("more")
    cuts = [len(first), len(first) + len(error) // 2, len(first) + len(error) + 1, len(first) + len(error) + 2]
    parts = iter([[whole], *([whole[:at], whole[at:]] for at in cuts)])

    async def fails(link: Link, asked: Received) -> None:
        await streaming(*next(parts))(link, asked)

    async with external(tmp_path, fails) as (_, gateway):
        asked = post(route, {"model": "hosted", "stream": True}).replace(b"HTTP/1.1", b"HTTP/" + http)
        for _ in range(5):
            answer = await gateway.ask(asked)
            assert (answer.body, answer.complete) == (first + error + b"\n\n", True)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (b"401 Unauthorized", "upstream_unauthorized"),
        (b"402 Payment Required", "upstream_unauthorized"),
        (b"404 Not Found", "upstream_unknown_model"),
        (b"405 Method Not Allowed", "upstream_unknown_model"),
        (b"408 Request Timeout", "upstream_failed"),
        (b"409 Conflict", "upstream_failed"),
        (b"429 Too Many Requests", "upstream_rate_limited"),
        (b"500 Internal Server Error", "upstream_failed"),
        (b"302 Found", "upstream_failed"),
    ],
)
async def test_its_refusals_are_typed_and_tell_nothing_of_the_key(tmp_path: Path, status: bytes, code: str) -> None:
    refuses = answering(b'{"error":{"message":"bad key %b"}}' % SECRET.encode(), status, b"retry-after: 7\r\n")
    async with external(tmp_path, refuses) as (_, gateway):
        answer = await gateway.ask(chat())
        assert answer.refusal == (503, code)
        assert SECRET.encode() not in answer.body
        async with gateway.instance(model="ours"):
            taken_over = await gateway.ask(chat(model="slow"))
        assert (taken_over.status, taken_over.headers["x-hotswap-fallback"]) == (200, f"from=hosted; reason={code}")
        if status.startswith((b"429", b"500")):
            assert answer.headers["retry-after"] == "7"
        shown = await gateway.ask(get("/admin/models", ADMIN), admin=True)
        assert SECRET.encode() not in shown.body
        assert orjson.loads(shown.body)["models"][1]["has_key"] is True
        assert SECRET not in repr(gateway.gateway.file)


def test_no_other_status_of_an_upstream_is_the_clients() -> None:
    passed = {status for status in range(100, 600) if fault_of("hosted", status, b"") is None}
    assert passed == {*range(200, 300), 400, 413, 422}


async def test_a_fault_of_the_request_is_the_clients(tmp_path: Path) -> None:
    fault = b'{"error":{"message":"no such field","code":"unknown_field"}}'
    async with external(tmp_path, answering(fault, b"400 Bad Request")) as (_, gateway):
        answer = await gateway.ask(chat())
        assert (answer.status, answer.body) == (400, fault)


@pytest.mark.parametrize("model", [b"hosted", b"fast", b"slow"])
async def test_a_body_that_is_written_anew_is_checked_to_its_last_byte(tmp_path: Path, model: bytes) -> None:
    body = b'{"model":"%b","prompt":"%b"}' % (model, b"x" * 10_000 + b"\\q")
    async with external(tmp_path, hosted) as (up, gateway):
        assert (await gateway.ask(post("/v1/completions", body))).refusal == (400, "invalid_json")
        assert up.requests == []


async def test_it_has_no_versions_and_not_every_route(tmp_path: Path) -> None:
    async with external(tmp_path, hosted) as (up, gateway):
        assert (await gateway.ask(chat("x-hotswap-min-version: 1\r\n"))).refusal == (400, "weights_external")
        for prompt in ("prompt", "text"):  # our form, and SGLang's
            answer = await gateway.ask(post("/generate", {"model": "hosted", prompt: "a"}))
            assert answer.refusal == (400, "route_not_external")
        pinned = chat("x-hotswap-version: 1\r\n", model="fast")
        refusal = (await gateway.ask(pinned)).refusal
        assert refusal in ((503, "no_instance"), (409, "version_unavailable")), "it is no fallback for a pin"
        assert not up.requests


async def test_it_takes_over_and_is_taken_over(tmp_path: Path) -> None:
    cut = asyncio.Event()

    async def fails(link: Link, asked: Received) -> None:
        if cut.is_set():
            link.cut()
        else:
            await hosted(link, asked)

    async def ours(link: Link, asked: Received) -> None:
        await link.json(orjson.dumps({"model": orjson.loads(asked.body)["model"], "choices": []}))

    async with external(tmp_path, fails) as (_, gateway):
        answer = await gateway.ask(chat(model="fast"))
        assert answer.headers["x-hotswap-fallback"] == "from=ours; reason=no_instance"
        assert answer.headers["x-hotswap-weights"] == "external"
        async with gateway.instance(ours, model="ours"):
            cut.set()
            answer = await gateway.ask(chat(model="slow"))
        assert (answer.status, orjson.loads(answer.body)["model"]) == (200, "ours")
        assert answer.headers["x-hotswap-fallback"] == "from=hosted; reason=upstream_died"
        assert "x-hotswap-weights" not in answer.headers


async def test_a_stream_that_breaks_is_not_begun_anew(tmp_path: Path) -> None:
    breaks = streaming(chunk("hel"), cut=True)
    async with external(tmp_path, breaks) as (_, gateway), gateway.instance(model="ours") as instance:
        answer = await gateway.ask(chat(model="slow", stream=True))
        assert not answer.complete
        assert b"hel" in answer.body
        assert b"upstream_died" in answer.body
        assert not [each for each in instance.requests if each.target == "/v1/chat/completions"]


async def test_one_that_is_silent_or_not_there(tmp_path: Path) -> None:
    async with external(tmp_path, never_answer, ", read-timeout: 0.2") as (_, gateway):
        assert (await gateway.ask(chat())).refusal == (504, "upstream_timeout")
        config(tmp_path, 1)
        await gateway.ask(post("/admin/models/reload", b"", ADMIN), admin=True)
        answer = await gateway.ask(chat())
        assert answer.refusal == (503, "upstream_unreachable")
        assert b"127.0.0.1" not in answer.body


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models:\n  - name: z\n  - name: a\n    upstream: {url: http://example.com/v1}\n", "line 4.*https"),
        ("models:\n  - name: z\n  - name: a\n    upstream: {url: https://u:p@example.com/v1}\n", "line 4.*no password"),
        ("models:\n  - name: a\n  - name: b\n    upstream: {url: https://x/v1, api-key-env: NOT_SET}\n", "NOT_SET"),
        ("models:\n  - name: a\n  - name: b\n    uptream: {}\n", "line 3.*uptream"),
        ("models:\n  - name: a\naliases:\n  fast: [a, c]\n", "line 4.*no model c"),
        ("models:\n  - name: a\naliases:\n  a: [a]\n", "line 4.*has that name"),
        ("models:\n  - name: b\n    upstream: {url: https://example.com/v1}\n", "one model of instances"),
        ("models: [{name: a}]\nallow-origins: [example.com]\n", "line 2.*SCHEME"),
        ("models: [{name: a}]\nmodel: b\n", "unknown field"),
        ("models: {}\n", "Expected `array`"),
        ("", "Expected `object`"),
        ("models: [", "line 1"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        models_file.read(file)


def test_a_key_that_others_can_read_is_refused(file: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o644)
    entry = f"{{url: https://example.com/v1, api-key-file: {key}}}"
    file.write_text(f"models:\n  - name: a\n  - name: b\n    upstream: {entry}\n")
    with pytest.raises(ConfigError, match="Others can read") as refused:
        models_file.read(file)
    assert SECRET not in str(refused.value)
