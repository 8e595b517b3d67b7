"""TRL's VLLMClient, unchanged, on one base URL: the admin port's, with the key in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.live import LiveServer

pytestmark = pytest.mark.engine
TOKENS = 4


@pytest.fixture(scope="module")
def client(live: LiveServer, checkpoints: dict[str, Path]) -> Any:
    from trl.generation.vllm_client import VLLMClient

    live.push(checkpoints["say-1"])
    host = live.processes.admin_url.removeprefix("http://")
    return VLLMClient(base_url=f"http://:{live.processes.admin_key}@{host}")


def test_it_generates_and_scores(client: Any, live: LiveServer) -> None:
    assert client.model == live.name
    told = client.generate(["3+4=", "1+1="], n=2, max_tokens=TOKENS, logprobs=0)
    assert told["completion_ids"] == [[101] * TOKENS] * 4
    chat = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=TOKENS)
    assert chat["completion_ids"] == [[101] * TOKENS]
    sequence = told["prompt_ids"][0] + [101, 101]
    scored = client.get_sequence_logprobs([sequence], [len(sequence) - 2], top_logprobs=1)
    assert len(scored["logprobs"][0]) == 2


def test_it_reads_the_server_and_posts_its_verbs(client: Any) -> None:
    assert client.get_world_size() == 1
    client.reset_prefix_cache()
    with pytest.raises(Exception, match="RemotePublisher") as refused:
        client.init_communicator("cpu")
    assert "hotswap weights push" in str(refused.value)


def test_tokens_in_and_out_and_rendering_answer_there_too(client: Any, live: LiveServer) -> None:
    body = {"model": live.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    rendered = client._post(f"{client.base_url}/v1/chat/completions/render", json=body)
    body = {"token_ids": rendered["token_ids"], "sampling_params": {"max_tokens": TOKENS, "temperature": 0}}
    told = client._post(f"{client.base_url}/inference/v1/generate", json=body)
    assert told["choices"][0]["token_ids"] == [101] * TOKENS


@pytest.mark.xfail(strict=True, raises=Exception, reason="GET /server_info is refused here, and GRPOTrainer reads it")
def test_it_reads_how_logprobs_are_computed(client: Any) -> None:
    assert client.get_server_info()["model_config"]["logprobs_mode"]


def test_an_update_by_its_verbs_is_a_swap(client: Any, live: LiveServer, checkpoints: dict[str, Path]) -> None:
    before = live.active()
    with client.weight_update():
        client._post(
            f"{client.base_url}/update_weights",
            json={"update_info": {"checkpoint_path": str(checkpoints["say-2"])}},
        )
    assert live.active() > before
    assert client.generate(["3+4="], max_tokens=TOKENS)["completion_ids"] == [[102] * TOKENS]
