"""Every body field of every route, as vLLM's own document names them, with values that nobody sends in good faith.

Each answer is typed and comes in time, no process grows, and the engine goes on. schemathesis (test_openapi.py)
sends what the document allows and forbids; here it is what costs something: huge numbers, depths, lengths, templates
that never end, addresses of this host. The same requests every time.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from server.gateway.routes import find
from tests.live import LiveServer
from tests.server.asking import answering

pytestmark = [pytest.mark.engine, pytest.mark.broad]
SLOWEST_S = 30.0  # of one request, on a machine that others use too: what is not bounded takes minutes
MOST_GROWTH = 256 << 20  # of one process, over one route
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT | {"messages": [CHAT["messages"]]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/generative_scoring": {"query": "hi", "items": ["a"], "label_token_ids": [5, 6]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/generate": COMPLETION | {"stream": False},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/v1/completions/render": COMPLETION,
    "/v1/chat/completions/render": CHAT,
    "/v1/messages/render": CHAT,
    "/v1/responses/render": {"input": "hi"},
}


class Raw(str):
    """JSON as it stands."""


def nested(opening: str, closing: str, levels: int) -> Raw:
    return Raw(opening * levels + "1" + closing * levels)


NUMBERS = [-1, 0, 2**31, 2**63, 2**64, -(2**63), 1e308, Raw("1e999"), Raw("NaN"), Raw("-Infinity"), Raw("9" * 5000)]
TEXTS = ["", "\x00", Raw('"\\ud800"'), "x" * 200_000, "{{ 1/0 }}", "../../../etc/passwd", "%s%n{0}"]
LISTS: list[Any] = [[], [None] * 10_000, list(range(100_000)), ["a" * 1000] * 2000, nested("[", "]", 100_000)]
OBJECTS: list[Any] = [{str(n): n for n in range(20_000)}, nested('{"a":', "}", 50_000), {"__class__": {"__init__": 1}}]
OF_TYPE = {
    "integer": NUMBERS,
    "number": NUMBERS,
    "string": TEXTS,
    "array": LISTS,
    "object": OBJECTS,
    "boolean": [2, "maybe", Raw("NaN")],
}
ENDLESS = [
    "{% for a in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
]
HERE = "HERE"  # becomes the address of a port that counts who asks
IMAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": HERE}}]}]
FILES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
SOUNDS = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A" * 10**6, "format": "wav"}}]}]
MANY = [{"role": "user", "content": "a"}] * 20_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "array", "minItems": 10**9}}}
TOOLS = [[TOOL], [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(3000)]]
SCHEMA = {"type": "array", "minItems": 10**9}
NAMED: dict[str, list[Any]] = {
    "messages": [IMAGES, FILES, SOUNDS, MANY],
    "input": [
        [{"role": "user", "content": [{"type": "input_image", "image_url": HERE, "detail": "auto"}]}],
        [{"role": "user", "content": "a"}] * 20_000,
        "a " * 10**6,
    ],
    "prompt": ["a " * 10**6, ["a"] * 20_000, [[5]] * 20_000, [5] * 200_000],
    "tokens": [[5] * 10**6, [2**70]],
    "items": [["a"] * 20_000, ["a " * 10**6]],
    "chat_template": ENDLESS,
    "chat_template_kwargs": [{"chat_template": ENDLESS[0]}, {"messages": 5}, {"tools": 5}, {"a": "x" * 10**6}],
    "n": [10**6, 2**31, -1],
    "best_of": [10**6],
    "logprobs": [10**9, -1, True],
    "top_logprobs": [10**9, -1],
    "prompt_logprobs": [10**9, -1],
    "top_k": [2**63, -5, 10**30],
    "max_tokens": [2**31, 2**63, -1, 0],
    "min_tokens": [2**31, -1],
    "stop": [["ab"] * 100_000, ["x" * 10**6], [""]],
    "bad_words": [["a b c"] * 20_000, ["x" * 10**5], [""]],
    "logit_bias": [{str(n): 100 for n in range(512)}, {"1": 1e308}, {"-1": 1}, {"9" * 4000: 1}],
    "allowed_token_ids": [[5] * 10**6, [-1], []],
    "stop_token_ids": [[5] * 10**6, [2**70]],
    "truncate_prompt_tokens": [-(10**9), 2**62, 0],
    "mm_processor_kwargs": [{"size": {"height": 10**9, "width": 10**9}}, {"a": [1] * 10**5}],
    "media_io_kwargs": [{"image": {"x": 1}}, {"video": {"num_frames": 10**9}}],
    "vllm_xargs": [{"kv_transfer_params": {"do_remote_prefill": True}}, {"a": "x" * 10**6}, {"hotswap": {"x": 1}}],
    "kv_transfer_params": [{"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}],
    "ec_transfer_params": [{"do_remote": True}],
    "structured_outputs": [{"json": SCHEMA}, {"regex": "(a|b)*" * 500}, {"choice": ["x"] * 10**5}],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}],
    "text": [{"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}],
    "tools": TOOLS,
    "sampling_params": [
        {"max_tokens": 2, **more}
        for more in (
            {"n": 10**6}, {"logprobs": 10**9}, {"prompt_logprobs": 10**9}, {"temperature": 1e308}, {"seed": 2**70},
            {"structured_outputs": {"json": SCHEMA}}, {"bad_words": ["a"] * 20_000}, {"logit_bias": {"600": 1}},
            {"allowed_token_ids": [5] * 10**5}, {"extra_args": {"hotswap": {"scope": "x"}}}, {"max_tokens": 2**31},
            {"stop": ["a"] * 10**4}, {"skip_reading_prefix_cache": 5}, {"min_tokens": 2**31}, {"output_kind": 77},
        )
    ],
    "token_ids": [[5] * 200_000, [2**70], [-1]],
    "features": [{"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 2**40, "length": 2**40}]}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def documents(live: LiveServer) -> dict[str, Any]:
    """Documents that vLLM publishes of its routes, ours among them."""
    with httpx.Client(**live.direct()[0], timeout=120) as instance:
        own = instance.get("/hotswap/openapi.json").json()
        whole: dict[str, Any] = instance.get("/openapi.json").json()
    whole["paths"]["/generate"] = own["paths"]["/generate"]
    whole["components"]["schemas"] = own["components"]["schemas"] | whole["components"]["schemas"]
    return whole


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[str, list[str]]]:
    """The address of a port on loopback, and what was asked of it."""
    asked: list[str] = []

    def count(path: str, _: object) -> tuple[int, bytes]:
        asked.append(path)
        return 404, b""

    with answering(count) as url:
        yield f"{url}/secret", asked


def properties(document: dict[str, Any], path: str) -> dict[str, set[str]]:
    """The body fields of a route and their types, over all alternatives."""
    found: dict[str, set[str]] = {}
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for alternative in alternatives(document, schema):
        for name, what in alternative.get("properties", {}).items():
            kinds = {str(one.get("type", "object")) for one in alternatives(document, what)}
            found.setdefault(name, set()).update(kinds - {"null"})
    return found


def alternatives(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        yield from alternatives(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    elif inner := [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]:
        for one in inner:
            yield from alternatives(document, one)
    else:
        yield schema


def hostile(path: str, field: str, kinds: set[str]) -> list[Any]:
    """Some values for a field: those made for its name, else some of its types; and one of any other."""
    chance = random.Random(f"{path} {field}")
    own = [value for kind in sorted(kinds) for value in OF_TYPE.get(kind, TEXTS)]
    values = NAMED.get(field) or chance.sample(own, min(2, len(own)))
    return [*values, chance.choice([None, Raw("NaN"), [], {}, True, 2**63, "x", LISTS[-1], OBJECTS[1]])]


def written(body: dict[str, Any], address: str) -> bytes:
    parts = (f"{json.dumps(k)}:{v if isinstance(v, Raw) else json.dumps(v)}" for k, v in body.items())
    return ("{" + ",".join(parts) + "}").replace(HERE, address).encode("utf-8", "surrogatepass")


def memory(processes: list[psutil.Process]) -> dict[int, int]:
    return {p.pid: p.memory_info().rss for p in processes}


def served(live: LiveServer) -> list[psutil.Process]:
    """The gateway, the API server and the engine core."""
    return [psutil.Process(live.processes.children["gateway"].process.pid), *live.tree()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ROUTES)
def test_a_hostile_value_of_any_field_gets_a_typed_answer(
    live: LiveServer, documents: dict[str, Any], here: tuple[str, list[str]], path: str
) -> None:
    address, asked = here
    fields = properties(documents, path)
    assert len(fields) > 1
    assert live.generate([5, 6], 2)["choices"][0]["token_ids"]
    client = live.admin if all(target.route.admin for target in find(path.encode())) else live.client
    processes = served(live)
    before = memory(processes)
    problems: list[str] = []
    for field, kinds in sorted(fields.items()):
        for number, value in enumerate(hostile(path, field, kinds)):
            body = written({"model": live.name, **ROUTES[path], field: value}, address)
            name = f"{field}[{number}]={str(value)[:60]!r} ({len(body)} bytes)"
            began = time.monotonic()
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            took = time.monotonic() - began
            if took > SLOWEST_S:
                problems.append(f"{name} took {took:.1f} s")
            problem = untyped(answer)
            if problem:
                problems.append(f"{name}: {problem}")
    after = memory([p for p in processes if p.is_running()])
    grown = {p.pid: after.get(p.pid, 0) - before[p.pid] for p in processes}
    problems += [
        f"process {p.pid} ({name}) grew {grown[p.pid] >> 20} MiB"
        for p, name in zip(processes, ("gateway", "API server", *["engine"] * len(processes)), strict=False)
        if grown[p.pid] > MOST_GROWTH or not after.get(p.pid)
    ]
    problems += [f"this host was asked for {asked}"] if asked else []
    asked.clear()
    assert not problems, "\n".join(problems)
    assert live.generate([5, 6], 2)["choices"][0]["token_ids"]


def untyped(answer: httpx.Response) -> str:
    """The fault of an answer, if there is one."""
    if answer.status_code == 200:
        text = answer.text
        return f"200 with {text[-300:]}" if text.startswith("data:") and '"InternalServerError"' in text else ""
    try:
        error = answer.json()["error"]
        typed = bool(error["message"] and error["type"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}, untyped: {answer.text[:200]!r}"
    if not typed or (answer.status_code >= 500 and answer.status_code != 501):
        return f"{answer.status_code} {str(error)[:300]}"
    return ""
