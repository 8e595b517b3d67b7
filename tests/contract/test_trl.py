"""TRL's clients of vLLM, unchanged, on one base URL: the admin port's, with the key in it.

`VLLMClient` asks a real engine; those of the asynchronous trainers, which have the same name, a gateway without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract import stubs
from tests.contract.conftest import Served, calls, check, gap
from tests.contract.release import installed
from tests.live import LiveServer
from tests.server.gateway.admin.test_admin import checkpoint

INFO = "GET /server_info is refused here: it tells of an NCCL group"
LORA = "adapters come as parts of a version, by POST /admin/weights"
ASYNCHRONOUS = [f"trl.experimental.{name}.vllm_client" for name in ("async_grpo", "async_distillation")]
TOKENS = 4


@pytest.fixture(scope="module")
def client(live: LiveServer, checkpoints: dict[str, Path]) -> Any:
    from trl.generation.vllm_client import VLLMClient

    live.push(checkpoints["say-1"])
    host = live.processes.admin_url.removeprefix("http://")
    return VLLMClient(base_url=f"http://:{live.processes.admin_key}@{host}")


@pytest.mark.engine
def test_it_generates_and_scores(client: Any, live: LiveServer) -> None:
    assert client.model == live.name
    told = client.generate(["3+4=", "1+1="], n=2, max_tokens=TOKENS, logprobs=0)
    assert told["completion_ids"] == [[101] * TOKENS] * 4
    chat = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=TOKENS)
    assert chat["completion_ids"] == [[101] * TOKENS]
    sequence = told["prompt_ids"][0] + [101, 101]
    scored = client.get_sequence_logprobs([sequence], [len(sequence) - 2], top_logprobs=1)
    assert len(scored["logprobs"][0]) == 2


@pytest.mark.engine
def test_it_reads_the_server_and_posts_its_verbs(client: Any) -> None:
    assert client.get_world_size() == 1
    client.reset_prefix_cache()
    with pytest.raises(Exception, match="RemotePublisher") as refused:
        client.init_communicator("cpu")
    assert "hotswap weights push" in str(refused.value)


@pytest.mark.engine
def test_tokens_in_and_out_and_rendering_answer_there_too(client: Any, live: LiveServer) -> None:
    body = {"model": live.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    rendered = client._post(f"{client.base_url}/v1/chat/completions/render", json=body)
    body = {"token_ids": rendered["token_ids"], "sampling_params": {"max_tokens": TOKENS, "temperature": 0}}
    told = client._post(f"{client.base_url}/inference/v1/generate", json=body)
    assert told["choices"][0]["token_ids"] == [101] * TOKENS


@pytest.mark.engine
@pytest.mark.xfail(strict=True, raises=Exception, reason=INFO)
def test_it_reads_how_logprobs_are_computed(client: Any) -> None:
    assert client.get_server_info()["model_config"]["logprobs_mode"]


@pytest.mark.engine
def test_an_update_by_its_verbs_is_a_swap(client: Any, live: LiveServer, checkpoints: dict[str, Path]) -> None:
    before = live.active()
    with client.weight_update():
        update = {"update_info": {"checkpoint_path": str(checkpoints["say-2"])}}
        client._post(f"{client.base_url}/update_weights", json=update)
    assert live.active() > before
    assert client.generate(["3+4="], max_tokens=TOKENS)["completion_ids"] == [[102] * TOKENS]
    assert live.rollback() == before


@pytest.fixture(scope="module", params=ASYNCHRONOUS)
def asynchronous(request: pytest.FixtureRequest, served: Served) -> Any:
    return stubs.load(installed("trl"), [request.param], stubs.TRL)[0].VLLMClient(served.admin)


def test_an_asynchronous_trainer_swaps_weights(asynchronous: Any, served: Served, tmp_path: Path) -> None:
    client, before = asynchronous, served.toy.committed[-1]
    client.wait_for_server_ready()
    assert (client.get_max_model_len(), client.get_world_size()) == (128, 1)
    client.init_weight_transfer_engine({})
    client.pause()
    client.start_weight_update()
    client.update_weights({"checkpoint_path": checkpoint(tmp_path / "one")})
    client.finish_weight_update()
    client.resume()
    client.unload_lora_adapter("nobody")  # it does not read the answer
    assert served.toy.committed[-1] == before + 1
    phases = {"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"}
    rest = {"wait_for_server_ready", "get_max_model_len", "get_world_size", "pause", "resume", "unload_lora_adapter"}
    assert calls(type(client)) - {"get_dtype"} == phases | rest | {"get_server_info", "load_lora_adapter"}


@pytest.mark.parametrize(
    ("name", "given", "status"),
    [gap("get_server_info", (), reason=INFO), gap("load_lora_adapter", ("it", "/it"), reason=LORA)],
)
def test_what_an_asynchronous_trainer_asks_besides(
    asynchronous: Any, name: str, given: tuple[str, ...], status: int
) -> None:
    check(asynchronous, name, given, status)
