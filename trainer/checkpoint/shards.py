"""A model's and its optimizer's shards: taken at one moment, written later by another thread, read back without trust.

Taking is collective: the ranks plan together who writes what, with torch's planner, and copy their shards into host
memory. Writing is not: each rank writes its own file in the `torch_dist` format and tells where in it every shard lies;
rank 0 makes the index of that. Megatron's own asynchronous writer forks and starts manager processes, which outlive a
killed rank.

Reading runs nothing that lies in the directory. torch keeps the index (`.metadata`) as a pickle and unpickles whatever
the index calls bytes. A writer of the directory can write both, and the manifest's digests as well, which tell damage
and not intent. Here the index is made of the classes alone that an index is made of; bytes must first pass torch's
weights-only unpickler; and a shard lies in the directory itself or nowhere.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.errors import ResumeError
from trainer.megatron import releases
from trainer.megatron.parallel import control
from weightsync.memory.pinned import pinned

Piece = list[Any]
"""[name, offset or None, index or None, file, first byte, bytes]: where a shard lies; JSON."""
INDEX = ".metadata"


class Buffers:
    """Host memory for copies of shards, kept from one checkpoint to the next: fresh pages would cost more than the
    copy. Pinned where shards are on a GPU, and as large as these: torch's own would be powers of two."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, MetadataIndex], torch.Tensor] = {}

    def copy(self, owner: str, index: MetadataIndex, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, complete after `synchronize`."""
        kept = self._tensors.get((owner, index))
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            memory, _ = pinned(tensor.nbytes, tensor.device)
            kept = memory.view(tensor.dtype).view(tensor.shape)
            self._tensors[owner, index] = kept
        return kept.copy_(tensor, non_blocking=tensor.is_cuda)

    @staticmethod
    def synchronize() -> None:
        torch.cuda.synchronize()


class StagedTensors:
    """One sharded state dict, taken but not yet written. Without `buffers` it refers to the live tensors, so that it
    must be written before they change. `directory` exists and is empty. Taking is collective."""

    def __init__(self, directory: Path, owner: str, buffers: Buffers | None) -> None:
        self._writer = _Later(directory, owner, buffers)

    def take(self, state: dict[str, Any]) -> StagedTensors:
        """Megatron's shards; its small files are written at once, by rank 0."""
        dist_checkpointing.save(state, str(self._writer.path), _Take(self._writer))
        return self

    def take_dtensors(self, state: dict[str, torch.Tensor]) -> StagedTensors:
        """DTensors, as torch cuts them."""
        dcp.save(state, storage_writer=self._writer, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
        return self

    def write(self) -> list[Piece]:
        """Write and flush this rank's file. No communication."""
        return [_piece(result) for result in self._writer.write()]

    def finish(self, pieces: list[Piece]) -> None:
        """Rank 0: write the index of all ranks' pieces."""
        self._writer.index([_result(piece) for piece in pieces])


class _Take(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """The strategy that Megatron calls with the shards."""

    def __init__(self, writer: _Later) -> None:
        super().__init__("torch_dist", 1)
        self._writer = writer

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        keyed, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            torch_dist.mcore_to_pyt_state_dict(keyed, False),
            storage_writer=self._writer,
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class _Later(dcp.FileSystemWriter):  # type: ignore[misc]
    """torch's file writer, stopped between planning and writing."""

    def __init__(self, directory: Path, owner: str, buffers: Buffers | None) -> None:
        super().__init__(directory, thread_count=1, sync_files=True, per_thread_copy_ahead=0)
        self._owner, self._buffers = owner, buffers
        self._plan: Any = None
        self._data: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self._metadata: Any = None

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """torch calls this: keep the data instead."""
        self._plan = plan
        self._data = {item.index: self._taken(item.index, planner.resolve_data(item)) for item in plan.items}
        if self._buffers is not None:
            self._buffers.synchronize()
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: Any) -> None:
        """torch calls this on the coordinator: keep what the index will be made of."""
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        results: list[WriteResult] = super().write_data(self._plan, self).value()
        self._data.clear()
        return results

    def resolve_data(self, item: Any) -> torch.Tensor | io.BytesIO:
        """The method of a planner that `write_data` calls."""
        return self._data[item.index]

    def index(self, results: list[WriteResult]) -> None:
        super().finish(self._metadata, [results])

    def _taken(self, index: MetadataIndex, data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
        if self._buffers is None or isinstance(data, io.BytesIO):
            return data
        return self._buffers.copy(self._owner, index, data.detach())


def _piece(result: WriteResult) -> Piece:
    index, stored = result.index, result.storage_data
    offset = list(index.offset) if index.offset is not None else None
    return [index.fqn, offset, index.index, stored.relative_path, stored.offset, stored.length]


def _result(piece: Piece) -> WriteResult:
    name, offset, number, file, first, length = piece
    index = MetadataIndex(name, offset, number)
    return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(file, first, length))


def load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Read into the shards that `state` describes. Collective. Raises ResumeError for files that are none of ours."""
    with releases.reading_with(CheckedReader), refusing(directory):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory), *releases.load_strategies())
    return loaded


def lead_makes(directory: Path) -> None:
    """Rank 0 makes the directory, and the others wait for it."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier(group=control())


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
    """The index in file `path`. Runs none of it. Raises ResumeError when the file is no index."""
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
    """torch's error for a file that is not to be read becomes a ResumeError, on every rank when one could not."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refusal(directory, error) from None
    except dcp.CheckpointException as error:
        first = next((wrapped[0] for wrapped in error.failures.values()), error)
        raise (first if isinstance(first, ResumeError) else _refusal(directory, first)) from None


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
