"""Checkpoints are read strictly: what is not exactly a checkpoint is refused, with the file and the tensor named. The
command that publishes them is run as users and the gateway run it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import save_file

from tests.weightsync.tensors import model, read_back, save_safetensors, write_raw
from trainer.megatron.hf_files import HfTensors
from weightsync import Publisher
from weightsync.control.forms import TEMPLATE
from weightsync.control.records import VersionRecord
from weightsync.errors import CheckpointError, StalePublisher, StoreUnavailable
from weightsync.format.manifest import TensorSpec
from weightsync.publish.checkpoint import INDEX, Checkpoint, read_config, read_header, write_config
from weightsync.push import main
from weightsync.push import push as pushed

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


SHARD_FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SECOND_SHARD = ["model.layers.2.mlp.weight", "model.layers.3.mlp.weight", "model.norm.weight"]


def sharded(path: Path) -> dict[str, np.ndarray]:
    """A checkpoint in two shards with an index."""
    tensors = model(1.5, layers=4)
    first = sorted(tensors.keys() - SECOND_SHARD)
    parts = dict(zip(SHARD_FILES, (first, SECOND_SHARD), strict=True))
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
        ({"a": F32 | {"dtype": ["F32"]}}, b"x" * 8, "'a' is ['F32'], which cannot be carried"),
        ({"a": F32 | {"dtype": {"F32": 1}}}, b"x" * 8, "which cannot be carried"),
        ({"a": F32 | {"shape": {"2": 2}}}, b"x" * 8, "not a natural number"),
        ({"a": F32 | {"shape": [2**62, 2**62]}}, b"x" * 8, "takes"),
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


@pytest.mark.parametrize(
    ("names", "problem", "tensor"),
    [
        ([], "missing", None),
        (SECOND_SHARD[1:], "in the index but not in this shard", "model.layers.2.mlp.weight"),
    ],
)
def test_a_shard_with_other_tensors(tmp_path: Path, names: list[str], problem: str, tensor: str | None) -> None:
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    if names:
        save_safetensors(shard, dict.fromkeys(names, np.zeros(1, np.float32)))
    with pytest.raises(CheckpointError, match=rf"00002-of-00002.*{problem}") as refused:
        Checkpoint(tmp_path)
    assert refused.value.tensor == tensor


@pytest.mark.parametrize("file", SHARD_FILES)
def test_the_index_says_which_tensor_of_a_shard_is_meant(tmp_path: Path, publisher: Publisher, file: str) -> None:
    tensors, stale = sharded(tmp_path), model(9.0, layers=4) | {"stray": np.zeros(1, np.float32)}
    meant = {name: t for name, t in tensors.items() if (name in SECOND_SHARD) == (file == SHARD_FILES[1])}
    save_safetensors(tmp_path / file, stale | meant)
    assert HfTensors(tmp_path).shapes.keys() == tensors.keys()
    found = publish(publisher, Checkpoint(tmp_path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], tensor)
        assert np.array_equal(HfTensors(tmp_path).get(name).numpy(), tensor)


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


@pytest.mark.parametrize("part", ["", "draft"])
def test_an_adapter_that_is_pushed_as_another_part_is_told_from_a_damaged_checkpoint(tmp_path: Path, part: str) -> None:
    save_safetensors(tmp_path / "adapter_model.safetensors", {"w": np.zeros(1, np.float32)})
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    with pytest.raises(CheckpointError, match=r"holds an adapter: push it with --part lora/NAME"):
        pushed(tmp_path, part=part, store="sqlite:///nowhere/s.db", model="m")
    (tmp_path / "config.json").write_text("{}")  # a model that has an adapter beside it
    with pytest.raises(StoreUnavailable):
        pushed(tmp_path, part=part, store="sqlite:///nowhere/s.db", model="m")


def push_adapter(path: Path) -> None:
    assert main(["--store", "sqlite:///nowhere/s.db", "--model", "m", "--part", "lora/x", str(path)]) == 1


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("model.safetensors", Checkpoint),
        (INDEX, Checkpoint),
        ("model.safetensors", lambda path: Checkpoint(path / "model.safetensors")),
        ("adapter_config.json", push_adapter),
    ],
)
def test_a_fifo_is_refused_and_blocks_nobody(tmp_path: Path, file: str, read: Callable[[Path], object]) -> None:
    if file == "adapter_config.json":
        save_safetensors(tmp_path / "adapter_model.safetensors", {"w": np.zeros(1, np.float32)})
    os.mkfifo(tmp_path / file)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, tmp_path)
        try:
            if read is push_adapter:
                reading.result(60)
            else:
                with pytest.raises(CheckpointError, match="not a regular file"):
                    reading.result(60)
        finally:  # who reads it all the same gets nothing, instead of keeping the test for ever
            os.close(os.open(tmp_path / file, os.O_RDWR | os.O_NONBLOCK))


def test_links_lead_out_of_a_checkpoint_only_within_the_hub_cache(tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.safetensors"
    save_safetensors(outside, model())
    for name in ("plain", "snapshots/0123abcd"):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "model.safetensors").symlink_to(outside)
        with pytest.raises(CheckpointError, match="link out of its directory"):
            Checkpoint(directory)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    outside.rename(blobs / "8f3e")
    link = tmp_path / "snapshots/0123abcd/model.safetensors"
    link.unlink()
    link.symlink_to("../../blobs/8f3e")
    assert Checkpoint(link.parent).schema.tensors.keys() == model().keys()
    inside = tmp_path / "plain/model.safetensors"
    inside.unlink()
    (tmp_path / "plain/data").write_bytes((blobs / "8f3e").read_bytes())
    inside.symlink_to("data")
    (tmp_path / "link").symlink_to("plain")
    assert Checkpoint(tmp_path / "link").schema.tensors.keys() == model().keys()


def test_a_folder_of_a_hub_repository_is_read_from_its_own_model_s_blobs(tmp_path: Path, store_url: str) -> None:
    mine, other = tmp_path / "models--org--one", tmp_path / "models--org--two"
    config = orjson.dumps({"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]})
    for home in (mine, other):
        (home / "blobs").mkdir(parents=True)
        save_safetensors(home / "blobs/8f3e", {"w": np.zeros(1, np.float32)})
        (home / "blobs/c0de").write_bytes(config)
    save_safetensors(tmp_path / "blobs", {"w": np.zeros(1, np.float32)})
    base = tmp_path / "base"
    base.mkdir()
    save_safetensors(base / "model.safetensors", model())
    for folder in ("checkpoint-500", "adapters/math", "snapshots/math"):
        directory = mine / "snapshots/0123abcd" / folder
        directory.mkdir(parents=True)
        for name, blob in (("adapter_model.safetensors", "8f3e"), ("adapter_config.json", "c0de")):
            (directory / name).symlink_to(os.path.relpath(mine / "blobs" / blob, directory))
        pushed(directory, part="lora/x", parts={"": base}, store=store_url, model="demo", activate=False)
        for outside in (other / "blobs/8f3e", tmp_path / "blobs", mine / "snapshots/0123abcd/8f3e"):
            if not outside.exists():
                save_safetensors(outside, model())
            (directory / "adapter_model.safetensors").unlink()
            (directory / "adapter_model.safetensors").symlink_to(outside)
            with pytest.raises(CheckpointError, match="link out of its directory"):
                Checkpoint(directory)


@pytest.mark.parametrize("file", ["model.safetensors", INDEX])
def test_messages_have_nothing_of_a_file_that_is_no_checkpoint(tmp_path: Path, file: str) -> None:
    secret = b"root:$6$"
    (tmp_path / file).write_bytes(secret + b"salt$hash:19000:0:99999:7:::\n" * 9)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(tmp_path)
    said = str(refused.value).replace(str(tmp_path), "").replace(",", "")
    number = int.from_bytes(secret, "little")
    assert str(number) not in said
    assert "root" not in said


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_safetensors(path / "model.safetensors", model(3.0))
    return path


def push(*arguments: object) -> tuple[int, Any]:
    command = [sys.executable, "-m", "weightsync.push", "--json", "--model", "demo", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, timeout=240, check=False)
    return run.returncode, json.loads(run.stdout)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"a": 1}},
        {"config.json": {"a": 1}, "generation_config.json": {"eos_token_id": 1}, "chat_template.jinja": "{{ x }}"},
    ],
)
def test_a_configuration_is_written_as_it_was_read(tmp_path: Path, files: dict[str, Any]) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    for name, content in files.items():
        (tmp_path / "one" / name).write_text(content if isinstance(content, str) else json.dumps(content))
        (tmp_path / "other" / name).symlink_to(tmp_path / "one" / name)
    read = read_config(tmp_path / "one")
    assert read is not None
    write_config(read.replace("1", "2").replace("x", "y"), tmp_path / "other")
    for name, content in files.items():
        text = (tmp_path / "other" / name).read_text()
        assert text == (content if isinstance(content, str) else json.dumps(content)).replace("1", "2").replace(
            "x", "y"
        )
    assert read_config(tmp_path / "one") == read, "links are no way to the files that they name"


def test_the_template_of_a_tokenizers_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert json.loads(read_config(tmp_path) or "") == {TEMPLATE: "old"}
    (tmp_path / "chat_template.jinja").write_text("new")  # as transformers, which writes this one
    assert json.loads(read_config(tmp_path) or "") == {TEMPLATE: "new"}


def test_a_checkpoint_becomes_a_version(checkpoint: Path, store_url: str) -> None:
    status, done = push("--store", store_url, "--no-activate", "--step", 7, checkpoint)
    assert (status, done["version"], done["active"], done["tensors"]) == (0, 1, False, 4)
    with Publisher(store_url, model="demo") as publisher:
        (record,) = publisher.versions()
        assert (record.step, record.source, record.publisher) == (7, str(checkpoint), "push")
        assert read_back(record)["model.norm.weight"][0] == 3.0


def test_a_small_checkpoint_needs_no_large_import(checkpoint: Path, store_url: str) -> None:
    code = (
        "import sys; from weightsync.push import main; done = main(sys.argv[1:]); print(*sys.modules); sys.exit(done)"
    )
    arguments = ["--store", store_url, "--model", "demo", "--no-activate", "--json", str(checkpoint)]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=240, check=True)
    loaded = set(run.stdout.decode().splitlines()[-1].split())
    assert "numpy" in loaded
    assert not loaded & {"numba", "torch", "transformers", "vllm", "safetensors"}


def test_a_waiting_process_gets_its_options_later(checkpoint: Path, store_url: str) -> None:
    command = [sys.executable, "-m", "weightsync.push", "--wait"]
    arguments = ["--store", store_url, "--model", "demo", "--no-activate", "--json", str(checkpoint)]
    run = subprocess.run(command, input=json.dumps(arguments) + "\n", capture_output=True, timeout=240, text=True)
    assert (run.returncode, json.loads(run.stdout)["version"]) == (0, 1)
    assert subprocess.run(command, input="", capture_output=True, timeout=240, text=True).returncode == 0


def test_what_goes_wrong_is_typed(checkpoint: Path, store_url: str, tmp_path: Path) -> None:
    status, done = push("--store", store_url, "--no-activate", tmp_path / "nowhere")
    assert (status, done["error"]["code"], done["version"]) == (1, "checkpoint_error", None)
    status, done = push("--store", f"sqlite://{tmp_path}/none.db", checkpoint)
    assert (status, done["error"]["code"]) == (1, "store_unavailable")
    status, done = push("--store", store_url, "--timeout", 0.2, checkpoint)  # nobody is there to swap it in
    assert (status, done["error"]["code"], done["version"]) == (1, "swap_timeout", 1)


def test_a_checkpoint_that_does_not_fit_names_the_tensor(
    checkpoint: Path, publisher: Publisher, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher.publish(model(width=16), activate=False)
    assert main(["--store", store_url, "--model", "demo", "--json", str(checkpoint)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["tensor"]) == ("shape_mismatch", "model.embed_tokens.weight")
    assert [v.version for v in publisher.versions()] == [1]


def test_an_upload_given_to_two_processes_at_once_becomes_one_version(
    checkpoint: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look for a version of the upload before either has claimed one."""
    once: dict[str, Any] = {"upload_id": "one", "store": store_url, "model": "demo", "activate": False}

    class Overtaken(Publisher):
        def versions(self) -> list[VersionRecord]:
            found = super().versions()
            if not found:
                monkeypatch.setattr("weightsync.push.Publisher", Publisher)
                assert pushed(checkpoint, **once) == 1
            return found

    monkeypatch.setattr("weightsync.push.Publisher", Overtaken)
    with pytest.raises(StalePublisher):
        pushed(checkpoint, **once)
    with Publisher(store_url, model="demo") as reader:
        assert [v.version for v in reader.versions()] == [1]


def test_people_get_sentences(checkpoint: Path, store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", store_url, "--model", "demo", "--no-activate", str(checkpoint)]) == 0
    assert capsys.readouterr().out.startswith("version 1 is ready: 4 tensors")
    assert main(["--store", store_url, "--model", "demo", str(checkpoint / "x")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
