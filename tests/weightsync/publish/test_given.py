"""Objects that a trainer may hand to a publisher: named tensors, an adapter of PEFT's; and what is said of others."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.weightsync.codes import refused
from weightsync import Adapter, BucketPublisher, Publisher, RemotePublisher, SlotReader
from weightsync.errors import PublishError

MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2))
NO_PAIRS = [
    (torch.nn.Linear(2, 2), "a Linear"),
    (MODEL, "a Linear"),
    (list(MODEL.parameters()), "a Parameter"),
    (torch.ones(2, 2), "a Tensor"),
    (("a.weight", np.ones(2)), "a str"),
    ({7: np.ones(2)}, "a tuple"),
    (7, "a int"),
]


@pytest.mark.parametrize(("given", "kind"), NO_PAIRS, ids=range(len(NO_PAIRS)))
@pytest.mark.parametrize("kind_of_publisher", ["local", "remote", "bucket"])
def test_what_is_no_named_tensor_is_refused_with_the_remedy(
    request: pytest.FixtureRequest, given: Any, kind: str, kind_of_publisher: str
) -> None:
    publish = request.getfixturevalue(kind_of_publisher)
    with pytest.raises(PublishError, match=rf"{kind}, not a .name, tensor.: pass model.named_parameters\(\)"):
        publish(given)


@pytest.fixture
def local(publisher: Publisher) -> Callable[..., Any]:
    publisher.publish({"a.weight": np.ones(2, np.float32)}, activate=False)
    return lambda given: publisher.publish(given, activate=False)


@pytest.fixture
def remote() -> Callable[..., Any]:
    return RemotePublisher("http://127.0.0.1:9", "a-key", "demo").publish


@pytest.fixture
def bucket(tmp_path: Path) -> Callable[..., Any]:
    return BucketPublisher(f"file://{tmp_path}/bucket", model="demo").publish


# masters in another dtype than the served one


def stored(publisher: Publisher, version: int) -> dict[str, torch.Tensor]:
    (record,) = [found for found in publisher.versions() if found.version == version]
    with SlotReader.open(Path(record.slot), manifest_digest=record.manifest_digest) as reader:
        return {
            name: torch.frombuffer(bytearray(reader.buffer(name)), dtype=getattr(torch, entry.dtype)).view(entry.shape)
            for name in ("a", "b", "count")
            for entry in [reader.entry(name)]
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_masters_are_converted_to_what_is_served(publisher: Publisher, dtype: torch.dtype) -> None:
    served = {
        "a": torch.ones(3, 5, dtype=torch.bfloat16),
        "b": torch.ones(4),
        "count": torch.zeros(2, dtype=torch.int64),
    }
    publisher.publish(served, activate=False)
    generator = torch.Generator().manual_seed(1)
    masters = {name: torch.randn(served[name].shape, generator=generator).to(dtype) for name in ("a", "b")}
    masters["count"] = torch.tensor([1, 2])
    found = stored(publisher, publisher.publish(masters.items(), activate=False, cast=True))
    for name, tensor in masters.items():
        assert torch.equal(found[name], tensor.to(served[name].dtype)), name
    arrays = {"a": masters["a"].to(torch.bfloat16), "b": masters["b"].double().numpy(), "count": masters["count"]}
    found = stored(publisher, publisher.publish(arrays, activate=False, cast=True))
    assert torch.equal(found["b"], masters["b"].double().float())


def test_no_other_dtype_is_taken_without_a_word(publisher: Publisher) -> None:
    """Nor is one converted whose numbers mean nothing without scales beside them."""
    served = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(4, dtype=torch.float8_e4m3fn)}
    publisher.publish(served, activate=False)
    with refused("dtype_mismatch", match="cast=True"):
        publisher.publish(served | {"a": torch.ones(3)}, activate=False)
    for other in (served | {"b": torch.ones(4)}, served | {"a": torch.ones(3, dtype=torch.int32)}):
        with refused("dtype_mismatch"):
            publisher.publish(other, activate=False, cast=True)
    assert len(publisher.versions()) == 1


# adapters, as PEFT has them


def peft_model(**more: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # seconds, for these tests alone
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    return get_peft_model(base, LoraConfig(r=2, target_modules={"v_proj", "q_proj"}, task_type="CAUSAL_LM", **more))


def test_an_adapter_is_taken_from_a_model_as_peft_saves_it(tmp_path: Path, publisher: Publisher) -> None:
    model = peft_model()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    publisher.publish(model.get_base_model().state_dict(), parts={"lora/x": Adapter.from_peft(model)}, activate=False)
    (part,) = publisher.versions()[-1].parts
    with SlotReader.open(Path(part.slot)) as reader:
        published = json.loads(reader.manifest.metadata["adapter_config"])
        assert set(reader.manifest.tensors) == set(load_file(tmp_path / "adapter_model.safetensors"))
    saved["target_modules"].sort()
    assert published == saved | {"inference_mode": False}


def test_a_configuration_of_pefts_own_class_is_taken_too() -> None:
    model = peft_model(modules_to_save=None, use_rslora=True)
    config = model.peft_config["default"]
    assert Adapter({}, config).metadata == Adapter.from_peft(model).metadata
    assert json.loads(Adapter({}, config.to_dict()).metadata["adapter_config"])["use_rslora"] is True


@pytest.mark.parametrize(
    ("model", "name", "said"),
    [
        (torch.nn.Linear(2, 2), "default", r"a Linear has no adapter 'default' .it has none.: .*peft.PeftModel"),
        (None, "other", r"has no adapter 'other' .it has default."),
    ],
)
def test_a_model_without_the_adapter_is_refused(model: Any, name: str, said: str) -> None:
    with refused("bad_part", match=said):
        Adapter.from_peft(model or peft_model(), name)


@pytest.mark.parametrize("config", [["r"], {"r": object()}, None])
def test_a_configuration_that_is_none_is_refused(config: Any) -> None:
    with refused("bad_part", match=r"cannot be written as JSON .*: pass what adapter_config.json holds"):
        _ = Adapter({}, config).metadata


# a publisher that was closed


def test_a_closed_publisher_says_so(publisher: Publisher) -> None:
    draft = publisher.begin([("a.weight", "float32", (2,))])
    draft.write("a.weight", np.ones(2, np.float32))
    publisher.close()
    publisher.close()
    for ask in (
        lambda: publisher.publish({"a.weight": np.ones(2, np.float32)}),
        publisher.versions,
        publisher.active,
        lambda: publisher.activate(1),
        draft.commit,
    ):
        with refused("store_closed", match="this publisher was closed: make another"):
            ask()


def test_closing_a_remote_publisher_ends_its_publication_and_all_later_ones() -> None:
    tensors = {"a.weight": np.ones(2, np.float32)}
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        with RemotePublisher("http://{}:{}".format(*listener.getsockname()), "a-key", "demo") as remote:
            publishing = pool.submit(remote.publish, tensors, activate=False)
            connection, _ = listener.accept()
            assert connection.recv(1)
        with connection, refused("store_closed"):
            publishing.result(60.0)
    remote.close()
    for ask in (lambda: remote.publish(tensors), lambda: remote.take_away(["draft"])):
        with refused("store_closed", match="this publisher was closed: make another"):
            ask()
