"""Requests that vLLM and this server really take, and their answers, held against the document they publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.gateway.routes import public_names
from tests.live import LiveServer
from tests.schemathesis.run import schemathesis

pytestmark = pytest.mark.engine
# Their schemas refer to hundreds of others, of OpenAI's: fewer examples of them take as long.
LARGE = "^/v1/(chat/completions(/batch)?|responses|messages(/count_tokens)?)$"


def test_the_document_describes_what_is_served(live: LiveServer) -> None:
    told = live.client.get("/openapi.json").json()
    assert set(public_names()) - set(told["paths"]) == {
        *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"),  # the model generates
        *("/rerank", "/v1/rerank", "/v2/rerank"),
        "/tokenizer_info",  # only with --enable-tokenizer-info-endpoint
    }
    schemas = told["components"]["schemas"]
    assert "messages" in schemas["ChatCompletionRequest"]["required"]
    for choice in ("ChatCompletionResponseChoice", "CompletionResponseChoice", "GeneratedChoice"):
        assert {"weight_versions", "prompt_weight_versions"} <= set(schemas[choice]["properties"])
    for request in ("ChatCompletionRequest", "CompletionRequest"):
        assert schemas[request]["properties"]["return_weight_versions"]["type"] == "boolean"
    assert schemas["GenerateRequest"]["additionalProperties"] is False


@pytest.mark.broad
@pytest.mark.parametrize(("which", "examples"), [("--exclude-path-regex", "20"), ("--include-path-regex", "5")])
def test_schemathesis_finds_nothing(live: LiveServer, checkpoints: dict[str, Path], which: str, examples: str) -> None:
    """No 5xx, only documented statuses, content types, headers and bodies; what breaks the schema is refused."""
    live.push(checkpoints["a"])
    report = schemathesis(
        live.url + "/openapi.json", "public.toml", which, LARGE, "--phases", "fuzzing", "--max-examples", examples,
        model=live.name,
    )  # fmt: skip
    assert " passed" in report
    assert live.client.get("/readyz").status_code == 200


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 1}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "no such type"}}}
NAMED = {"type": "function", "function": {"name": "g"}}
TOOL = {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}
STRANGE: list[tuple[str, dict[str, Any]]] = [
    ("/detokenize", {"tokens": [10**12]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [2**70]}),
    ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("/tokenize", {"messages": [{"role": "", "content": None}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{% for %}"}),
    ("/v1/chat/completions", CHAT | {"chat_template": "{{ messages.x.y.z }}"}),
    ("/v1/chat/completions", CHAT | {"chat_template": "{{ ''.__class__.__mro__ }}"}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool"}]}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
    ("/v1/chat/completions", CHAT | {"tools": [FUNCTION], "tool_choice": "required"}),
    ("/v1/chat/completions", CHAT | {"tools": [FUNCTION], "tool_choice": NAMED}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {"x": 1}}),
    ("/v1/chat/completions", CHAT | {"logit_bias": {"999999": 1}}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 10**6}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "("}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": {"$ref": "#/no/such/place"}}}),
    ("/v1/chat/completions", CHAT | {"seed": 2**63 - 1}),
    ("/v1/chat/completions", CHAT | {"truncate_prompt_tokens": 0}),
    ("/v1/chat/completions", CHAT | {"stop": [""]}),
    ("/v1/chat/completions", CHAT | {"user": "x" * 10**5, "cache_salt": ""}),
    ("/v1/completions", COMPLETION | {"prompt": []}),
    ("/v1/completions", COMPLETION | {"prompt": [[]]}),
    ("/v1/completions", COMPLETION | {"prompt": [10**12]}),
    ("/v1/completions", COMPLETION | {"prompt": [-5]}),
    ("/v1/completions", {"prompt_embeds": "AAAA", "max_tokens": 1}),
    ("/v1/completions", COMPLETION | {"logprobs": -2}),
    ("/v1/completions", COMPLETION | {"prompt_logprobs": 10**6}),
    ("/v1/completions", COMPLETION | {"n": 0}),
    ("/v1/completions", COMPLETION | {"temperature": 1e308, "top_p": 1e-300, "top_k": 2**31}),
    ("/v1/completions", COMPLETION | {"kv_transfer_params": {"do_remote_prefill": True}}),
    ("/v1/completions", COMPLETION | {"use_beam_search": True, "n": 2}),
    ("/v1/completions", COMPLETION | {"bad_words": [""], "allowed_token_ids": []}),
    ("/v1/completions", COMPLETION | {"stop_token_ids": [2**40], "min_tokens": 1}),
    ("/v1/responses", {"input": [{"type": "no such type"}]}),
    ("/v1/responses", {"input": "hi", "previous_response_id": "resp_x"}),
    ("/v1/responses", {"input": "hi", "background": True, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "tools": [{"type": "mcp", "server_label": "x"}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}], "max_tokens": 1}),
    ("/v1/messages", CHAT | TOOL),
    ("/generate", {"prompt_token_ids": [2**40], "max_tokens": 1}),
    ("/generate", {"prompt": "hi", "max_tokens": 1, "seed": 2**70}),
    ("/generate", {"prompt": "hi", "max_tokens": 1, "priority": -(2**63)}),
]


@pytest.mark.parametrize(("path", "body"), STRANGE, ids=[f"{p}-{n}" for n, (p, _) in enumerate(STRANGE)])
def test_what_is_strange_is_no_fault_of_the_server(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    """An answer or a typed refusal; and the engine goes on for everybody else."""
    answer = live.client.post(path, json={"model": live.name, **body})
    assert answer.status_code < 500 or answer.status_code == 501, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"]
    again = live.client.post("/v1/completions", json={"model": live.name, **COMPLETION})
    assert again.status_code == 200
