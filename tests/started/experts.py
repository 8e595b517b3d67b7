"""Experts that data-parallel ranks share, on a CPU: the two collectives that vLLM's communicator for CPUs lacks, and
the map of experts that its kernels ignore.

With what the ranks exchange in every layer travels the version that each runs. A step in which two of them differ
writes a line to DIRECTORY/torn; DIRECTORY/PID has the versions of a rank's exchanges, one line for each new one. With
expert parallelism DIRECTORY/mapped has the numbers of the experts that lie in each rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DIRECTORY = "HOTSWAP_TEST_EXPERTS"
COMMUNICATOR, BACKEND = "vllm.distributed.device_communicators.cpu_communicator", "weightsync.vllm_engine.backend"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_live = 0
_noted = -1
_mapped = False


def share(communicators: Any) -> None:
    """Give vLLM's communicator for CPUs, which its module has, what a mixture of experts needs of it."""
    communicators.CpuCommunicator.all_gatherv = all_gatherv
    communicators.CpuCommunicator.reduce_scatterv = reduce_scatterv


def follow(backend: Any) -> None:
    """Know from each commit of a worker, whose class is in `backend`, the version that it runs."""
    commit = backend.HotswapWeightTransferEngine.commit

    def committed(self: Any, version: int) -> Any:
        global _live
        answer = commit(self, version)
        _live = version
        return answer

    backend.HotswapWeightTransferEngine.commit = committed


def map_experts(kernels: Any) -> None:
    """Have the experts of vLLM's module honour the map of those that lie in this rank. The kernels take the number of
    an expert among all for one among their own."""
    apply = kernels.CPUUnquantizedExperts.apply

    def mapped(self: Any, **options: Any) -> None:
        if (places := options["expert_map"]) is not None:
            _note(places)
            here = places[options["topk_ids"]]
            options["topk_weights"] = options["topk_weights"].masked_fill(here < 0, 0.0)
            options["topk_ids"] = here.clamp(min=0).to(options["topk_ids"].dtype)
        apply(self, **options)

    kernels.CPUUnquantizedExperts.apply = mapped


def _note(places: Any) -> None:
    global _mapped
    if not _mapped:
        _mapped = True
        with (Path(os.environ[DIRECTORY]) / "mapped").open("a") as file:
            file.write(f"{(places >= 0).nonzero().flatten().tolist()}\n")


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, of which each has `sizes` (default: as many as this one)."""
    import torch
    import torch.distributed as dist

    if isinstance(input_, list):
        return [all_gatherv(self, part, dim, sizes) for part in input_]
    assert dim == 0
    _compare(self)
    rows = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks."""
    import torch.distributed as dist

    assert dim == 0
    whole = input_.clone()
    dist.all_reduce(whole, group=self.device_group)
    rows = sizes or [len(whole) // self.world_size] * self.world_size
    start = sum(rows[: self.rank_in_group])
    return whole[start : start + rows[self.rank_in_group]].clone()


def _compare(communicator: Any) -> None:
    import torch
    import torch.distributed as dist

    global _noted
    tag = torch.tensor([_live])
    tags = [torch.empty_like(tag) for _ in range(communicator.world_size)]
    dist.all_gather(tags, tag, group=communicator.device_group)
    versions, directory = [int(each) for each in tags], Path(os.environ[DIRECTORY])
    if len(set(versions)) > 1:
        with (directory / "torn").open("a") as file:
            file.write(f"{versions}\n")
    if versions[0] != _noted:
        _noted = versions[0]
        with (directory / str(os.getpid())).open("a") as file:
            file.write(f"{_noted}\n")
