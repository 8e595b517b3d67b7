"""A version as a Hugging Face checkpoint: what transformers and PEFT make of it is what was published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loadtest.models.checkpoints import make_checkpoint
from tests.weightsync.codes import refused
from weightsync import Publisher, SyncStore
from weightsync.control.parts import Adapter
from weightsync.control.records import DiskRecord, Keys
from weightsync.errors import PersistError
from weightsync.persist.disk import Disk
from weightsync.persist.export import export
from weightsync.publish.checkpoint import read_config
from weightsync.push import push

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny model with tied embeddings in bf16, as `save_pretrained` leaves it, and a tokenizer."""
    return make_checkpoint(tmp_path / "source", tie_word_embeddings=True)


def logits(directory: Path) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        found: torch.Tensor = loaded(torch.arange(16)[None]).logits
    return found


@pytest.mark.parametrize("shard_nbytes", [5 << 30, 4096])
def test_a_round_trip_gives_the_same_logits(source: Path, store_url: str, tmp_path: Path, shard_nbytes: int) -> None:
    version = push(source, store=store_url, model="demo", activate=False)
    target = tmp_path / "out" / "model"
    done = export(store_url, "demo", version, target, shard_nbytes=shard_nbytes)
    assert (target / "model.safetensors.index.json").exists() == (shard_nbytes == 4096)
    assert torch.equal(logits(target), logits(source))
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in target.iterdir()}
    assert done.tensors == len(load_file(source / "model.safetensors"))
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert push(target, store=store_url, model="demo", activate=False) == version + 1  # and it can be pushed again


def test_a_version_that_is_on_disk_alone(source: Path, store_url: str, arena_directory: Path, tmp_path: Path) -> None:
    version = push(source, store=store_url, model="demo", activate=False)
    with Publisher(store_url, model="demo") as publisher:
        (record,) = publisher.versions()
    disk = Disk(tmp_path / "copies")
    disk.write(record, {"": Path(record.slot)}, [])
    Path(record.slot).unlink()
    with refused("unknown_version"):
        export(store_url, "demo", version, tmp_path / "out")
    store = SyncStore(store_url)
    store.put(Keys("demo").disk(""), DiskRecord("", str(disk.directory), (1,), 1, 0.0).to_json())
    store.close()
    export(store_url, "demo", version, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(source))


def test_an_adapter_is_exported_as_peft_has_it(store_url: str, publisher: Publisher, tmp_path: Path) -> None:
    adapter = {"base_model.model.q_proj.lora_A.weight": torch.full((2, 8), 1.5, dtype=torch.bfloat16)}
    base = {"w": torch.zeros(3)}
    version = publisher.publish(base, parts={"lora/math": Adapter(adapter, CONFIG)}, activate=False)
    export(store_url, "demo", version, tmp_path / "out", part="lora/math")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert stored.keys() == adapter.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in adapter.items())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == CONFIG
    with refused("bad_part", match="lora/math"):
        export(store_url, "demo", version, tmp_path / "other", part="draft")


def test_the_configuration_is_the_versions(source: Path, store_url: str, tmp_path: Path) -> None:
    """Of which the model's directory knows nothing."""
    push(source, store=store_url, model="demo", activate=False)
    other = shutil.copytree(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (other / "config.json").write_text(json.dumps(config))
    (other / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (other / "chat_template.jinja").write_text("{{ another }}")
    version = push(other, store=store_url, model="demo", activate=False)
    export(store_url, "demo", version, tmp_path / "out", model_dir=source)
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ another }}"
    assert read_config(tmp_path / "out") == read_config(other)


def test_nothing_is_overwritten_or_left_half(source: Path, store_url: str, tmp_path: Path) -> None:
    version = push(source, store=store_url, model="demo", activate=False)
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    (full / "mine").write_text("kept")
    for taken in (full, full / "mine"):
        with pytest.raises(PersistError, match="not an empty directory"):
            export(store_url, "demo", version, taken)
    assert (full / "mine").read_text() == "kept"
    with refused("unknown_version"):
        export(store_url, "demo", 9, empty)
    assert not empty.exists()
    shutil.move(source / "config.json", tmp_path / "config.json")
    with pytest.raises(PersistError, match="--model-dir"):
        export(store_url, "demo", version, empty)
    empty.mkdir()
    shutil.move(tmp_path / "config.json", source / "config.json")
    export(store_url, "demo", version, empty, model_dir=source)
    assert (empty / "config.json").exists()
