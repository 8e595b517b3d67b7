"""Checkpoints are read strictly: what is not exactly a checkpoint is refused, with the file and the tensor named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import save_file

from weightsync import Publisher
from weightsync.checkpoint import INDEX, Checkpoint, read_header
from weightsync.errors import CheckpointError
from weightsync.manifest import TensorSpec

from .tensors import model, read_back, save_safetensors, write_raw

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def sharded(path: Path) -> dict[str, np.ndarray]:
    """A checkpoint in two shards with an index."""
    tensors = model(1.5, layers=4)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, part in parts.items():
        save_safetensors(path / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (path / INDEX).write_bytes(orjson.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tensors


def publish(publisher: Publisher, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    with publisher.begin(checkpoint.schema) as draft:
        for name, tensor in checkpoint.tensors():
            draft.write(name, tensor)
        draft.commit()
    return read_back(publisher.versions()[-1])


@pytest.mark.parametrize("layout", ["sharded", "directory", "file"])
def test_the_bytes_arrive(tmp_path: Path, publisher: Publisher, layout: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    if layout == "sharded":
        tensors = sharded(path)
    else:
        tensors = model(2.5)
        save_safetensors(path / "weights.safetensors", tensors)
        path = path / "weights.safetensors" if layout == "file" else path
    found = publish(publisher, Checkpoint(path))
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def test_what_the_real_library_writes(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn]
    tensors = {str(d).removeprefix("torch."): torch.zeros(3, 2).to(d) for d in dtypes}
    tensors["scalar"], tensors["empty"] = torch.tensor(1.0), torch.zeros(0, 5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    specs = Checkpoint(tmp_path).schema.tensors
    assert specs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert specs[name] == TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        ({"a": F32}, b"x" * 7, "cut off inside tensor 'a'"),
        ({"a": F32}, b"", "cut off inside tensor 'a'"),
        ({"a": F32}, b"x" * 9, "1 bytes after its last tensor"),
        ({"a": F32 | {"shape": [3]}}, b"x" * 8, "'a' of F32 [3] takes 12, not 8 bytes"),
        ({"a": F32 | {"dtype": "F4"}}, b"x" * 8, "'a' is F4, which cannot be carried"),
        ({"a": F32 | {"shape": [-2]}}, b"x" * 8, "not a natural number"),
        ({"a": F32 | {"shape": [2.0]}}, b"x" * 8, "not a natural number"),
        ({"a": F32 | {"data_offsets": [4, 12]}}, b"x" * 12, "does not begin where"),
        ({"a": F32 | {"data_offsets": [8, 0]}}, b"x" * 8, "takes 8, not -8"),
        ({"a": F32, "b": F32}, b"x" * 8, "does not begin where"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"x" * 8, "needs dtype, shape and data_offsets"),
        ({"a": F32 | {"data_offsets": [0]}}, b"x" * 8, "needs dtype, shape and data_offsets"),
        ({"a": [1]}, b"x" * 8, "needs dtype, shape and data_offsets"),
        ([], b"", "not a JSON object"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: Any, data: bytes, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, orjson.dumps(header), data)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(tmp_path)
    assert problem in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("header", "length", "problem"),
    [(b"{}", 1 << 40, "claims"), (b"{}", 3, "claims"), (b"{x}", None, "not JSON"), (b"\xff\xfe", None, "not JSON")],
)
def test_headers_that_are_not_headers(tmp_path: Path, header: bytes, length: int | None, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header, b"", length)
    with pytest.raises(CheckpointError, match=problem):
        read_header(path)


@pytest.mark.parametrize("nbytes", [0, 5, 8, 100])
def test_a_file_cut_off_anywhere(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(path, model())
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(CheckpointError, match=r"claims|cut off"):
        Checkpoint(tmp_path)


def test_a_file_cut_off_while_it_is_read(tmp_path: Path, publisher: Publisher) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(path, model())
    checkpoint = Checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        publish(publisher, checkpoint)
    assert publisher.versions() == []


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*missing"):
        Checkpoint(tmp_path)


def test_a_tensor_of_the_index_that_no_shard_has(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"model.norm.weight": np.zeros(8, np.float32)})
    with pytest.raises(CheckpointError, match="in the index but not in this shard") as refused:
        Checkpoint(tmp_path)
    assert refused.value.tensor == "model.layers.2.mlp.weight"


def test_a_tensor_that_the_index_does_not_know(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    names = sorted(tensors)[3:]
    extra = {name: tensors[name] for name in names} | {"stray": np.zeros(1, np.float32)}
    save_safetensors(tmp_path / "model-00002-of-00002.safetensors", extra)
    with pytest.raises(CheckpointError, match="'stray' is in this shard but not in the index"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_safetensors(tmp_path / file, {"w": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"'w' is in a\.safetensors too"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("index", [b"", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"w": "../../etc/passwd"}}'])
def test_an_index_that_is_none(tmp_path: Path, index: bytes) -> None:
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)


def test_directories_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="convert the checkpoint"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        Checkpoint(tmp_path / "nowhere")
    write_raw(tmp_path / "model.safetensors", b"{}", b"")
    with pytest.raises(CheckpointError, match="no tensors"):
        Checkpoint(tmp_path)
