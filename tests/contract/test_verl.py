"""verl's clients of SGLang servers, out of its wheel, at the admin port: the one that blocks and the one that does not.

verl talks to vLLM within its own processes, by Ray, so this is all that it asks over HTTP but chat completions.
`stubs.py` has what of SGLang stands in.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from tests.contract import stubs
from tests.contract.conftest import BUCKET, PROMPT, Served, calls, check, gap, named
from tests.packages import unpacked
from tests.server.gateway.harness import ADMIN_KEY, MODEL

RELEASE = ("verl", "0.9.1")
CLIENT = "verl.workers.rollout.sglang_rollout.http_server_engine"
LORA = "an adapter comes as a directory, by POST /load_lora_adapter; here it is pickled tensors"
SAFETENSORS = SimpleNamespace(serialized_named_tensors=[BUCKET], load_format="safetensors", flush_cache=False)
PICKLES = SimpleNamespace(serialized_named_tensors=[b"pickle"], load_format=None, flush_cache=True)
ADAPTER = SimpleNamespace(serialized_named_tensors=[BUCKET], lora_name="verl", config_dict={})
CALLS = [  # each method, what it is given, and the status of the answer
    ("update_weights_from_tensor", (SAFETENSORS,), 200),
    ("update_weights_from_tensor", (PICKLES,), 422),
    ("flush_cache", (), 200),
    ("release_memory_occupation", (), 501),
    ("resume_memory_occupation", (["weights"],), 501),
    ("abort_request", ("", True), 501),
    ("generate", ("3+4=", {"max_new_tokens": 1}), 200),
    ("reward_score", ("3+4=",), 200),
]
ASYNC_ONLY = [
    ("available_models", (), 200),
    gap("load_lora_adapter_from_tensor", (ADAPTER,), reason=LORA),
    ("unload_lora_adapter", ("verl",), 422),  # there is none of this name
    ("async_generate", ("3+4=", {"max_new_tokens": 1}), 200),
    ("async_reward_score", ("3+4=",), 200),
]


@pytest.fixture(scope="module")
def client() -> Any:
    return stubs.load(unpacked(*RELEASE), [CLIENT], stubs.VERL)[0]


@pytest.fixture(scope="module")
def blocking(client: Any, served: Served) -> Any:
    """It waits for /health_generate and /flush_cache. It sends its key nowhere else, so the host has it too."""
    there = {"host": served.host, "port": served.port, "api_key": ADMIN_KEY}
    made = client.HttpServerAdapter(**there, first_rank_in_node=True, max_attempts=1)
    made.server_args.is_embedding = True  # or it asks for no score
    return made


@pytest.fixture(scope="module")
def other(client: Any, served: Served) -> Any:
    there = {"host": served.host, "port": served.port, "api_key": ADMIN_KEY}
    return client.AsyncHttpServerAdapter(**there, launch_server=False, max_attempts=1)


@pytest.mark.parametrize(("name", "given", "status"), CALLS)
def test_the_client_that_blocks(blocking: Any, name: str, given: tuple[Any, ...], status: int) -> None:
    check(blocking, name, given, status)


@pytest.mark.parametrize(("name", "given", "status"), [*CALLS, *ASYNC_ONLY])
def test_the_client_that_does_not(other: Any, name: str, given: tuple[Any, ...], status: int) -> None:
    check(other, name, given, status)


def test_what_it_sends_is_swapped_in(blocking: Any, other: Any, served: Served) -> None:
    before = served.toy.committed[-1]
    assert blocking.update_weights_from_tensor(SAFETENSORS)["weight_version"] == str(before + 1)
    assert asyncio.run(other.update_weights_from_tensor(SAFETENSORS))["weight_version"] == str(before + 2)
    assert served.toy.committed[-2:] == [before + 1, before + 2]
    assert asyncio.run(other.available_models())["data"][0]["id"] == MODEL


def test_a_score_is_what_the_model_says_without_activation(blocking: Any, served: Served) -> None:
    one, several = blocking.reward_score("3+4="), blocking.reward_score(input_ids=[PROMPT])
    assert (one["embedding"], one["meta_info"]["prompt_tokens"], several) == ([-0.5], 1, [several[0]])
    asked = [orjson.loads(received.body) for received in served.asked[-2:]]
    assert asked == [{"input": "3+4=", "use_activation": False}, {"input": [PROMPT], "use_activation": False}]


def test_every_call_of_the_clients_is_here(client: Any) -> None:
    assert calls(client.HttpServerAdapter) == named(CALLS) | {"shutdown"}
    assert calls(client.AsyncHttpServerAdapter) == named(CALLS) | named(ASYNC_ONLY)
