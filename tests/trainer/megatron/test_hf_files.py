"""An export that takes the place of another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.megatron.hf_files import INDEX, finish_checkpoint, write_shards


def export(directory: Path, value: float, parts: int) -> None:
    """Two tensors of that value, written by so many ranks."""
    tensors = [("a", torch.full((2,), value)), ("b", torch.full((2,), value))]
    written = [w for part in range(parts) for w in write_shards(directory, tensors[part::parts], part)]
    finish_checkpoint(directory, written, directory.parent / "like", "float32")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_no_weights_of_the_one_before_are_left(tmp_path: Path, before: int, after: int) -> None:
    """A loader that finds `model.safetensors` looks at no index, and reads every shard when there is none."""
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text("{}")
    target = tmp_path / "export"
    target.mkdir()
    save_file({"c": torch.zeros(1)}, str(target / "model-00007-00000.safetensors"))
    export(target, 1.0, before)
    export(target, 2.0, after)
    found = {name: t.tolist() for file in target.glob("*.safetensors") for name, t in load_file(file).items()}
    assert found == {"a": [2.0, 2.0], "b": [2.0, 2.0]}
    files = {file.name for file in target.glob("*.safetensors")}
    if after == 1:
        assert files == {"model.safetensors"}
        assert not (target / INDEX).exists()
    else:
        assert set(json.loads((target / INDEX).read_text())["weight_map"].values()) == files
