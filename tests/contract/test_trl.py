"""TRL's clients of vLLM, unchanged, on one base URL: the admin port's, with the key in it.

`VLLMClient` asks a real engine; those of the asynchronous trainers, which have the same name, a gateway without one.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from server.instance import openapi
from tests.contract import stubs
from tests.contract.conftest import CONFIG, Served, calls
from tests.contract.release import installed
from tests.live import LiveServer
from tests.server.gateway.admin.test_admin import checkpoint
from tests.server.gateway.admin.test_trainers import adapter
from tests.weightsync.codes import refused
from weightsync import Adapter, Publisher, SlotReader
from weightsync.adapters.trl import CLIENT, PublishCallback, _Client, use
from weightsync.errors import PublishError

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
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):  # before it waits for a group
        client.init_communicator("cpu")
    with pytest.raises(Exception, match="RemotePublisher") as refused:
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {"world_size": 2}})
    assert "hotswap weights push" in str(refused.value)


@pytest.mark.engine
def test_tokens_in_and_out_and_rendering_answer_there_too(client: Any, live: LiveServer) -> None:
    body = {"model": live.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    rendered = client._post(f"{client.base_url}/v1/chat/completions/render", json=body)
    body = {"token_ids": rendered["token_ids"], "sampling_params": {"max_tokens": TOKENS, "temperature": 0}}
    told = client._post(f"{client.base_url}/inference/v1/generate", json=body)
    assert told["choices"][0]["token_ids"] == [101] * TOKENS


@pytest.mark.engine
def test_it_reads_the_settings_of_the_engine(client: Any, live: LiveServer) -> None:
    told = client.get_server_info()
    model, (listed,) = told["model_config"], httpx.get(f"{live.url}/v1/models").json()["data"]
    assert (model["logprobs_mode"], model["max_logprobs"], model["dtype"]) == ("raw_logprobs", 20, "torch.bfloat16")
    assert (model["served_model_name"], model["max_model_len"]) == (live.name, listed["max_model_len"])
    assert told["parallel_config"] == dict.fromkeys(openapi.SETTINGS["parallel_config"], 1)
    assert told["lora_config"] is None  # it runs without --enable-lora


@pytest.mark.engine
def test_an_update_by_its_verbs_is_a_swap(client: Any, live: LiveServer, checkpoints: dict[str, Path]) -> None:
    before = live.active()
    with client.weight_update():
        update = {"update_info": {"checkpoint_path": str(checkpoints["say-2"])}}
        client._post(f"{client.base_url}/update_weights", json=update)
    assert live.active() > before
    assert client.generate(["3+4="], max_tokens=TOKENS)["completion_ids"] == [[102] * TOKENS]
    assert live.rollback() == before


# its trainers, with the publisher that `use` gives them --------------------------------------------------------------


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(ids[0] % 7) for ids in completion_ids]


@pytest.fixture
def settings(
    live: LiveServer, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A trainer's arguments on a CPU, and its model and data; the publisher of the served model is in use."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    importlib.import_module(CLIENT)  # else `use` would import it, and nothing would undo what it replaces there
    for name in [name for name in sys.modules if name.startswith("trl.")]:
        if "VLLMClient" in vars(sys.modules[name]):
            monkeypatch.setattr(sys.modules[name], "VLLMClient", vars(sys.modules[name])["VLLMClient"])
    live.push(checkpoints["a"])
    publisher = Publisher(live.processes.store, model=live.name, lineage="trl")
    use(publisher)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["a"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    common = {
        "output_dir": str(tmp_path), "max_steps": 2, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "logging_steps": 1, "disable_tqdm": True,
        "gradient_checkpointing": False,
    }  # fmt: skip
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": live.url, "max_completion_length": 8}
    yield SimpleNamespace(
        arguments=common | server | {"num_generations": 4},
        model=AutoModelForCausalLM.from_pretrained(checkpoints["a"], dtype=torch.float32),
        data=Dataset.from_dict({"prompt": ["3+4=", "1+1="] * 4}),
        tokenizer=tokenizer,
        publisher=publisher,
    )
    publisher.close()
    live.push(checkpoints["say-1"])  # which the tests of the client ask


def assert_served(publisher: Publisher, model: Any) -> None:
    """The served tensors have the bits of the trainer's float32 in the served dtype."""
    active = publisher.active()
    assert active is not None
    (record,) = [version for version in publisher.versions() if version.version == active.version]
    with SlotReader.open(Path(record.slot), manifest_digest=record.manifest_digest) as reader:
        for name, value in model.named_parameters():
            dtype = getattr(torch, reader.entry(name).dtype)
            assert dtype != torch.float32
            assert bytes(reader.buffer(name)) == value.detach().to(dtype).view(torch.uint8).numpy().tobytes(), name


@pytest.mark.engine
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_trainer_takes_two_steps(live: LiveServer, settings: Any, name: str) -> None:
    """Each synchronisation is a version; what is served afterwards is what the trainer has, in the served dtype."""
    import trl

    config = getattr(trl, f"{name}Config")(**settings.arguments)
    trainer = getattr(trl, f"{name}Trainer")(
        model=settings.model, args=config, reward_funcs=lengths, train_dataset=settings.data,
        processing_class=settings.tokenizer,
    )  # fmt: skip
    before = live.active()
    trainer.train()
    assert live.active() == before + 2
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)
    trainer.vllm_generation.sync_weights()
    assert_served(settings.publisher, trainer.model)


@pytest.mark.engine
def test_a_trainer_that_sends_tensor_by_tensor(live: LiveServer, settings: Any) -> None:
    """OnlineDPO's way. An update that fails half-way publishes nothing, and lets the other processes go on."""
    client = sys.modules["trl.generation.vllm_client"].VLLMClient(base_url=live.url)
    client.init_communicator(device="cpu")
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "raw_logprobs"
    before = live.active()

    def end_half_way() -> None:
        with client.weight_update():
            client.update_named_param("lm_head.weight", torch.ones(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        end_half_way()
    left = iter([("lm_head.weight", torch.ones(1)), *settings.model.named_parameters()])
    with refused("shape_mismatch"):
        client.update_named_params([], left)
    assert (next(left, None), live.active()) == (None, before)
    with client.weight_update():
        for name, tensor in settings.model.named_parameters():
            client.update_named_param(name, tensor.data.mul_(1.5))
    client.reset_prefix_cache()
    assert live.active() > before
    assert_served(settings.publisher, settings.model)
    client.model = "another"
    with pytest.raises(PublishError, match="model='another'"):
        client.init_communicator(0)


@pytest.mark.engine
def test_any_trainer_publishes_by_a_callback(live: LiveServer, settings: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = {name: value for name, value in settings.arguments.items() if "vllm" not in name}
    for name in ("max_completion_length", "num_generations"):
        del arguments[name]
    before = live.active()
    trainer = SFTTrainer(
        model=settings.model, args=SFTConfig(**arguments | {"max_steps": 3}), processing_class=settings.tokenizer,
        train_dataset=Dataset.from_dict({"text": ["3+4=7", "1+1=2"] * 4}),
        callbacks=[PublishCallback(settings.publisher, every=2)],
    )  # fmt: skip
    trainer.train()
    steps = {record.version: record.step for record in settings.publisher.versions()}
    assert [steps.get(version) for version in range(before + 1, live.active() + 1)] == [2, 3]
    assert_served(settings.publisher, trainer.model)


def test_a_callback_publishes_an_adapter_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    told: list[Any] = []
    publisher: Any = SimpleNamespace(publish=lambda what, **about: told.append((what, about)))
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"], r=1))
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    callback = PublishCallback(publisher, every=4, adapter="mine")
    callback.on_step_end(None, state, None, model=model)
    callback.on_train_end(None, state, None, model=model)  # the same step
    ((adapter, about),) = told
    assert isinstance(adapter, Adapter)
    assert about == {"part": "lora/mine", "step": 4, "timeout_s": 600.0}
    callback.on_step_end(None, SimpleNamespace(global_step=5, is_world_process_zero=True), None, model=model)
    callback.on_step_end(None, SimpleNamespace(global_step=8, is_world_process_zero=False), None, model=model)
    assert len(told) == 1
    with pytest.raises(PublishError, match="adapter=NAME"):
        PublishCallback(publisher).on_train_end(None, state, None, model=model)
    with pytest.raises(PublishError, match="from 1 on"):
        PublishCallback(publisher, every=0)


def test_the_methods_that_are_replaced_are_there() -> None:
    from trl.generation.vllm_client import VLLMClient

    stock = getattr(VLLMClient, "hotswap_stock", VLLMClient)
    replaced = {name for name in vars(_Client) if not name.startswith("_") and callable(getattr(_Client, name))}
    assert len(replaced) == 7
    for name in replaced:
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (stock, _Client))
        assert list(theirs.parameters) == list(ours.parameters), name
    weights = {name for name in calls(stock) if "weight" in name or "communicator" in name or "param" in name}
    assert weights - replaced == {"update_model_params"}, "which calls update_named_params"


@pytest.fixture(scope="module", params=ASYNCHRONOUS)
def asynchronous(request: pytest.FixtureRequest, served: Served) -> Any:
    return stubs.load(installed("trl"), [request.param], stubs.TRL)[0].VLLMClient(served.admin)


def test_an_asynchronous_trainer_swaps_weights(asynchronous: Any, served: Served, tmp_path: Path) -> None:
    client, before = asynchronous, len(served.toy.committed)
    client.wait_for_server_ready()
    assert (client.get_max_model_len(), client.get_world_size()) == (128, 1)
    told = client.get_server_info()
    assert (told["lora_config"], told["parallel_config"]["data_parallel_size"]) == (None, 1)  # select_adapter_sync's
    if "get_dtype" in calls(type(client)):
        assert client.get_dtype() == told["model_config"]["dtype"] == CONFIG["model_config"]["dtype"]
    client.init_weight_transfer_engine({})
    client.pause()
    client.start_weight_update()
    client.update_weights({"checkpoint_path": checkpoint(tmp_path / "one")})
    client.finish_weight_update()
    client.resume()
    client.load_lora_adapter("policy-1", adapter(tmp_path / "adapter"))
    client.unload_lora_adapter("policy-1")
    client.unload_lora_adapter("nobody")  # it does not read the answer
    assert len(served.toy.committed) == before + 1, "an adapter costs no swap"
    phases = {"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"}
    rest = {
        "wait_for_server_ready",
        "get_max_model_len",
        "get_world_size",
        "pause",
        "resume",
        "unload_lora_adapter",
        "load_lora_adapter",
    }
    assert calls(type(client)) - {"get_dtype"} == phases | rest | {"get_server_info"}
