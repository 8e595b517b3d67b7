"""Hugging Face checkpoint directories: strict lazy reading of (sharded) safetensors, and writing one back.

Reading checks every file's header against its size before any tensor is used, so that a missing or truncated shard is
named before training starts.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.errors import ModelError
from weightsync.steady import changed, states

INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
SHARD_BYTES = 4 << 30
_COPIED = ("tokenizer*", "special_tokens*", "vocab.*", "merges.txt", "chat_template*", "generation_config.json")


class HfTensors:
    """Tensors of a checkpoint directory by name. Raises ModelError, at once, for files that cannot be whole."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        files = self._files()
        self._before = states(files)
        index = self._index()
        for file in files:
            for name, shape in read_header(file).items():
                if not index or self.directory / index.get(name, "") == file:  # a shard may have older tensors besides
                    self.shapes[name], self._file_of[name] = shape, file
        self._check_index()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Any:
        """The whole tensor, on the CPU, in the file's dtype."""
        from safetensors import safe_open

        if name not in self._file_of:
            raise ModelError(f"{self.directory} has no tensor {name}. Use a complete checkpoint.")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(str(file), "pt")
        tensor = self._open[file].get_tensor(name)
        if changed({file: self._before[file]}) is not None:
            problem = "changed while it was read. Start again when the checkpoint is written."
            raise ModelError(f"{file} {problem}")
        return tensor

    def check(self, schema: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        """Raise ModelError naming the first tensor that is missing or has another shape than the model's."""
        for name, _, shape in schema:
            if name not in self:
                raise ModelError(f"{self.directory} has no tensor {name}. Use a complete checkpoint.")
            if self.shapes[name] != shape:
                problem = f"{name} has shape {list(self.shapes[name])}, config.json says {list(shape)}"
                raise ModelError(f"{self._file_of[name]}: {problem}. Use the config.json it was saved with.")

    def _files(self) -> list[Path]:
        index = self._index()
        files = sorted({self.directory / f for f in index.values()}) or sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{self.directory} has no *.safetensors file. Set model.path to a complete checkpoint.")
        return files

    def _index(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.exists():
            return {}
        try:
            mapping: dict[str, str] = json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} is not a safetensors index ({error}). Copy it again.") from None
        return mapping

    def _check_index(self) -> None:
        for name, file in self._index().items():
            if name not in self._file_of:
                path = self.directory / file
                raise ModelError(f"{path} lacks {name}, which the index puts there.")


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape from one header, checked against the file's size. Raises ModelError naming the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end != size:
            raise ValueError(f"{size} bytes on disk, the header says {end}")
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except FileNotFoundError:
        raise ModelError(f"{path} is missing. Copy the checkpoint again.") from None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{path} is damaged ({error}). Copy it again.") from None


def write_shards(directory: str | Path, tensors: Iterable[tuple[str, Any]], part: int) -> list[tuple[str, str, int]]:
    """Write `tensors` as `model-PPPPP-NNNNN.safetensors`, each at most 4 GiB. A file is collected on the host, so that
    of a device one tensor is held at a time. Returns (tensor, file, bytes) of each."""
    written: list[tuple[str, str, int]] = []
    shard: dict[str, Any] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            written += _write_shard(Path(directory), shard, part, len(written))
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous()
    return written + (_write_shard(Path(directory), shard, part, len(written)) if shard else [])


def _write_shard(directory: Path, shard: dict[str, Any], part: int, number: int) -> list[tuple[str, str, int]]:
    from safetensors.torch import save_file

    file = f"model-{part:05d}-{number:05d}.safetensors"
    save_file(shard, str(directory / file), metadata={"format": "pt"})
    return [(name, file, tensor.nbytes) for name, tensor in shard.items()]


def finish_adapter(directory: str | Path, written: list[tuple[str, str, int]], config: dict[str, Any]) -> None:
    """Make PEFT's two files of a directory that holds an adapter's shards."""
    from safetensors.torch import load_file, save_file

    target = Path(directory)
    shards = [target / file for file in sorted({file for _, file, _ in written})]
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(tensors, str(target / ADAPTER_FILE), metadata={"format": "pt"})
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    for shard in shards:
        shard.unlink()


def finish_checkpoint(directory: str | Path, written: list[tuple[str, str, int]], like: str | Path, dtype: str) -> None:
    """Complete a directory that holds its shards: index (or the usual single file name), and config and tokenizer of
    `like`. Weights that were there before are removed: a loader would take `model.safetensors` for the whole model."""
    target, source = Path(directory), Path(like)
    files = {file for _, file, _ in written}
    for stale in {path.name for path in target.glob("*.safetensors")} | {INDEX}:
        if stale not in files:
            (target / stale).unlink(missing_ok=True)
    if len(files) == 1:
        (target / files.pop()).replace(target / "model.safetensors")
    else:
        total = sum(nbytes for _, _, nbytes in written)
        index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, file, _ in written}}
        (target / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
    for pattern in _COPIED:
        for file_ in source.glob(pattern):
            shutil.copyfile(file_, target / file_.name)
