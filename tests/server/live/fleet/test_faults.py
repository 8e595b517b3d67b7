"""Bad input and faults against a live server: a typed answer that says what to do, and the old version serving on."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine
PROMPT = [9, 8, 7, 6]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": CHAT, "/v1/responses": {"input": "hi"},
}  # fmt: skip


@pytest.fixture
def serving(live: LiveServer, checkpoints: dict[str, Path]) -> tuple[int, list[int]]:
    """The active version and its greedy answer, from checkpoint `a`."""
    version = live.push(checkpoints["a"])
    return version, live.generate(PROMPT, 12)["choices"][0]["token_ids"]


def assert_untouched(live: LiveServer, serving: tuple[int, list[int]]) -> None:
    """The same version serves the same answer, and the instance is not left half-way."""
    version, answer = serving
    assert live.active() == version
    (choice,) = live.generate(PROMPT, 12)["choices"]
    assert choice["token_ids"] == answer
    assert {s["version"] for s in choice["weight_versions"]} == {version}
    wait_until(lambda: live.instance()["state"] == "SERVING", what="it has dropped what was refused")


def damaged(source: Path, target: Path, how: str) -> Path:
    """A copy of a checkpoint with one thing wrong."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 1000)
    else:
        save_file(load_file(file) | {"model.layers.9.extra": torch.zeros(2)}, file, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("how", "names"), [("truncated", "model.safetensors"), ("extra tensor", "model.layers.9.extra")]
)
def test_bad_checkpoint(
    live: LiveServer, checkpoints: dict[str, Path], serving: tuple[int, list[int]], tmp_path: Path, how: str, names: str
) -> None:
    path = damaged(checkpoints["b"], tmp_path / "bad", how)
    answer = live.admin.post("/admin/weights", json={"path": str(path), "activate": True})
    assert 400 <= answer.status_code < 500
    assert names in answer.json()["error"]["message"]
    assert_untouched(live, serving)


CONTROL = ["/pause", "/resume", "/collective_rpc", "/start_weight_update", "/update_weights", "/sleep"]


@pytest.mark.parametrize("path", CONTROL)
def test_control_routes_are_not_reachable(live: LiveServer, path: str) -> None:
    assert live.client.post(path, json={}).status_code == 404
    with httpx.Client(**live.direct()[0]) as instance:
        assert instance.post(path, json={}).status_code in (404, 405)


def test_an_instance_answers_its_gateways_alone(live: LiveServer) -> None:
    """Its port is on loopback, where every program of the host may knock: keys, limits and scopes are the gateway's."""
    record = live.instance()
    assert "key" not in record
    body = {"prompt_token_ids": [3, 4, 5], "max_tokens": 1}
    for headers in ({}, {"authorization": "Bearer guessed"}, {"x-hotswap-probe": "1"}):
        answer = httpx.post(record["address"] + "/generate", json=body, headers=headers)
        assert answer.status_code == 401, answer.text
        assert answer.json()["error"]["code"] == "instance_key_required"
    assert httpx.get(record["address"] + "/v1/models").status_code == 401
    assert httpx.get(record["address"] + "/health").status_code == 200
    with httpx.Client(**live.direct()[0]) as member:
        assert member.post("/generate", json=body | {"stream": False}).status_code == 200


def test_openai_sdk_gets_typed_errors(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="no-such-model", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model=live.name, prompt=[5] * 2000, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=live.name, prompt="hi", temperature=-3)
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=live.name, messages="hi")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{not json", "JSON"),
        (b"[]", "body"),
        (b"{}", "prompt"),
        (b'{"prompt": "a", "prompt_token_ids": [1]}', "exactly one"),
        (b'{"prompt_token_ids": [99999999]}', "vocabulary"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 5000}', "context"),
        (b'{"prompt": "a", "temperature": -1}', "temperature"),
        (b'{"prompt": "a", "unknown_field": 1}', "unknown_field"),
        (b'{"prompt": "' + b"a" * 3000 + b'", "max_tokens": 1}', ""),
    ],
)
def test_generate_refuses_with_a_typed_error(live: LiveServer, body: bytes, names: str) -> None:
    answer = live.client.post("/generate", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert names in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("mode", ["together", "rolling"])
def test_weights_that_are_not_finite_are_refused_while_staging(
    live: LiveServer,
    serving: tuple[int, list[int]],
    checkpoints: dict[str, Path],
    tmp_path: Path,
    value: float,
    mode: str,
) -> None:
    tensors = load_file(checkpoints["b"] / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name][3, 5] = value
    bad = tmp_path / "bad"
    shutil.copytree(checkpoints["b"], bad)
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    answer = live.admin.post("/admin/weights", json={"path": str(bad), "activate": True, "mode": mode})
    error = answer.json()["error"]
    assert answer.status_code in (409, 422)
    assert name in error["message"]
    assert "NaN or infinite" in error["message"]
    assert f"tensor {name!r} has NaN" in live.processes.children["instance-0"].log.read_text(), "of its instance"
    assert_untouched(live, serving)


BAD_IDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [511, 512]}),
    ("/v1/completions", {"prompt": [511, 512], "stream": True}),
    ("/v1/completions", {"prompt": [[5, 6], [5, 512]]}),
    ("/v1/completions", {"prompt": [5, 512], "use_beam_search": True, "n": 2}),
    ("/v1/completions", {"prompt": [5], "prompt_logprobs": 1, "stop_token_ids": [-1]}),
    ("/v1/completions", {"prompt": [2**40]}),
    ("/v1/completions", {"prompt": [5], "stop_token_ids": [512]}),
    ("/v1/completions", {"prompt": [5], "logit_bias": {"512": 5}}),
    ("/v1/completions", {"prompt": [5], "allowed_token_ids": [512]}),
    ("/v1/completions", {"prompt": [5], "logprobs": 1, "logprob_token_ids": [512]}),
    ("/generate", {"prompt_token_ids": [511, 512]}),
    ("/generate", {"prompt_token_ids": [511, 512], "stream": False}),
    ("/generate", {"prompt_token_ids": [5], "stop_token_ids": [512]}),
]


@pytest.mark.parametrize(("route", "body"), BAD_IDS)
def test_an_id_out_of_the_vocabulary_is_refused_and_the_engine_lives(
    live: LiveServer, route: str, body: dict[str, Any]
) -> None:
    """vLLM admits ids up to the tokenizer's largest. This model has no embedding for it: the engine would die."""
    engine = [process.pid for process in live.tree()]
    answer = live.client.post(route, json={"model": live.name, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    assert "vocab" in answer.json()["error"]["message"].lower()
    assert live.generate([5, 6], 2)["choices"][0]["token_ids"]
    assert [process.pid for process in live.tree()] == engine


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "array", "minItems": 10**9}},
        {"choice": [str(n) for n in range(100_000)]},
        {"grammar": 'root ::= root "a" | root root | "a"'},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"regex": "((a{1,100}){1,100}){1,100}"},
    ],
    ids=["items", "choices", "rules", "references", "repeats"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_would_take_the_host_is_refused(live: LiveServer, asked: dict[str, Any], stream: bool) -> None:
    processes = live.tree()
    before = sum(process.memory_info().rss for process in processes)
    body = {"model": live.name, "max_tokens": 4, "structured_outputs": asked, "stream": stream}
    for route in ("/v1/completions", "/v1/chat/completions"):
        answer = live.client.post(route, json={**body, **ASKS[route]})
        assert answer.status_code == 400, answer.text
        assert "structured output" in answer.json()["error"]["message"]
    assert sum(process.memory_info().rss for process in live.tree()) < before + (64 << 20)
    assert live.generate([5, 6], 2)["choices"][0]["token_ids"]


SLOW = "|".join(f"(.*{'abcdefgh'[n % 8]}.{{{1000 + n}}})" for n in range(400))


@pytest.mark.parametrize(
    ("route", "stream"),
    [
        pytest.param("/v1/completions", False, marks=pytest.mark.broad),
        ("/v1/completions", True),
        ("/v1/chat/completions", False),
        pytest.param("/v1/chat/completions", True, marks=pytest.mark.broad),
        pytest.param("/v1/responses", False, marks=pytest.mark.broad),
        pytest.param("/v1/responses", True, marks=pytest.mark.broad),
    ],
)
def test_a_grammar_within_the_bounds_that_takes_too_long_is_refused_while_others_are_answered(
    live: LiveServer, route: str, stream: bool
) -> None:
    """It is compiled in a process apart: the API server and the engine neither stand still nor grow."""
    few = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    body = {"model": live.name, few: 4, "stream": stream, **ASKS[route]}
    slow = {"structured_outputs": {"regex": f"({SLOW})x{len(route)}{stream}"}}  # each case a grammar of its own
    quick = {"structured_outputs": {"choice": ["yes", "no"]}, "model": live.name, "max_tokens": 4, **CHAT}
    assert live.client.post("/v1/chat/completions", json=quick).status_code == 200  # the helper runs
    before = {p.pid: p.memory_info().rss for p in live.tree()}
    with ThreadPoolExecutor(1) as other:
        refused = other.submit(httpx.post, live.url + route, json=body | slow, timeout=100)
        answered = 0
        while not refused.done():
            assert live.client.post("/v1/chat/completions", json=quick).status_code == 200
            answered += 1
    error = refused.result().json()["error"]
    assert (refused.result().status_code, error["code"]) == (400, "grammar_too_costly"), error
    assert "more than 2 s to compile; simplify" in error["message"]
    assert answered > 1
    again = live.client.post(route, json=body | slow)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "grammar_too_costly")
    grown = [p.memory_info().rss - before[p.pid] for p in live.tree() if p.pid in before]
    assert max(grown) < 64 << 20


@pytest.mark.parametrize("route", ASKS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_the_client_s(live: LiveServer, route: str, stream: bool) -> None:
    body = {"model": live.name, "stream": stream, **ASKS[route], "structured_outputs": {"grammar": "root ::= nobody"}}
    answer = live.client.post(route, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar"), answer.text


def test_the_library_of_one_grammar_is_not_that_of_the_next(live: LiveServer) -> None:
    """xgrammar refuses an empty rule and knows no `multipleOf`. A stock engine has the library of who asks first."""

    def ask(asked: dict[str, Any]) -> set[str]:
        body = {"model": live.name, "messages": [{"role": "user", "content": "?"}], "n": 8, "structured_outputs": asked}
        answer = live.client.post("/v1/chat/completions", json=body, timeout=100)
        assert answer.status_code == 200, answer.text
        return {choice["message"]["content"] for choice in answer.json()["choices"]}

    sevens = {"type": "integer", "minimum": 1000, "maximum": 1012, "multipleOf": 7}
    with ThreadPoolExecutor(3) as clients:  # so that one batch has grammars of both
        for _ in range(4):
            chosen, empty, numbers = clients.map(
                ask, [{"choice": ["yes", "no"]}, {"grammar": "root ::="}, {"json": sevens}]
            )
            assert chosen <= {"yes", "no"}
            assert empty == {""}
            assert numbers <= {"1001", "1008"}


def test_structured_output_logprobs_and_embeddings_as_vllm_gives_them(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="unused", max_retries=0)
    chat = client.chat.completions.create(
        model=live.name,
        messages=[{"role": "user", "content": "?"}],
        logprobs=True,
        top_logprobs=2,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert chat.choices[0].message.content in ("yes", "no")
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2  # type: ignore[index]
    with pytest.raises(openai.APIStatusError):
        client.embeddings.create(model=live.name, input="hi")  # a generating model offers none


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_vllm_fails_over_is_told_as_the_client_s(live: LiveServer, path: str, stream: bool) -> None:
    """Its schema admits a text there, and its code asks the text for a key."""
    body = {"model": live.name, "max_tokens": 2, "stream": stream, **ASKS[path]}
    answer = live.client.post(path, json={**body, "vllm_xargs": {"kv_transfer_params": "x"}})
    assert "vLLM cannot take this request" in answer.text
    assert "has no attribute 'server'" not in answer.text
    assert stream or (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert live.client.post(path, json=body).status_code == 200
