"""Each reader of users' checkpoints notices a file that is replaced or written anew in the middle of its read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from server.follow.sources import FollowError, verify
from tests.weightsync.tensors import model, save_safetensors
from trainer.errors import ModelError
from trainer.megatron.hf_files import HfTensors
from weightsync import Publisher
from weightsync.errors import CheckpointError
from weightsync.publish.checkpoint import Checkpoint
from weightsync.publish.quantize import Quantizer, quantize_checkpoint
from weightsync.push import push, push_edition

ROOT = Path(__file__).parents[3]
SHARD = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_safetensors(directory / SHARD, model(1))
    sums = hashlib.sha256((directory / SHARD).read_bytes()).hexdigest()
    (directory / "SHA256SUMS").write_text(f"{sums}  {SHARD}\n")
    return directory


def replaced(directory: Path) -> None:
    save_safetensors(directory / "new", model(2))
    (directory / "new").rename(directory / SHARD)


def rewritten(directory: Path) -> None:
    """In place, with a time of its own: two writes within a tick of the kernel have one."""
    save_safetensors(directory / SHARD, model(2))
    os.utime(directory / SHARD, ns=(1, 1))


def configured(directory: Path) -> None:
    (directory / "config.json").write_text('{"rope_theta": 1}')


def amid(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, change: Callable[[], None]) -> None:
    """Has the files change when they are first read by `where.name`."""
    read, waiting = getattr(where, name), [change]

    def reading(*arguments: Any, **named: Any) -> Any:
        found = read(*arguments, **named)
        if waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(where, name, reading)


def publish(directory: Path, url: str) -> None:
    with Publisher(url, model="demo") as publisher:
        publisher.publish(Checkpoint(directory).tensors(), activate=False)


def push_it(directory: Path, url: str) -> None:
    push(directory, store=url, model="demo", activate=False)


def push_adapter(directory: Path, url: str) -> None:
    push(directory, part="lora/x", parts={"": directory}, store=url, model="demo", activate=False)


def push_an_edition(directory: Path, url: str) -> None:
    with Publisher(url, model="demo") as publisher:
        if not publisher.versions():
            publisher.publish(model(), activate=False)
    push_edition(directory, "x", store=url, model="demo")


def glance(directory: Path, _: str) -> None:
    Checkpoint(directory).glance()


def follow(directory: Path, _: str) -> None:
    verify(directory, "config.json")


def quantize(directory: Path, _: str) -> None:
    quantize_checkpoint(directory, directory.parent / "quantised", Quantizer("fp8"))


def train(directory: Path, _: str) -> None:
    tensors = HfTensors(directory)
    for name in model():
        os.fstat(0)
        tensors.get(name)


READERS: dict[str, tuple[Callable[[Path, str], None], Any, str, type[Exception]]] = {
    "publish": (publish, os, "preadv", CheckpointError),
    "push": (push_it, os, "preadv", CheckpointError),
    "push-adapter": (push_adapter, os, "preadv", CheckpointError),
    "push-edition": (push_an_edition, os, "preadv", CheckpointError),
    "glance": (glance, os, "pread", CheckpointError),
    "follow": (follow, hashlib, "file_digest", FollowError),
    "quantize": (quantize, safetensors.torch, "load_file", CheckpointError),
    "train": (train, os, "fstat", ModelError),
}


CHANGES = (replaced, rewritten, configured)


@pytest.mark.parametrize(
    ("reader", "change"),
    [(name, change) for name in READERS for change in CHANGES if (name, change) != ("train", configured)],
)
def test_a_file_that_changes_is_noticed(
    reader: str, change: Callable[[Path], None], checkpoint: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "adapter_config.json").write_text('{"r": 2}')
    read, where, name, error = READERS[reader]
    read(checkpoint, store_url)
    for left in (checkpoint.parent / "quantised").glob("*"):
        left.unlink()
    amid(monkeypatch, where, name, lambda: change(checkpoint))
    with pytest.raises(error, match="changed while it was read"):
        read(checkpoint, store_url)


# Where files with weights are opened. The others read what this project has written itself, or a header at one go.
OWN = {
    "weightsync/persist/disk.py": "the copies that it wrote",
    "weightsync/persist/export.py": "files beside the weights, which have no version",
    "weightsync/vllm_engine/loader.py": "by `Checkpoint.opened`, and the names alone",
    "server/doctor/checks/memory.py": "names and shapes",
    "server/doctor/plan.py": "names and shapes",
    "server/instance/sidecar.py": "names and shapes",
    "server/up/resume.py": "by `Checkpoint.glance`",
    "trainer/api/sampling.py": "the adapters that it wrote",
    "trainer/api/states.py": "the states that it wrote",
    "trainer/main.py": "by `HfTensors`",
    "trainer/long2short.py": "by `HfTensors`",
    "trainer/api/__main__.py": "by `HfTensors`",
    "trainer/api/tenants.py": "by `HfTensors`",
    "trainer/megatron/roles.py": "by `HfTensors`",
}
TESTED = {
    "weightsync/publish/checkpoint.py",
    "weightsync/publish/quantize.py",
    "weightsync/push.py",
    "server/follow/sources.py",
    "trainer/megatron/hf_files.py",
}


def test_no_other_reader_opens_weights() -> None:
    opens = re.compile(r"(?<!def )(?<!class )\b(?:safe_open|load_file|open_inside|Checkpoint|HfTensors|FileTensor)\(")
    found = set()
    for package in ("weightsync", "server", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            if opens.search(path.read_text()):
                found.add(str(path.relative_to(ROOT)))
    assert found - OWN.keys() - TESTED == {"trainer/api/finetuning/run.py"}, "its Checkpoint is a record of a job"
    assert (OWN.keys() | TESTED) - found == set()
