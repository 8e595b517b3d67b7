"""Keys that are read of a mixture's config.json, what is refused in it, which layouts a model can have; and an export
that takes the place of another."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.config import ParallelConfig
from trainer.errors import ConfigError, ModelError
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.megatron.hf_files import INDEX, HfTensors, finish_checkpoint, write_shards


def written(model: str, directory: Path, **changes: Any) -> Path:
    config = json.loads((Path(model) / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_mixture_is_read_as_it_is_stored(models: dict[str, str]) -> None:
    for name, normalize, ffn in (("mixtral", True, 64), ("qwen3_moe", True, 48), ("qwen3_moe-raw", False, 48)):
        shape = load_shape(models[name])
        assert (shape.experts, shape.experts_per_token, shape.expert_ffn) == (4, 2, ffn)
        assert shape.normalize_router is normalize
        stored = HfTensors(models[name]).shapes
        assert {tensor: size for tensor, _, size in shape.schema("float32")} == stored


@pytest.mark.parametrize(
    ("model", "changes", "kind", "says"),
    [
        ("mixtral", {"sliding_window": 64}, ModelError, "sliding_window"),
        ("mixtral", {"router_jitter_noise": 0.1}, ModelError, "router_jitter_noise"),
        ("mixtral", {"num_experts_per_tok": 1}, ModelError, "one expert"),
        ("mixtral", {"num_experts_per_tok": 5}, ModelError, "5 of 4 experts"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ModelError, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ModelError, "decoder_sparse_step"),
        ("qwen3_moe", {"num_local_experts": None}, ModelError, "None experts"),
    ],
)
def test_what_would_change_the_numbers_is_refused(
    tmp_path: Path, path: str, changes: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        load_shape(written(path, tmp_path, **changes))


@pytest.mark.parametrize(
    ("model", "layout", "key"),
    [
        ("qwen2", {"tensor": 3}, "tensor"),
        ("qwen2", {"pipeline": 3}, "pipeline"),
        ("qwen2", {"pipeline": 2, "virtual_pipeline": 4}, "virtual_pipeline"),
        ("qwen2", {"data": 2, "expert": 2}, "expert"),
        ("mixtral", {"data": 3, "expert": 3}, "expert"),
        ("mixtral", {"tensor": 2}, "sequence"),
        ("mixtral", {"data": 2, "shard": "full"}, "shard"),
        ("qwen3_moe", {"data": 5, "expert_tensor": 5}, "expert_tensor"),
    ],
)
def test_layouts_that_a_model_cannot_have(path: str, layout: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_shape(path).check_parallel(ParallelConfig(**layout))
    assert caught.value.key == f"parallel.{key}"


def test_experts_are_spread_over_ranks_that_are_there() -> None:
    layout = ParallelConfig(tensor=2, context=2, data=2, pipeline=2, sequence=True, expert=8, expert_tensor=1)
    assert layout.world_size == 16
    assert layout.expert_tensor_size == 1
    assert ParallelConfig(tensor=4).expert_tensor_size == 4


def test_the_vocabulary_is_padded_for_its_ranks(deep: str) -> None:
    shape: ModelShape = load_shape(deep)
    assert [shape.padded_vocab(ranks) for ranks in (1, 2, 4)] == [17, 18, 20]


def export(directory: Path, value: float, parts: int) -> None:
    """Two tensors of that value, written by so many ranks."""
    tensors = [("a", torch.full((2,), value)), ("b", torch.full((2,), value))]
    written = [w for part in range(parts) for w in write_shards(directory, tensors[part::parts], part)]
    finish_checkpoint(directory, written, directory.parent / "like", "float32")


class OnDevice:
    """As much of a tensor on a GPU as an export asks of it."""

    nbytes = 8

    def __init__(self, value: float) -> None:
        self._value = value

    def detach(self) -> OnDevice:
        return self

    def contiguous(self) -> OnDevice:
        return self

    def cpu(self) -> torch.Tensor:
        return torch.full((2,), self._value)


def test_a_shard_is_collected_on_the_host(tmp_path: Path) -> None:
    """A device that holds optimizer and gradients has no room for a file's copies besides."""
    alive: list[weakref.ref[OnDevice]] = []

    def tensors() -> Iterator[tuple[str, OnDevice]]:
        for value in range(3):
            assert [ref for ref in alive[:-1] if ref() is not None] == [], "one tensor at a time"
            tensor = OnDevice(value)
            alive.append(weakref.ref(tensor))
            yield str(value), tensor
            del tensor

    ((_, file, _), *_) = write_shards(tmp_path, tensors(), 0)
    assert {name: t.tolist() for name, t in load_file(tmp_path / file).items()} == {
        str(value): [value, value] for value in range(3)
    }


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
