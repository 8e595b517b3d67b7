"""Cases about what ranks tell each other, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import os
import socket
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from tests.trainer.batches import sampled_batch
from tests.trainer.cases import engine
from trainer.batch import MASK, Fields
from trainer.config import ParallelConfig
from trainer.megatron import passes
from trainer.megatron.parallel import broadcast_json, distributed, is_rank_zero, on_rank_zero


def lead_takes_longer_than_a_collective_may(timeout_s: float) -> dict[str, Any]:
    """The lead alone enters collectives of the groups that compute: each fails when its time is over, while the others
    wait for rank 0."""
    world = dist.get_world_size()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = torch.tensor([free.getsockname()[1]])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(port))
    failed: list[str] = []

    def work() -> list[str]:
        for group in (dist.group.WORLD, ps.get_data_parallel_group()):
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except RuntimeError as error:
                failed.append(str(error))
        return failed

    with distributed(ParallelConfig(data=world), seed=0, timeout_s=timeout_s):
        broadcast_json(None)
        began = time.monotonic()
        told = broadcast_json(on_rank_zero(work))
        return {"told": told, "waited_s": time.monotonic() - began, "lead": is_rank_zero()}


def received_in_a_step(path: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Bytes of tensors that reach this rank in a GRPO step of eight rows with a reference, and the rows it trains."""
    config = {"algorithm": {"name": "grpo", "kl_coef": 0.1}, "gateway": {"url": "http://unused"}, "micro_batch": 2}
    nbytes, rows, scatter, run = [0], [0], dist.scatter, passes.run

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nbytes[0] += tensor.nbytes
        return scatter(tensor, *args, **kwargs)

    def trained(chunks: Any, config: Any, micro_batches: list[Fields], reduce: Any, **how: Any) -> Any:
        rows[0] += 0 if how["forward_only"] else sum(len(batch[MASK]) for batch in micro_batches)
        return run(chunks, config, micro_batches, reduce, **how)

    with (
        engine({"model": {"path": path}, "parallel": parallel} | config) as built,
        patch.object(dist, "scatter", counted),
        patch("trainer.megatron.engine.run", trained),
    ):
        stats = built.step(sampled_batch(built.shape.vocab) if is_rank_zero() else {})
        return {"nbytes": nbytes[0], "rows": rows[0], "loss": stats.loss}
