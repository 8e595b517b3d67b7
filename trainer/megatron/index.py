"""Reading a checkpoint's tensors without trusting whoever wrote them: nothing that lies in the directory is ever run.

torch keeps the index (`.metadata`) as a pickle and unpickles whatever the index calls bytes. Who can write the
directory can write both, and the manifest's digests as well, which tell damage and not intent. Here the index is made
of the classes alone that an index is made of; bytes must first pass torch's weights-only unpickler; and a shard lies in
the directory itself or nowhere.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import _StorageInfo

from trainer.errors import ResumeError

INDEX = ".metadata"
_CLASSES = (
    parts.Metadata,
    parts.MetadataIndex,
    parts.StorageMeta,
    parts.TensorStorageMetadata,
    parts.BytesStorageMetadata,
    parts.ChunkStorageMetadata,
    parts.TensorProperties,
    parts._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    PosixPath,
)
_ADMITTED: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}
_ADMITTED |= {("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_ADMITTED["torch.serialization", "_get_layout"] = lambda _: torch.strided  # the only one there is here


def _member(kind: Any, name: Any) -> Any:
    """As which Python before 3.11.4 pickles a member of an enumeration; nothing else is looked up by name."""
    if kind is not parts._MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise pickle.UnpicklingError("it looks up an attribute, which no index does")
    return parts._MEM_FORMAT_ENCODING[name]


_ADMITTED["builtins", "getattr"] = _member


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index contains")
        return _ADMITTED[module, name]


def read_index(path: Path) -> parts.Metadata:
    """The index in file `path`. Raises ResumeError when it is anything else, without having run any of it."""
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        _check(found)
    except Exception as error:  # a broken pickle may raise anything
        raise _refusal(path, error) from None
    return found


class CheckedReader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader of a checkpoint directory, for directories that somebody else may have written. Raises
    ResumeError when the index is none."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._index = read_index(Path(path) / INDEX)

    def read_metadata(self, *_: Any, **__: Any) -> parts.Metadata:
        return self._index

    def read_data(self, plan: Any, planner: Any) -> Any:
        """As torch does; what is not a tensor is looked through first. Raises ResumeError."""
        original = planner.load_bytes

        def load_bytes(item: Any, value: io.BytesIO) -> None:
            try:
                torch.load(value, weights_only=True)
            except Exception as error:
                raise _refusal(Path(self.path) / item.storage_index.fqn, error) from None
            value.seek(0)
            original(item, value)

        planner.load_bytes = load_bytes
        return super().read_data(plan, planner)


@contextlib.contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """What torch says when a file is not to be read, or on every rank when one of them could not, becomes a
    ResumeError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refusal(directory, error) from None
    except dcp.CheckpointException as error:
        first = next((wrapped[0] for wrapped in error.failures.values()), error)
        raise (first if isinstance(first, ResumeError) else _refusal(directory, first)) from None


@contextlib.contextmanager
def checked_readers() -> Iterator[None]:
    """Megatron reads through `CheckedReader` within the body; it has no setting for that."""
    original = torch_dist._get_filesystem_reader
    torch_dist._get_filesystem_reader = lambda path, cache_metadata=False: CheckedReader(path)
    try:
        yield
    finally:
        torch_dist._get_filesystem_reader = original


def _check(index: Any) -> None:
    """Raises TypeError or ValueError."""
    if not isinstance(index, parts.Metadata) or not isinstance(index.storage_data, dict):
        raise TypeError(f"it holds a {type(index).__name__}")
    for where in index.storage_data.values():
        if not isinstance(where, _StorageInfo) or Path(where.relative_path).name != where.relative_path:
            raise ValueError("it points outside of the directory")


def _refusal(path: Path, error: BaseException) -> ResumeError:
    said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return ResumeError(f"{path} is not to be read: {said}. Resume from a checkpoint of your own.")
