"""Saving and restoring an engine exactly: for each role that is trained its model, sharded optimizer and learning-rate
schedule, and the random generators.

    DIRECTORY/actor/              Megatron's `torch_dist` format, which can be read back in another parallel layout
                                  (under `parallel.shard: full` what fsdp.py says)
    DIRECTORY/critic/             the same, if the algorithm has one
    DIRECTORY/rank-00000.json     the generators of a rank; restored only on as many ranks, and those of the device
                                  only on a device of its kind (elsewhere exactness is lost, training is not)

Frozen weights are not saved: they are those of the checkpoint that the run started from. So is the reference model.

Three defects of Megatron-Core 0.16.1 with torch's Adam are worked around (`_prepare_optimizer`, `_load_optimizer`): it
expects optimizer state, `step` included, before the first step ever ran; it then looks for `step` among the
loaded tensors of each parameter, where it is not; and it gives all parameters one shared `step` tensor, which Adam
would increment once per parameter.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as tp_random

from trainer.checkpoint import fsdp, shards
from trainer.checkpoint.directory import describe, write_flushed, writing
from trainer.checkpoint.rank_files import RankFiles
from trainer.checkpoint.shards import Buffers, StagedTensors
from trainer.errors import CheckpointError
from trainer.megatron.convert import unwrap
from trainer.megatron.engine import Engine
from trainer.megatron.muon import Muon
from trainer.megatron.parallel import control, device, gather_json
from trainer.megatron.roles import Role

_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")  # by which Megatron tells groups apart


class StagedEngine:
    """An engine's state at one moment. Taking it is collective, writing it is not."""

    def __init__(self, engine: Engine, directory: Path, buffers: Buffers | None) -> None:
        """`directory` exists and is empty. Without `buffers` nothing is copied: write before the next step."""
        self._directory, self._rank = directory, dist.get_rank()
        self._rng = json.dumps(rng_state())
        self._roles: dict[str, StagedTensors] = {}
        for name, role in trained(engine).items():
            shards.lead_makes(directory / name)
            self._roles[name] = _taken(role, directory / name, buffers)

    def write(self) -> RankFiles:
        """Write this rank's files. Raises CheckpointError when the disk does not take them."""
        with writing(self._directory):
            pieces = {name: staged.write() for name, staged in self._roles.items()}
            files = {f"{role}/{piece[3]}" for role, found in pieces.items() for piece in found}
            generators = f"rank-{self._rank:05d}.json"
            write_flushed(self._directory / generators, self._rng)
            return RankFiles({name: describe(self._directory / name) for name in (*files, generators)}, pieces)

    def finish(self, shares: list[RankFiles]) -> None:
        """Rank 0, when every rank has written: the index of each role."""
        with writing(self._directory):
            for name, staged in self._roles.items():
                staged.finish([piece for share in shares for piece in share.pieces[name]])


def save(engine: Engine, directory: Path) -> None:
    """Write this rank's share below `directory`, which exists and is empty, and wait for all. Collective.

    Raises CheckpointError on every rank when one could not write.
    """
    staged = StagedEngine(engine, directory, None)
    try:
        share = staged.write()
    except CheckpointError as error:
        share = RankFiles(problem=str(error))
    told = gather_json([share.pieces, share.problem])
    if problems := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(told) if problem]:
        raise CheckpointError("; ".join(problems))
    if dist.get_rank() == 0:
        staged.finish([RankFiles(pieces=pieces) for pieces, _ in told])
    dist.barrier(group=control())


def load(engine: Engine, directory: Path) -> None:
    """Restore what was saved, in this layout or another. Collective."""
    for name, role in trained(engine).items():
        fsdp.check_format(role, directory / name)
        if fsdp.is_fully_sharded(role):
            _prepare_optimizer(role)
            fsdp.load(role, directory / name)
        else:
            _load(role, directory / name)
    saved_world = len(list(directory.glob("rank-*.json")))
    if saved_world == dist.get_world_size():
        set_rng_state(json.loads((directory / f"rank-{dist.get_rank():05d}.json").read_text()))


def trained(engine: Engine) -> dict[str, Role]:
    """The roles that have an optimizer, by name, in the same order on every rank."""
    return {name: role for name, role in sorted(engine.roles.items()) if role.optimizer is not None}


def _taken(role: Role, directory: Path, buffers: Buffers | None) -> StagedTensors:
    """A role's tensors at this moment. `directory` exists and is empty."""
    staged = StagedTensors(directory, role.name, buffers)
    if not fsdp.is_fully_sharded(role):
        return staged.take(_sharded(role, loading=False))
    _prepare_optimizer(role)
    if dist.get_rank() == 0:
        fsdp.write_numbers(role, directory)
    return staged.take_dtensors(fsdp.tensors(role))


def _load(role: Role, directory: Path) -> None:
    state = shards.load(_sharded(role, loading=True), directory)
    for key, chunk in _chunks(role).items():
        model = unwrap(chunk)
        model.load_state_dict(state[key], strict=all(p.requires_grad for p in model.parameters()))
    _load_optimizer(role, _regrouped(role, state["optimizer"]))
    role.scheduler.num_steps = 0  # Megatron's loader adds what was saved to what there is
    role.scheduler.load_state_dict(state["scheduler"])


def _chunks(role: Role) -> dict[str, Any]:
    """The model's pieces on this rank by their key in the state; several with interleaved pipeline stages."""
    model = role.model
    return {"model": model[0]} if len(model) == 1 else {f"model{i}": chunk for i, chunk in enumerate(model)}


def _sharded(role: Role, *, loading: bool) -> dict[str, Any]:
    models = {key: _trainable(unwrap(chunk)) for key, chunk in _chunks(role).items()}
    _prepare_optimizer(role)
    gc.freeze()  # Megatron collects garbage in there: spare it the walk over everything that was there before
    try:
        with _whole_buckets(role):
            optimizer = role.optimizer.sharded_state_dict(models, is_loading=loading, metadata=_SHARDING)
    finally:
        gc.unfreeze()
    return {**models, "optimizer": optimizer, "scheduler": role.scheduler.state_dict()}


def _trainable(model: Any) -> dict[str, Any]:
    """The model's shards, without those of frozen weights."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: shards for name, shards in model.sharded_state_dict().items() if name not in frozen}


@contextlib.contextmanager
def _whole_buckets(role: Role) -> Iterator[None]:
    """Megatron-Core 0.16.1 gathers a buffer's buckets without the padding behind each, then looks parameters up where
    they would be with it: where a buffer has two buckets (a tied embedding over pipeline stages gets its own), it would
    save other parameters' numbers. Within the body the padding counts as part of the buckets."""
    holders = [b for part in _optimizers(role) for buffer in part.buffers for b in (buffer, *buffer.buckets)]
    unpadded = [holder.numel_unpadded for holder in holders]
    for holder in holders:
        holder.numel_unpadded = holder.grad_data.numel()
    try:
        yield
    finally:
        for holder, size in zip(holders, unpadded, strict=True):
            holder.numel_unpadded = size


def _optimizers(role: Role) -> Iterator[Any]:
    yield from getattr(role.optimizer, "chained_optimizers", [role.optimizer])


def _prepare_optimizer(role: Role) -> None:
    """The optimizer's state as it will make it in its first step; before that (at step 0, or while only a critic warms
    up) Megatron can neither save nor load."""
    for distributed in _optimizers(role):
        for group in distributed.optimizer.param_groups:
            for parameter in group["params"]:
                if not distributed.optimizer.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    distributed.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def _regrouped(role: Role, state: dict[Any, Any]) -> dict[Any, Any]:
    """Optimizer state as this layout wants it. Experts that are spread over ranks have an optimizer of their own, so
    that parts 0 and 1 stand where otherwise there is one; the tensors are found by name either way, the parameter
    groups are not."""
    parts = list(_optimizers(role))
    alone = len(parts) == 1
    if ("optimizer" in state) == alone:
        return state
    saved = state[0] if alone else state
    group = saved["optimizer"]["param_groups"][0]
    for number, part in enumerate(parts):
        entry = state if alone else state[number]
        groups = [group | {key: g[key] for key in _GROUP_KEYS} for g in part.optimizer.param_groups]
        entry["optimizer"] = {"param_groups": groups}
        entry["param_state_sharding_type"] = saved["param_state_sharding_type"]
    return {key: value for key, value in state.items() if isinstance(key, int) != alone}


def _load_optimizer(role: Role, state: Any) -> None:
    for distributed in _optimizers(role):
        if isinstance(distributed.optimizer, Muon):
            distributed.optimizer.writable()
        distributed._set_main_param_and_optimizer_states = _KeepStep(distributed)
    role.optimizer.load_state_dict(state)
    for distributed in _optimizers(role):
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


def rng_state() -> dict[str, Any]:
    """Every generator's state on this rank, as JSON."""
    tracker = tp_random.get_cuda_rng_tracker().get_states()
    numpy = np.random.get_state(legacy=False)
    return {
        "device": device().type,
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()),
        "tracker": {name: _encode(state) for name, state in tracker.items()},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned. The generators of a GPU and of a CPU have states of other kinds: those of the
    device stay as they are where the state is another kind of device's."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    numpy["state"]["key"] = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy)
    if state.get("device", "cpu") == device().type:
        tracker = {name: _decode(value) for name, value in state["tracker"].items()}
        tp_random.get_cuda_rng_tracker().set_states(tracker)
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    torch.set_rng_state(_decode(state["torch"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
