"""A push under other names than the served model's is refused with what helps, before anything is claimed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.weightsync.tensors import model, read_back, save_safetensors
from weightsync import Adapter, Publisher, SlotReader
from weightsync.errors import CheckpointError, TensorError
from weightsync.format.naming import advice
from weightsync.publish.succession import Succession
from weightsync.push import push

CONFIG = {"model_type": "llama"}
NAMES = [*model(), "lm_head.weight"]
PREFIXES = {
    "module.": "`model.module`, or pass strip='module.'",
    "_orig_mod.": "`model._orig_mod`, or pass strip='_orig_mod.'",
    "module._orig_mod.": "`model.module._orig_mod`, or pass strip='module._orig_mod.'",
    "base_model.model.": "pass strip='base_model.model.' (`hotswap weights push --strip base_model.model.`)",
    "policy.": "pass strip='policy.'",
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("way", ["publish", "with a configuration", "generator"])
def test_names_behind_a_prefix(publisher: Publisher, prefix: str, way: str) -> None:
    publisher.publish(model(1), activate=False)
    tensors = {prefix + name: tensor for name, tensor in model(2).items()}
    more = {"config": CONFIG} if way == "with a configuration" else {}
    given = iter(tensors.items()) if way == "generator" else tensors
    with pytest.raises(TensorError) as refused:
        publisher.publish(given, onto=1, activate=False, **more)
    assert PREFIXES[prefix] in str(refused.value)
    assert refused.value.tensor in tensors
    assert "config.json" not in str(refused.value), "no engine can be started with such names"
    assert [v.version for v in publisher.versions()] == [1]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_is_stripped_on_request(publisher: Publisher, store_url: str, prefix: str, tmp_path: Path) -> None:
    publisher.publish(model(1), activate=False)
    wrapped = {prefix + name: tensor for name, tensor in model(2).items()}
    publisher.publish(iter(wrapped.items()), strip=prefix, activate=False)
    mixed = model(2) | {prefix + "model.norm.weight": model(2)["model.norm.weight"]}
    del mixed["model.norm.weight"]
    publisher.publish(mixed, strip=prefix, activate=False)
    save_safetensors(tmp_path / "model.safetensors", wrapped)
    push(tmp_path, strip=prefix, store=store_url, model="demo", activate=False)
    sent = Succession("demo").take(wrapped, strip=prefix)
    for record in publisher.versions()[1:]:
        assert {name: tensor.tobytes() for name, tensor in read_back(record).items()} == {
            name: tensor.tobytes() for name, tensor in model(2).items()
        }
    assert sent.schema.tensors.keys() == model().keys()


def test_an_adapter_keeps_its_names(publisher: Publisher) -> None:
    lora = {"base_model.model.q_proj.lora_A.weight": np.zeros((2, 8), np.float32)}
    parts = {"lora/x": Adapter(lora, {"r": 2})}
    publisher.publish(model(1), parts=parts, strip="base_model.model.", activate=False)
    (part,) = publisher.versions()[-1].parts
    with SlotReader.open(Path(part.slot)) as reader:
        assert set(reader.manifest.tensors) == set(lora)


def test_the_names_of_a_model_with_an_adapter_inside() -> None:
    inside = [f"base_model.model.{name.replace('mlp', 'mlp.base_layer')}" for name in NAMES]
    said = advice([*inside, "base_model.model.model.layers.0.mlp.lora_A.default.weight"], NAMES)
    assert "merge_and_unload" in said
    assert "from_peft" in said


def test_names_with_something_between() -> None:
    compiled = [name.replace("mlp", "_orig_mod.mlp") for name in NAMES]
    assert "get_model_state_dict" in advice(compiled, NAMES)
    sharded = [f"_fsdp_wrapped_module.{name.replace('mlp', '_fsdp_wrapped_module.mlp')}" for name in NAMES]
    assert "get_model_state_dict" in advice(sharded, NAMES)


def test_names_that_lack_a_prefix(publisher: Publisher) -> None:
    publisher.publish(model(1), activate=False)
    tensors = {name.removeprefix("model."): tensor for name, tensor in model(2).items()}
    with pytest.raises(TensorError, match=r"calls it 'model\.embed_tokens\.weight': publish all of the model"):
        publisher.publish(tensors, onto=1, config=CONFIG, activate=False)
    assert "all of the model" in advice([name.removeprefix("model.") for name in NAMES], NAMES)


def test_other_models_have_names_of_their_own(publisher: Publisher) -> None:
    """A head of its own, more layers, a quantisation, a head that predicts more tokens."""
    for more in (["lm_head.bias"], ["model.layers.9.mlp.weight"], ["mtp.model.norm.weight", "mtp.lm_head.weight"]):
        assert not advice([*NAMES, *more], NAMES)
    assert not advice([name.replace("weight", "qweight") for name in NAMES], NAMES)
    assert not advice(NAMES, NAMES)
    assert not advice([], NAMES)
    publisher.publish(model(1), activate=False)
    publisher.publish(model(2, layers=3), onto=1, config=CONFIG, activate=False)
    assert publisher.versions()[-1].form


def test_files_that_do_not_belong_to_a_checkpoint_are_named(
    tmp_path: Path, publisher: Publisher, store_url: str
) -> None:
    publisher.publish(model(1), activate=False)
    save_safetensors(tmp_path / "model-1.safetensors", {"model.norm.weight": model(2)["model.norm.weight"]})
    rest = {name: tensor for name, tensor in model(2).items() if name != "model.norm.weight"}
    save_safetensors(tmp_path / "model-2.safetensors", rest)
    (tmp_path / "config.json").write_bytes(orjson.dumps(CONFIG))
    state = {f"state.{i}.exp_avg": np.zeros(3, np.float32) for i in range(4)}
    save_safetensors(tmp_path / "optimizer.safetensors", state)
    lora = {"base_model.model.q_proj.lora_A.weight": np.zeros((2, 8), np.float32)}
    save_safetensors(tmp_path / "adapter_model.safetensors", lora)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors, optimizer\.safetensors besides"):
        push(tmp_path, store=store_url, model="demo", activate=False)
    assert len(publisher.versions()) == 1
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "optimizer.safetensors").unlink()
    push(tmp_path, store=store_url, model="demo", activate=False)
    save_safetensors(tmp_path / "more.safetensors", {"lm_head.weight": model()["model.embed_tokens.weight"]})
    save_safetensors(tmp_path / "model-1.safetensors", {"model.norm.weight": np.zeros(16, np.float32)})
    push(tmp_path, store=store_url, model="demo", activate=False)  # another form, of another shape
