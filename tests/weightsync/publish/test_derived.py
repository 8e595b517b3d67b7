"""Tensors of old checkpoints that no engine reads: with or without them, a version is of the same form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, read_back, save_safetensors
from weightsync import Publisher
from weightsync.control.records import Keys
from weightsync.format.manifest import Schema, TensorSpec, diff_schema, is_derived
from weightsync.persist.disk import disk_piece, slot_piece, write_piece, write_synced
from weightsync.publish.checkpoint import Checkpoint
from weightsync.publish.succession import HostModel
from weightsync.push import push

DERIVED = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    "transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32),
    "model.layers.1.self_attn.rotary_emb.cos_cached": np.ones((1, 1, 8, 4), np.float32),
    "model.layers.1.self_attn.rotary_emb.sin_cached": np.ones((1, 1, 8, 4), np.float32),
    "transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32),
    "transformer.h.0.attn.masked_bias": np.array(-1e9, np.float32),
    "gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), np.float32),
}
READ = {
    "transformer.h.0.attn.c_attn.bias": (8,),
    "model.layers.0.attn.bias": (8,),
    "model.layers.0.attention.bias": (1, 1, 8, 4),
    "model.rotary_emb.weight": (4,),
}


def save(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    save_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_bytes(orjson.dumps({"model_type": "llama"}))
    return directory


def test_only_tables_and_masks_are_derived() -> None:
    assert all(is_derived(name, tensor.shape) for name, tensor in DERIVED.items())
    assert not any(is_derived(name, shape) for name, shape in READ.items())


@pytest.mark.parametrize("first", ["with", "without"])
def test_a_checkpoint_with_them_follows_one_without_and_the_other_way(
    tmp_path: Path, publisher: Publisher, store_url: str, first: str
) -> None:
    ways = {"with": save(tmp_path / "with", model(1) | DERIVED), "without": save(tmp_path / "without", model(2))}
    for way in sorted(ways, key=lambda way: way != first):
        push(ways[way], store=store_url, model="demo", activate=False)
    one, two = publisher.versions()
    assert one.form == two.form
    assert read_back(one).keys() == read_back(two).keys() == model().keys()
    publisher.publish(model(3) | DERIVED, activate=False)
    publisher.publish(iter((model(4) | DERIVED).items()), onto=1, activate=False)
    with publisher.begin([(n, str(t.dtype), t.shape) for n, t in (model() | DERIVED).items()]) as draft:
        for name, tensor in (model(5) | DERIVED).items():
            draft.write(name, tensor)
        draft.commit()
    assert [len(read_back(v)) for v in publisher.versions()] == [len(model())] * 5
    with publisher.begin(publisher.schema() or Schema({})) as draft, refused("unexpected_tensor"):
        draft.write("model.layers.0.attn.bias", np.ones(8, np.float32))


def test_versions_that_have_them_already_are_of_the_same_form(publisher: Publisher) -> None:
    """A program that writes a schema of its own may carry them."""
    publisher._store.put(Keys(publisher.model).config, b'{"model_type": "llama"}')
    whole = Schema({name: TensorSpec(str(t.dtype), t.shape) for name, t in (model() | DERIVED).items()})
    with publisher.begin(whole) as draft:
        for name, tensor in (model(1) | DERIVED).items():
            draft.write(name, tensor)
        draft.commit()
    publisher.publish(model(2), config={"model_type": "llama"}, activate=False)
    publisher.publish(iter(model(3).items()), activate=False)
    assert [v.form for v in publisher.versions()] == ["", "", ""]
    assert not diff_schema(whole, publisher.schema() or Schema({}))
    assert not diff_schema(publisher.schema() or Schema({}), whole)


def test_no_publisher_sends_them() -> None:
    held = HostModel()
    held.take((model() | DERIVED).items())
    assert held.rows.keys() == model().keys()


def test_a_copy_on_disk_has_what_its_slot_had(tmp_path: Path, publisher: Publisher) -> None:
    whole = Schema({name: TensorSpec(str(t.dtype), t.shape) for name, t in (model() | DERIVED).items()})
    with publisher.begin(whole) as draft:
        for name, tensor in (model(1) | DERIVED).items():
            draft.write(name, tensor)
        draft.commit()
    (record,) = publisher.versions()
    with slot_piece(Path(record.slot), record.manifest_digest) as piece:
        write_piece(tmp_path / "copy", "", piece)
        write_synced(tmp_path / "copy" / "manifest.json", piece.manifest.to_json())
    with disk_piece(tmp_path / "copy", record.manifest_digest) as piece:
        piece.verify()
    assert Checkpoint(tmp_path / "copy").schema.tensors.keys() == model().keys()
