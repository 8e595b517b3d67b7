"""Saving and restoring an engine exactly: model, sharded optimizer, learning-rate schedule, random generators.

Tensors go through Megatron's `dist_checkpointing` in the `torch_dist` format, which can be read back in another
parallel layout; generator states go to one JSON file per rank and are restored only on as many ranks (elsewhere
exactness is lost, training is not).

Three defects of Megatron-Core 0.16.1 with torch's Adam are worked around (`_prepare_optimizer`, `_load_optimizer`): its
loader expects optimizer state, `step` included, before the first step ever ran; it then looks for `step` among the
loaded tensors of each parameter, where it is not; and it gives all parameters one shared `step` tensor, which Adam
would increment once per parameter.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.tensor_parallel import random as tp_random
from torch.distributed import checkpoint as dcp

from trainer.megatron.convert import unwrap
from trainer.megatron.engine import Engine

_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save(engine: Engine, directory: Path) -> None:
    """Write this rank's share below `directory`, which exists and is empty. Collective."""
    tensors = directory / "tensors"
    if dist.get_rank() == 0:
        tensors.mkdir()
    dist.barrier()
    dist_checkpointing.save(_sharded(engine, loading=False), str(tensors), _SaveInProcess("torch_dist", 1))
    (directory / f"rank-{dist.get_rank():05d}.json").write_text(json.dumps(_rng_state()))
    dist.barrier()


def load(engine: Engine, directory: Path) -> None:
    """Restore what `save` wrote. Collective."""
    _prepare_optimizer(engine)
    state = dist_checkpointing.load(_sharded(engine, loading=True), str(directory / "tensors"))
    unwrap(engine.model).load_state_dict(state["model"])
    _load_optimizer(engine, state["optimizer"])
    engine.scheduler.load_state_dict(state["scheduler"])
    saved_world = len(list(directory.glob("rank-*.json")))
    if saved_world == dist.get_world_size():
        _set_rng_state(json.loads((directory / f"rank-{dist.get_rank():05d}.json").read_text()))


class _SaveInProcess(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's own writer starts a manager process and forks; a killed rank leaves them behind. torch's does not."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        keyed, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            torch_dist.mcore_to_pyt_state_dict(keyed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _sharded(engine: Engine, *, loading: bool) -> dict[str, Any]:
    model = unwrap(engine.model).sharded_state_dict()
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_SHARDING)
    return {"model": model, "optimizer": optimizer, "scheduler": engine.scheduler.state_dict()}


def _optimizers(engine: Engine) -> Iterator[Any]:
    yield from getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])


def _prepare_optimizer(engine: Engine) -> None:
    for distributed in _optimizers(engine):
        for group in distributed.optimizer.param_groups:
            for parameter in group["params"]:
                if not distributed.optimizer.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    distributed.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def _load_optimizer(engine: Engine, state: Any) -> None:
    for distributed in _optimizers(engine):
        distributed._set_main_param_and_optimizer_states = _KeepStep(distributed)
    engine.optimizer.load_state_dict(state)
    for distributed in _optimizers(engine):
        del distributed._set_main_param_and_optimizer_states  # the class's own again
        for per_parameter in distributed.optimizer.state.values():
            per_parameter["step"] = per_parameter["step"].clone()


class _KeepStep:
    """Megatron's setter for one parameter's state, given the `step` that it insists on."""

    def __init__(self, distributed: Any) -> None:
        self.distributed = distributed
        self.original = distributed._set_main_param_and_optimizer_states

    def __call__(self, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.distributed.model_param_group_index_map[model_param]
        main = self.distributed.optimizer.param_groups[group]["params"][order]
        self.original(model_param, {"step": self.distributed.optimizer.state[main]["step"], **tensors})


def _rng_state() -> dict[str, Any]:
    tracker = tp_random.get_cuda_rng_tracker().get_states()
    numpy = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()),
        "tracker": {name: _encode(state) for name, state in tracker.items()},
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    numpy["state"]["key"] = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy)
    tracker = {name: _decode(value) for name, value in state["tracker"].items()}
    tp_random.get_cuda_rng_tracker().set_states(tracker)
    torch.cuda.set_rng_state(_decode(state["cuda"]))
    torch.set_rng_state(_decode(state["torch"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
