"""SGLang's clients, out of its wheel: its frontend's endpoint, its engine adapter and its router.

They ask the admin port, since the routes of weights are there; the router asks the public one. `stubs.py` has what of
the package is not imported. slime and OpenRLHF have no wheels: tests/server/gateway/admin/test_trainers.py has what
slime sends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import requests
from safetensors.numpy import save

from server.gateway.admin import adapters_sglang
from server.gateway.wire import sglang
from server.ports import free_port
from tests.contract import stubs
from tests.contract.conftest import PROMPT, Served, calls, check, gap, named
from tests.contract.release import Sources
from tests.packages import unpacked
from tests.server.gateway.harness import ADMIN_KEY, MODEL
from tests.server.refusals import refuses
from tests.waiting import wait_until

RELEASE, ROUTER = ("sglang", "0.5.23"), ("sglang-router", "0.3.2")
CLIENTS = ("sglang.lang.backend.runtime_endpoint", "sglang.srt.entrypoints.http_server_engine")
TEXT = SimpleNamespace(text_="3+4=", images_=[])
PARAMS = SimpleNamespace(dtype=None, stop=(), regex=None, to_srt_kwargs=lambda: {"max_new_tokens": 1})
IO, TYPES = "sglang.srt.managers.io_struct", "sglang.api.v1.api_types"


def chosen(**given: Any) -> Any:
    """A method to choose by, which wants all that `select` can ask for."""
    return given


chosen.requires_unconditional_logprobs = True  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def clients() -> list[Any]:
    return stubs.load(unpacked(*RELEASE), CLIENTS, stubs.SGLANG)


@pytest.fixture(scope="module")
def endpoint(clients: list[Any], served: Served) -> Any:
    return clients[0].RuntimeEndpoint(f"http://127.0.0.1:{served.port}", api_key=ADMIN_KEY)


ENDPOINT = [  # each method, what it is given, and the status of the answer
    ("get_model_name", (), 200),
    ("get_chat_template", (), 200),
    ("flush_cache", (), 200),
    ("get_server_info", (), 200),
    gap("start_profile", (), reason="engines are not profiled from outside"),
    gap("stop_profile", (), reason="engines are not profiled from outside"),
    gap("concatenate_and_append", ([], ""), reason="SGLang's own server has no such route any more"),
    ("cache_prefix", ("3+4=",), 200),
    ("select", (TEXT, ["7", "8"], 0.0, chosen), 200),
    *((name, (TEXT,), 200) for name in ("commit_lazy_operations", "fill_image")),
    *((name, (TEXT, PARAMS), 200) for name in ("generate", "generate_stream")),
]
ADAPTER = [
    ("update_weights_from_tensor", ([("a", [0.0])],), 422),  # a pickle
    ("release_memory_occupation", (), 501),
    ("resume_memory_occupation", (), 501),
    ("generate", ("3+4=", {"max_new_tokens": 1}), 200),
    ("begin_weight_update", ("draft",), 501),
    ("end_weight_update", (), 409),  # no session is open
]


@pytest.mark.parametrize(("name", "given", "status"), ENDPOINT)
def test_the_endpoint_of_the_frontend(endpoint: Any, name: str, given: tuple[Any, ...], status: int) -> None:
    """RuntimeEndpoint, which reads /get_model_info when it is made."""
    check(endpoint, name, given, status)


@pytest.fixture(scope="module")
def adapter(clients: list[Any], served: Served) -> Any:
    """It waits for /health_generate. It sends its key nowhere else, so the host has it too."""
    return clients[1].HttpServerEngineAdapter(host=served.host, port=served.port, api_key=ADMIN_KEY)


@pytest.mark.parametrize(("name", "given", "status"), ADAPTER)
def test_the_adapter_of_the_engine(adapter: Any, name: str, given: tuple[Any, ...], status: int) -> None:
    check(adapter, name, given, status)


def test_what_the_clients_read_of_answers(endpoint: Any, adapter: Any) -> None:
    assert endpoint.get_server_info()["served_model_name"] == MODEL
    assert endpoint.generate(TEXT, PARAMS)[0] == "4"
    assert [(text, meta["weight_version"]) for text, meta in endpoint.generate_stream(TEXT, PARAMS)] == [("4", "1")]
    told = endpoint.select(TEXT, ["7", "8"], 0.0, chosen)
    assert told["normalized_prompt_logprobs"] == [-1.0, -1.0]
    assert told["input_token_logprobs"] == [[[None, 6, "<6>"], [-1.0, 7, "<7>"]]] * 2
    assert told["output_token_logprobs"] == told["unconditional_token_logprobs"] == [[], []]
    told = adapter.generate(input_ids=[PROMPT, PROMPT], sampling_params={"n": 2}, return_logprob=True)
    assert [each["meta_info"]["output_token_logprobs"] for each in told] == [[[-1.0, 8, None]]] * 4


@pytest.fixture(scope="module")
def types() -> Any:
    """SGLang's own types of the bodies of its HTTP routes."""
    return stubs.load(unpacked(*RELEASE), [TYPES], stubs.SGLANG)[0]


def test_answers_are_of_sglangs_own_types(types: Any, served: Served) -> None:
    """Its codec reads them, and what it has no field for is told besides."""
    for more in ({}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}):
        body = {"text": "3+4=", "rid": "mine", "sampling_params": {"max_new_tokens": 1}, **more}
        types.GenerateRequest.from_json_value(body)
        told = httpx.post(f"{served.gateway.url}/generate", json=body, timeout=240).json()
        read = types.GenerateResponse.from_json_value(told)
        assert (read.text, read.output_ids, read.meta_info.id) == ("4", [8], "mine")
        meta, found = read.meta_info.to_json_value(), told["meta_info"]
        assert {name: meta[name] for name in found.keys() & meta.keys()} == {n: found[n] for n in found.keys() & meta}
        assert found.keys() - meta.keys() == {"prompt_weight_versions"}
        assert read.meta_info.weight_version == "1"


def test_fields_of_generate(types: Any) -> None:
    """Each of SGLang's is translated, or refused by name; the defaults of its own types are taken."""
    ours, struct = sglang.Asked.__struct_fields__, Sources(RELEASE[1], unpacked(*RELEASE))
    every = set(types.GenerateRequest.__struct_fields__) | struct.attributes(f"{IO}:GenerateReqInput")
    assert set(ours) - every == {"model", "hotswap"}
    defaults = types.GenerateRequest(text="a", sampling_params=types.SamplingParams()).to_json_value()
    _, wanted = sglang.translate(json.dumps(defaults).encode())
    assert (wanted.listed, wanted.stream, wanted.logprobs) == (False, False, False)
    for name in every - set(ours):
        refused_by_name({"text": "a", name: {"a": 1}}, name)
    params = set(types.SamplingParams.__struct_fields__)
    assert set(sglang.Sampling.__struct_fields__) <= params
    for name in params - set(sglang.Sampling.__struct_fields__):
        refused_by_name({"text": "a", "sampling_params": {name: {"a": 1}}}, f"sampling_params.{name}")


def test_fields_of_classify() -> None:
    """The same of what a reward model is asked."""
    ours, struct = sglang.Prompted.__struct_fields__, Sources(RELEASE[1], unpacked(*RELEASE))
    every = struct.attributes(f"{IO}:EmbeddingReqInput")
    assert set(ours) - every == {"model", "hotswap"}
    for name in every - set(ours):
        refused_by_name({"text": "a", name: {"a": 1}}, name, sglang.translate_classify)


def refused_by_name(body: dict[str, Any], name: str, translate: Any = sglang.translate) -> None:
    with refuses(400) as refused:
        translate(json.dumps(body).encode())
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


def test_every_call_of_the_clients_is_here(clients: list[Any]) -> None:
    assert calls(clients[0].RuntimeEndpoint) == named(ENDPOINT)
    assert calls(clients[1].HttpServerEngineAdapter) == named(ADAPTER) | {"flush_cache", "shutdown"}


def test_the_adapter_reads_no_answer_of_a_flush(adapter: Any) -> None:
    """SGLang's own server answers in plain text too."""
    with pytest.raises(requests.JSONDecodeError):
        adapter.flush_cache()


def test_weights_of_a_trainer_that_sends_safetensors(adapter: Any, served: Served) -> None:
    """By the adapter's own way to send, as slime's subclass does."""
    buckets = [save({"a": np.ones((4, 4), np.float32)}), save({"b": np.ones(8, np.float32)})]
    body = {"load_format": "safetensors", "flush_cache": False, "weight_version": "2"}
    for bucket in buckets:
        told = adapter._make_request(
            "update_weights_from_tensor", body | {"serialized_named_tensors": [base64.b64encode(bucket).decode()]}
        )
    assert told["success"] is True
    assert served.toy.committed[-1] == int(told["weight_version"])


def test_a_session_of_weights(adapter: Any, served: Served) -> None:
    """As trainers of SGLang send weights since 0.5.22: a session around the buckets, whose end swaps them in."""
    before = list(served.toy.committed)
    assert adapter.begin_weight_update(selector="target")["success"] is True
    for value in ({"b": np.ones(8, np.float32)}, {"a": np.ones((4, 4), np.float32)}):
        sent = {"serialized_named_tensors": [base64.b64encode(save(value)).decode()], "load_format": "safetensors"}
        assert adapter._make_request("update_weights_from_tensor", sent)["success"] is True
    assert served.toy.committed == before, "the session is open"
    told = adapter.end_weight_update()
    assert (told["success"], served.toy.committed) == (True, [*before, int(told["weight_version"])])
    adapter.begin_weight_update()
    assert adapter.end_weight_update()["success"] is True
    assert len(served.toy.committed) == len(before) + 1, "an empty session changes nothing"


def test_fields_of_its_requests() -> None:
    """Fields that SGLang's requests may carry are known here, or refused by name."""
    struct = Sources(RELEASE[1], unpacked(*RELEASE))
    for theirs, ours in {
        "BeginWeightUpdateReqInput": adapters_sglang.Begin,
        "UpdateWeightFromDiskReqInput": adapters_sglang.FromDisk,
        "UpdateWeightsFromTensorReqInput": adapters_sglang.FromTensor,
        "PauseGenerationReqInput": adapters_sglang.Pause,
    }.items():
        fields = struct.attributes(f"{IO}:{theirs}") | {"rid", "http_worker_ipc"}
        assert fields - ours.model_fields.keys() == set(), theirs


@pytest.fixture(scope="module")
def router(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SGLang's router, with the gateway as its only worker."""
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path_factory.mktemp("router") / "log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", url.split(":")[2]]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", served.gateway.url]
    environment = os.environ | {"PYTHONPATH": str(unpacked(*ROUTER))}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            wait_until(lambda: healthy(url), 240, lambda: log.read_text()[-2000:], process)
            yield url
        finally:
            process.kill()


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health_generate").status_code == 200
    return False


def test_the_router_takes_the_gateway_for_a_worker(router: str, served: Served) -> None:
    client = openai.OpenAI(base_url=f"{router}/v1", api_key="unused", max_retries=0)
    told = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "3+4="}])
    assert told.choices[0].message.content == "4"
    assert client.completions.create(model=MODEL, prompt="3+4=").choices[0].text == "4"
    assert [received.target for received in served.asked[-2:]] == ["/v1/chat/completions", "/v1/completions"]
