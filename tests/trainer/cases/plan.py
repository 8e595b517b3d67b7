"""What training really holds, for the ranks of tests/trainer/ranks.py to measure."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.batches import random_batch
from tests.trainer.cases import engine
from trainer.checkpoint.engine_state import StagedEngine
from trainer.checkpoint.shards import Buffers
from trainer.megatron.parallel import device


def measured(path: str, parallel: dict[str, Any], rows: int = 2, length: int = 64, **config: Any) -> dict[str, int]:
    """Bytes of this rank: weights, gradients, optimizer (after a step), and what one micro-batch keeps for its
    backward pass."""
    given = {"model": {"path": path} | config.pop("model", {}), "parallel": parallel, "micro_batch": rows}
    with engine(given | config) as built:
        fields = random_batch(built.shape.vocab, rows=rows * parallel.get("data", 1), width=length)
        kept = _kept_by(lambda: built.step(fields), built)
        role = built.roles["actor"]
        buffers = [b for chunk in role.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights = sum(p.numel() * p.element_size() for chunk in role.model for p in chunk.parameters())
        return {
            "stage": ps.get_pipeline_model_parallel_rank(),
            "parameters": sum(p.numel() for chunk in role.model for p in chunk.parameters()),
            "weights": weights,
            "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
            "optimizer": sum(t.untyped_storage().nbytes() for t in built.storages()["actor_optimizer"]),
            "kept": kept,
            "rank": dist.get_rank(),
        }


def reference_bytes(path: str, parallel: dict[str, Any]) -> int:
    """Of this rank."""
    with engine({"model": {"path": path}, "parallel": parallel, "algorithm": {"name": "dpo"}}) as built:
        return sum(t.untyped_storage().nbytes() for t in built.storages()["reference"])


def _kept_by(step: Any, built: Any) -> int:
    """Bytes of distinct storages that autograd keeps at one time, the weights aside."""
    weights = {p.untyped_storage().data_ptr() for chunk in built.model for p in chunk.parameters()}
    alive: dict[int, tuple[int, int]] = {}  # storage -> (bytes, how many saved tensors use it)
    now, peak = 0, 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal now, peak
            self.tensor, self.key = tensor, tensor.untyped_storage()._cdata
            if tensor.untyped_storage().data_ptr() in weights:
                self.key = 0
                return
            size, uses = alive.get(self.key, (tensor.untyped_storage().nbytes(), 0))
            alive[self.key] = (size, uses + 1)
            if not uses:
                now += size
                peak = max(peak, now)

        def __del__(self) -> None:
            nonlocal now
            if self.key:
                size, uses = alive.pop(self.key)
                if uses > 1:
                    alive[self.key] = (size, uses - 1)
                else:
                    now -= size

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        step()
    return peak


class _Made(TorchDispatchMode):
    """Bytes of the storages that operators have made, those that are alive and their peak."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self.alive, self.peak = known, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = _storage(tensor)
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def saving(path: str, parallel: dict[str, Any], copied: bool, **model: Any) -> int:
    """The most bytes of this rank that exist because of a checkpoint, the second of a run."""
    with engine({"model": {"path": path} | model, "parallel": parallel}) as built:
        built.step(random_batch(built.shape.vocab, rows=4))
        known = {_storage(t)._cdata for tensors in built.storages().values() for t in tensors}
        buffers = Buffers() if copied else None
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, _Made(known) as made:
            for directory in (first, second):
                StagedEngine(built, Path(directory), buffers).write()
            return made.peak


def saving_on_gpu(path: str, **model: Any) -> list[int]:
    """The bytes of the device that a checkpoint takes for a moment, and the model's parameters."""
    with engine({"model": {"path": path} | model}) as built, tempfile.TemporaryDirectory() as directory:
        fields = random_batch(built.shape.vocab, rows=4)
        built.step({name: field.to(device()) for name, field in fields.items()})
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        StagedEngine(built, Path(directory), Buffers()).write()
        parameters = sum(p.numel() for chunk in built.model for p in chunk.parameters())
        return [torch.cuda.max_memory_allocated() - held, parameters]
