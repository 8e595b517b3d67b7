"""Process groups of one run, and the few ways in which ranks talk outside Megatron's own collectives.

Objects travel as JSON and tensors as tensors; nothing is pickled. Rank 0 alone samples, talks to the gateway and to the
store, and shares what it got or why it failed (`on_rank_zero`).

All that goes over a group of its own (`control`), on gloo. There ranks may wait for rank 0 for as long as it samples;
in a collective of the backend that computes, such a wait would end the run (NCCL's watchdog). A rank that dies is
noticed at once, since its connections break, and one that hangs by the heartbeats (trainer/faults).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import orjson
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import random as tp_random
from torch.distributed.rendezvous import rendezvous

from trainer.config import ParallelConfig
from trainer.config.operation import COLLECTIVE_TIMEOUT_S
from trainer.errors import ConfigError, RankFailed
from trainer.launch import attempt
from trainer.megatron import shim
from weightsync.control.hosts import keep_to_loopback
from weightsync.vllm_engine import gpus

T = TypeVar("T")
CONTROL_TIMEOUT = timedelta(days=30)
"""No wait for rank 0 is too long by itself: heartbeats end those that are for nothing."""
_control: Any = None


@contextmanager
def distributed(parallel: ParallelConfig, seed: int, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Iterator[None]:
    """Join the run's process groups (torchrun's environment variables; alone without them) for the body's duration.
    `timeout_s` bounds a collective of the groups that compute. Raises ConfigError if the launcher has started another
    number of ranks."""
    on_cpu, timeout = shim.install(), timedelta(seconds=timeout_s)
    # Before the ranks meet: one that has left with its error would end the others with theirs of a lost connection.
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1  # some clusters set the number on each node
    if ranks != parallel.world_size:
        problem = f"{parallel.world_size} ranks, but the launcher has started {ranks}"
        raise ConfigError("parallel", problem, "Start as many, or change the layout")
    use_device()
    if parallel.world_size == 1 and "RANK" not in os.environ:
        keep_to_loopback()
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timeout, **alone)
    else:
        store, rank, world = next(rendezvous("env://"))
        # torchrun's agent keeps its store over restarts: peers must not be looked up under addresses from before one.
        mine = dist.PrefixStore(f"attempt-{attempt()}", store)
        dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timeout, store=mine, rank=rank, world_size=world)
    try:
        split(parallel, seed, timeout_s)
        yield
    finally:
        global _control
        _control = None
        ps.destroy_model_parallel()
        dist.destroy_process_group()


def split(parallel: ParallelConfig, seed: int, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Cut the world into Megatron's groups and seed every generator. The sizes must multiply to the world's."""
    assert dist.get_world_size() == parallel.world_size
    ps.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        distributed_timeout_minutes=timeout_s / 60,
    )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tp_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def is_rank_zero() -> bool:
    return int(dist.get_rank()) == 0


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """This rank's device as the start of a run tells of it: "cpu", or the GPU's number, name and UUID."""
    if not torch.cuda.is_available():
        return "cpu"
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid, index = gpus.of_device(str(about.uuid))
    return f"{about.name}, {uuid}" if index is None else f"GPU {index}: {about.name}, {uuid}"


def use_device() -> None:
    """Have this thread compute on the rank's own device: the one that it sees, or of several that of its number on this
    host (LOCAL_RANK). Raises ConfigError where there is none of that number."""
    if not torch.cuda.is_available():
        return
    rank, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if visible > 1 and rank >= visible:
        problem = f"this is rank {rank} of its host, which shows it {visible} GPUs"
        raise ConfigError("parallel", problem, "Start a rank for each GPU, or correct CUDA_VISIBLE_DEVICES")
    torch.cuda.set_device(rank if visible > 1 else 0)


def control() -> Any:
    """The group of all ranks for what they tell each other and for waits. Collective where it is first asked for."""
    global _control
    if _control is None:
        _control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return _control


def broadcast_json(value: Any, src: int = 0) -> Any:
    """`value` of the rank `src` on every rank. orjson types only."""
    if dist.get_world_size() == 1:
        return value
    mine = dist.get_rank() == src
    payload = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) if mine else b""
    size = torch.tensor([len(payload)])
    dist.broadcast(size, src, group=control())
    data = _to_tensor(payload, int(size))
    dist.broadcast(data, src, group=control())
    return value if mine else orjson.loads(bytes(data.numpy()))


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    payload = orjson.dumps(value)
    if dist.get_world_size() == 1:
        return [orjson.loads(payload)]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=control())
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, _to_tensor(payload, longest), group=control())
    return [orjson.loads(bytes(p[: int(n)].numpy())) for p, n in zip(parts, sizes, strict=True)]


def scatter_tensors(parts: list[dict[str, torch.Tensor]] | None) -> dict[str, torch.Tensor]:
    """Each rank's part, on its device, of the parts that rank 0 has for all: the same names, dtypes and shapes."""
    described = {
        n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in (parts[0] if parts else {}).items()
    }
    result = {}
    for name, (dtype, shape) in broadcast_json(described).items():
        mine = torch.empty(shape, dtype=getattr(torch, dtype))
        sources = [part[name].cpu().contiguous() for part in parts] if parts is not None else None
        dist.scatter(mine, sources, 0, group=control())
        result[name] = mine.to(device())
    return result


def to_rank_zero(tensor: torch.Tensor, sources: Sequence[int]) -> list[torch.Tensor]:
    """On rank 0 the tensors of the ranks `sources`, in that order; elsewhere nothing. All have the shape and dtype of
    rank 0's own; what other ranks hold is not looked at."""
    rank, mine = dist.get_rank(), tensor.cpu().contiguous()
    if rank != 0:
        if rank in sources:
            dist.send(mine, 0, group=control())
        return []
    found = [mine if source == 0 else torch.empty_like(mine) for source in sources]
    for source, part in zip(sources, found, strict=True):
        if source != 0:
            dist.recv(part, source, group=control())
    return found


def on_rank_zero(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 only; its result there, None elsewhere. If it raises, every rank leaves: rank 0 with the
    error itself, the others with RankFailed, so that nobody waits in a collective for a rank that is gone."""
    error: BaseException | None = None
    result: T | None = None
    if is_rank_zero():
        try:
            result = work()
        except Exception as caught:
            error = caught
    if broadcast_json(error is not None):
        raise error or RankFailed("rank 0 failed; its message says why")
    return result


def _to_tensor(payload: bytes, size: int) -> torch.Tensor:
    data = torch.zeros(size, dtype=torch.uint8)
    if payload:
        data[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return data
