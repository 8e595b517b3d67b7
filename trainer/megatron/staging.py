"""A model's and its optimizer's shards taken at one moment, and written to disk later by another thread.

Taking is collective: the ranks plan together who writes what, with torch's planner, and copy their shards into host
memory. Writing is not: each rank writes its own file in the `torch_dist` format and tells where in it every shard lies;
rank 0 makes the index of that. Megatron's own asynchronous writer forks and starts manager processes, which outlive a
killed rank.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.megatron.index import checked_readers, refusing

Piece = list[Any]
"""[name, offset or None, index or None, file, first byte, bytes]: where a shard lies; JSON."""


class Buffers:
    """Host memory for copies of shards, kept from one checkpoint to the next: fresh pages would cost more than the
    copy. Pinned where shards are on a GPU."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, MetadataIndex], torch.Tensor] = {}

    def copy(self, owner: str, index: MetadataIndex, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, complete after `synchronize`."""
        kept = self._tensors.get((owner, index))
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
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
    """What Megatron calls with the shards."""

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
        """Called by torch: keep the data instead."""
        self._plan = plan
        self._data = {item.index: self._taken(item.index, planner.resolve_data(item)) for item in plan.items}
        if self._buffers is not None:
            self._buffers.synchronize()
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: Any) -> None:
        """Called by torch on the coordinator: keep what the index will be made of."""
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        results: list[WriteResult] = super().write_data(self._plan, self).value()
        self._data.clear()
        return results

    def resolve_data(self, item: Any) -> torch.Tensor | io.BytesIO:
        """What `write_data` asks of a planner."""
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
    # The strategies by name: the directory is not to choose among all that Megatron has.
    how = torch_dist.TorchDistLoadShardedStrategy(), TorchCommonLoadStrategy()
    with checked_readers(), refusing(directory):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory), *how)
    return loaded


def lead_makes(directory: Path) -> None:
    """Rank 0 makes the directory, and the others wait for it."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
