"""Cases about what ranks tell each other, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from trainer.config import ParallelConfig
from trainer.megatron.parallel import broadcast_json, distributed, is_lead, lead


def lead_takes_longer_than_a_collective_may(timeout_s: float) -> dict[str, Any]:
    """The lead alone enters collectives of the groups that compute: each fails when its time is over, while the others
    wait for the lead."""
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
        told = broadcast_json(lead(work))
        return {"told": told, "waited_s": time.monotonic() - began, "lead": is_lead()}
