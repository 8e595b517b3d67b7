"""What training really holds, for the ranks of tests/trainer/ranks.py to measure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from tests.trainer.batches import random_batch


def measured(path: str, parallel: dict[str, Any], rows: int = 2, length: int = 64, **config: Any) -> dict[str, int]:
    """Bytes of this rank: weights, gradients, optimizer (after a step), and what one micro-batch keeps for its
    backward pass."""
    from tests.trainer.cases import engine

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
