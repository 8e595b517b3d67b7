"""A tenant on disk: its weights and Adam's moments, in a directory that can be read in another layout.

    DIRECTORY/model-*.safetensors   each rank's share: `weight.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME` in float32,
                                    where NAME is PEFT's, or of all weights Hugging Face's
    DIRECTORY/state.json            what the adapter is like, the steps of Adam, and which file has which tensor

The second is written last: without it there is no state.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.directory import flush as sync
from trainer.config import LoraConfig
from trainer.errors import CheckpointError, ModelError
from trainer.exports import write_parts
from trainer.megatron.convert import export_hf, load_hf
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors
from trainer.megatron.lora import adapter_schema
from trainer.megatron.parallel import gather_json, on_rank_zero

STATE = "state.json"
Kinds = Mapping[str, Mapping[str, Tensor]]
"""`weight`, `exp_avg` and `exp_avg_sq` of this rank, by global Megatron names."""


def described(lora: LoraConfig | None) -> dict[str, Any] | None:
    """The settings that two tenants must share to fit each other; None: all weights."""
    if lora is None:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.target_modules)}


def lora_from(said: Mapping[str, Any] | None) -> LoraConfig | None:
    """The inverse of `described`."""
    if said is None:
        return None
    return LoraConfig(rank=said["rank"], alpha=said["alpha"], target_modules=tuple(said["targets"]))


def lora_of(directory: Path) -> LoraConfig | None:
    """The adapter that a state is of; None: of all weights. Raises CheckpointError."""
    try:
        return lora_from(_about(directory)["lora"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / STATE} cannot be read ({error!r})") from error


def write(directory: Path, kinds: Kinds, shape: ModelShape, lora: LoraConfig | None, steps: int) -> None:
    """Replace what is in `directory`. It is whole once this returns, also after a power failure. Collective. Raises
    CheckpointError."""
    fresh(directory)
    exported = (
        (f"{kind}.{name}", tensor.cpu())
        for kind, named in kinds.items()
        for name, tensor in export_hf(named.items(), shape)
    )
    written = write_parts(directory, exported, dist.get_rank())
    flush(directory)
    files = {name: file for name, file, _ in written}
    about = {"lora": described(lora), "steps": steps, "files": files}
    on_rank_zero(lambda: _replace(directory / STATE, json.dumps(about).encode()))


def read(directory: Path, kinds: Kinds, shape: ModelShape, lora: LoraConfig | None) -> int:
    """Read into the tensors of `kinds`; the steps of Adam. Collective. Raises CheckpointError on every rank when one
    cannot; nothing has changed then."""
    problem, steps = "", 0
    try:
        about = _about(directory)
        for file in set(about["files"].values()):
            if not (directory / file).exists():
                raise ValueError(f"{file} is missing")
        steps, tensors = int(about["steps"]), HfTensors(directory)
        schema = shape.schema("float32") if lora is None else adapter_schema(shape, lora, "float32")
        if described(lora) != about["lora"] or set(tensors.shapes) != about["files"].keys():
            raise ValueError("it is of another adapter")
        tensors.check((f"{kind}.{name}", dtype, size) for kind in kinds for name, dtype, size in schema)
    except (ValueError, KeyError, TypeError, ModelError, CheckpointError) as error:
        problem = f"{directory} cannot be read ({error})"
    if problem := next(filter(None, gather_json(problem)), ""):
        raise CheckpointError(problem)
    for kind, named in kinds.items():
        load_hf(named.items(), shape, functools.partial(_tensor, tensors, kind))
    return steps


def fresh(directory: Path) -> None:
    """An empty directory, for all ranks. Collective. Raises CheckpointError."""

    def make() -> None:
        with writing(directory):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)

    on_rank_zero(make)


def flush(directory: Path) -> None:
    """The files that all ranks have written there outlive a power failure. Collective. Raises CheckpointError."""

    def flushed() -> None:
        with writing(directory):
            for path in (*directory.iterdir(), directory, directory.parent):
                sync(path)

    on_rank_zero(flushed)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the disk becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}): free space, or mend the disk") from error


def settle(beside: Path, path: Path) -> None:
    """Rename a file that was written, so that it is there after a power failure."""
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def _tensor(tensors: HfTensors, kind: str, name: str) -> Tensor:
    return tensors.get(f"{kind}.{name}")


def _about(directory: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / STATE} cannot be read ({error})") from error
    return about


def _replace(path: Path, content: bytes) -> None:
    with writing(path):
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(content)
        settle(beside, path)
