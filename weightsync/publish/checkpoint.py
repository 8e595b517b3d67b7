"""Reads Hugging Face checkpoint directories without torch: strict safetensors headers, shards, and nothing guessed.

Others have filled the directory, so only regular files are opened, and none from outside of it. A FIFO would block its
reader, a device never end, and a link could lead to any file of this host. Links inside the directory are followed, and
those of the Hugging Face hub's cache, whose snapshots/REVISION/ and folders below link to blobs/ beside snapshots/.

The format (huggingface/safetensors, README "Format"): 8 bytes header length, little-endian; that many bytes of JSON,
`{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}`; then the data, without holes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from weightsync.control.forms import GENERATION, TEMPLATE
from weightsync.errors import CheckpointError
from weightsync.format.dtypes import FROM_SAFETENSORS
from weightsync.format.manifest import Schema, TensorSpec, diff_schema, is_derived
from weightsync.publish.writer import FileTensor
from weightsync.steady import changed, states


def open_inside(path: Path) -> int:
    """A descriptor of the regular file at `path`, for reading. Raises CheckpointError, never blocks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror}): fetch the checkpoint again") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(str(path), "is not a regular file: a checkpoint's files must be")
        real, home = Path(os.readlink(f"/proc/self/fd/{fd}")), path.parent.resolve()
        if not any(real.is_relative_to(allowed) for allowed in _allowed(home)):
            raise CheckpointError(str(path), "is a link out of its directory: put the file itself there")
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_inside(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes. Raises CheckpointError."""
    with open(open_inside(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(str(path), f"has over {most:,} bytes: is this the right file?")
    return data


def _allowed(home: Path) -> list[Path]:
    return [home, *(above.parent / "blobs" for above in home.parents if above.name == "snapshots")]


MAX_CONFIG = 4 << 20


def read_config(directory: Path) -> str | None:
    """Its config.json as text, with generation_config.json and the chat template as further fields (GENERATION,
    TEMPLATE) where there are such; None if it has no config.json. Raises CheckpointError."""
    config = _json_of(directory / "config.json")
    if isinstance(config, dict):
        generation = _json_of(directory / "generation_config.json")
        tokenizer = _json_of(directory / "tokenizer_config.json")
        template: Any = tokenizer.get("chat_template") if isinstance(tokenizer, dict) else None
        if (path := directory / "chat_template.jinja").exists():
            template = read_inside(path, MAX_CONFIG).decode(errors="replace")
        config |= {GENERATION: generation} if isinstance(generation, dict) else {}
        config |= {TEMPLATE: template} if isinstance(template, str) else {}
    return None if config is None else json.dumps(config, sort_keys=True)  # with Infinity, as transformers


def write_config(text: str, directory: Path) -> None:
    """The files that `read_config` has read, over those that are there. Raises OSError."""
    config = json.loads(text)
    generation, template = config.pop(GENERATION, None), config.pop(TEMPLATE, None)
    files = {"config.json": json.dumps(config, sort_keys=True)}
    files |= {"generation_config.json": json.dumps(generation, sort_keys=True)} if generation is not None else {}
    files |= {"chat_template.jinja": template} if template is not None else {}
    for name, content in files.items():
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_text(content)


def _json_of(path: Path) -> Any:
    """None if the file is not there. Raises CheckpointError."""
    if not path.exists():
        return None
    try:
        return json.loads(read_inside(path, MAX_CONFIG))
    except ValueError as error:
        raise CheckpointError(str(path), f"not JSON ({error}): fetch the checkpoint again") from None


MAX_HEADER = 100 << 20  # as upstream
INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "adapter_config.json")
GLANCE = 4096


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its spec, and its first and last byte (exclusive) in the file."""

    spec: TensorSpec
    begin: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, checked to be all of the file, without holes or overlaps.

    Raises CheckpointError, whose message has nothing of a file that is not safetensors.
    """
    fd = open_inside(path)
    with open(fd, "rb") as file:
        try:
            size = os.fstat(fd).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _damaged(path, f"its header claims more bytes than there are ({size:,}), or than a header has")
            raw = file.read(length)
        except OSError as error:
            raise CheckpointError(
                str(path), f"cannot be read ({error.strerror}): fetch the checkpoint again"
            ) from error
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _damaged(path, f"its header is not JSON (character {error.pos})") from None
    if not isinstance(document, dict):
        raise _damaged(path, "its header is not a JSON object")
    document.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in document.items()}
    _check_coverage(path, tensors, 8 + length, size)
    return tensors


class Checkpoint:
    """All tensors of a checkpoint directory (or of one file), by name; derived ones (`is_derived`) only if `whole`.
    `strip` is taken away where a name begins with it. Raises CheckpointError, for files that change while they are
    read, too."""

    def __init__(self, path: Path | str, *, whole: bool = False, strip: str = "") -> None:
        self.path, self._whole, self._strip = Path(path), whole, strip
        beside = [self.path / name for name in (INDEX, *CONFIGS)] if self.path.is_dir() else []
        self._before = states(beside)
        self._files = _shards(self.path)
        self._before |= states(self._files)
        self._home: dict[str, Path] = {}
        self._stored: dict[str, StoredTensor] = {}
        for file, expected in self._files.items():
            self._add(file, read_header(file), expected)
        if not self._stored:
            raise CheckpointError(str(self.path), "holds no tensors: is this the right directory?")

    @property
    def schema(self) -> Schema:
        return Schema({name: stored.spec for name, stored in self._stored.items()})

    def tensors(self) -> Iterator[tuple[str, FileTensor]]:
        """Every tensor, file by file in the order of its bytes; each is valid until the next one is taken."""
        for file, names in self.files().items():
            yield from _read(file, {name: self._stored[name] for name in names})
        self.check()

    def files(self) -> dict[Path, list[str]]:
        """The files, and the names of the tensors that are read from each."""
        return {file: [name for name, home in self._home.items() if home == file] for file in self._files}

    def strays(self, served: Schema | None) -> list[str]:
        """The files without which it would have the tensors that are `served`, if no index says that they belong."""
        if served is None or (self.path / INDEX).exists():
            return []
        strays = [file for file, names in self.files().items() if not served.tensors.keys() & names]
        rest = {n: stored.spec for n, stored in self._stored.items() if self._home[n] not in strays}
        return [file.name for file in strays] if not diff_schema(served, Schema(rest)) else []

    def check(self) -> None:
        """Raises CheckpointError if a file is another one than when this object was made, or was written since."""
        if (path := changed(self._before)) is not None:
            problem = "changed while it was read: begin again when the checkpoint is written"
            raise CheckpointError(str(path), problem)

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, FileTensor]]:
        """Every tensor by name, all valid for as long as the context lasts."""
        with contextlib.ExitStack() as stack:
            fds = {}
            for file in self._files:
                fds[file] = open_inside(file)
                stack.callback(os.close, fds[file])
            yield {
                name: FileTensor(stored.spec, fds[self._home[name]], stored.begin, str(self._home[name]))
                for name, stored in self._stored.items()
            }
            self.check()

    def glance(self) -> str:
        """A digest of names, dtypes and shapes, and of how each tensor begins and ends: it tells checkpoints apart
        without reading all of them, but for changes inside of tensors alone. Raises CheckpointError."""
        with self.opened() as tensors:
            found = hashlib.blake2b(digest_size=16)
            for name, tensor in sorted(tensors.items()):
                found.update(repr((name, tensor.spec.dtype, tensor.spec.shape)).encode())
                size = min(GLANCE, tensor.spec.nbytes)
                for begin in (tensor.begin, tensor.begin + tensor.spec.nbytes - size):
                    found.update(os.pread(tensor.fd, size, begin))
            return found.hexdigest()

    def _add(self, file: Path, found: Mapping[str, StoredTensor], expected: set[str] | None) -> None:
        for name in sorted((expected or set()) - found.keys()):
            raise CheckpointError(str(file), f"tensor {name!r} is in the index but not in this shard", tensor=name)
        for name, stored in found.items():
            if expected is not None and name not in expected:
                continue  # an older one, as a rule: the index says which is meant
            name = name.removeprefix(self._strip)
            if name in self._home:
                raise CheckpointError(str(file), f"tensor {name!r} is in {self._home[name].name} too", tensor=name)
            if self._whole or not is_derived(name, stored.spec.shape):
                self._home[name], self._stored[name] = file, stored


def _shards(path: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, and what the index, if there is one, says each holds."""
    if not path.exists():
        raise CheckpointError(str(path), "no such file or directory: pass a checkpoint directory with *.safetensors")
    if not path.is_dir():
        return {path: None}
    if (path / INDEX).exists():
        return dict(_indexed(path))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(str(path), "has no *.safetensors: convert the checkpoint to safetensors first")
    return dict.fromkeys(files)


def _indexed(path: Path) -> dict[Path, set[str] | None]:
    index = path / INDEX
    try:
        weight_map: Any = orjson.loads(read_inside(index, MAX_HEADER))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = "not JSON" if isinstance(error, ValueError) else "it has no `weight_map` of names"
        raise CheckpointError(str(index), f"not an index ({what}): fetch the checkpoint again") from None
    shards: dict[Path, set[str] | None] = {}
    for file in sorted(set(names.values())):
        if "/" in file or file in ("", ".", "..") or not (path / file).exists():
            raise CheckpointError(str(path / file), "this shard of the index is missing: fetch the checkpoint again")
        shards[path / file] = {name for name, home in names.items() if home == file}
    return shards


def _stored(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"tensor {name!r} needs dtype, shape and data_offsets", name) from error
    if any(type(n) is not int or n < 0 for n in numbers):
        raise _damaged(path, f"tensor {name!r} has a shape or offset that is not a natural number", name)
    if not isinstance(code, str) or code not in FROM_SAFETENSORS:
        raise CheckpointError(str(path), f"tensor {name!r} is {code}, which cannot be carried", tensor=name)
    spec = TensorSpec(FROM_SAFETENSORS[code], tuple(shape))
    if end - begin != spec.nbytes:
        raise _damaged(path, f"tensor {name!r} of {code} {shape} takes {spec.nbytes}, not {end - begin} bytes", name)
    return StoredTensor(spec, data + begin, data + end)


def _check_coverage(path: Path, tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    end = data
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != end:
            raise _damaged(path, f"tensor {name!r} does not begin where the one before it ends", name)
        end = stored.end
        if end > size:
            raise _damaged(path, f"it is cut off inside tensor {name!r} ({size:,} of at least {end:,} bytes)", name)
    if end != size:
        raise _damaged(path, f"{size - end:,} bytes after its last tensor belong to none")


def _read(file: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, FileTensor]]:
    """Keeps the file open for as long as the iteration lasts."""
    fd = open_inside(file)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for name, stored in sorted(tensors.items(), key=lambda item: item[1].begin):
            yield name, FileTensor(stored.spec, fd, stored.begin, str(file))
    finally:
        os.close(fd)


def _damaged(path: Path, problem: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(str(path), f"damaged or not safetensors: {problem}; fetch it again", tensor=tensor)
