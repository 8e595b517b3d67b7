"""vLLM's other routes through the gateway, with the real SDK: what it parses, and the version fields it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from tests.live import LiveServer

if TYPE_CHECKING:  # slow to import, and all workers read this file
    import anthropic

pytestmark = pytest.mark.engine


@pytest.fixture
def client(live: LiveServer, checkpoints: dict[str, Path]) -> openai.OpenAI:
    live.push(checkpoints["a"])
    return openai.OpenAI(base_url=live.url + "/v1", api_key="unused", max_retries=0)


def test_models_and_tokens(live: LiveServer, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [live.name]
    tokens = live.client.post("/tokenize", json={"model": live.name, "prompt": "3+4="}).json()["tokens"]
    assert live.client.post("/detokenize", json={"model": live.name, "tokens": tokens}).json()["prompt"] == "3+4="


def test_several_samples_and_prompts(live: LiveServer, client: openai.OpenAI) -> None:
    version = live.active()
    answer = client.completions.create(
        model=live.name, prompt=["3+4=", "1+1="], n=2, max_tokens=3, extra_body={"ignore_eos": True}
    )
    spans = [(c.model_extra or {})["weight_versions"] for c in answer.choices]
    assert spans == [[{"version": version, "start": 0, "end": 3}]] * 4


def test_messages_are_counted_as_they_are_read(live: LiveServer, client: openai.OpenAI) -> None:
    import anthropic

    claude = anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0)
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "3+4="}]
    counted = claude.messages.count_tokens(model=live.name, messages=messages)
    answer = claude.messages.create(model=live.name, max_tokens=1, messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_batch_of_conversations_says_which_weights_wrote_each(live: LiveServer, client: openai.OpenAI) -> None:
    version = live.active()
    body = {
        "model": live.name,
        "messages": [[{"role": "user", "content": "3+4="}], [{"role": "user", "content": "1+1=2, 2+2="}]],
        "max_tokens": 3,
        "ignore_eos": True,
    }
    answer = live.client.post("/v1/chat/completions/batch", json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["weight_versions"] for choice in choices] == [[{"version": version, "start": 0, "end": 3}]] * 2


def test_given_tokens_are_scored(live: LiveServer) -> None:
    body = {"model": live.name, "query": "3+4=", "items": ["7", "8"], "label_token_ids": [5, 6]}
    answer = live.client.post("/generative_scoring", json=body)
    assert answer.status_code == 200, answer.text
    assert live.client.get("/version").json()["version"]
    for method, path in (("GET", "/tokenizer_info"), ("POST", "/v1/embeddings"), ("POST", "/classify")):
        refused = live.client.request(method, path, json={"model": live.name, "input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "route_not_served"), path
