"""The DTensors of a fully sharded role in a checkpoint, by name.

    model/NAME                          a weight
    main/NAME                           its fp32 main weight, in half precision
    exp_avg/NAME, exp_avg_sq/NAME       Adam's moments
    fully_sharded.json                  Adam's count of steps for each, and the learning-rate schedule

torch.distributed.checkpoint cuts and joins DTensors by itself, so that any number of data-parallel ranks can go on.
Megatron's format wants equal shards instead, which FSDP2's are not where a size does not divide.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from trainer.checkpoint.shards import CheckedReader, refusing
from trainer.errors import ResumeError
from trainer.megatron.roles import FullySharded, Role

NUMBERS = "fully_sharded.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def is_fully_sharded(role: Role) -> bool:
    return isinstance(role.model[0], FullySharded)


def tensors(role: Role) -> dict[str, torch.Tensor]:
    """The very tensors that the role computes with. Adam must have its states."""
    found: dict[str, torch.Tensor] = {}
    for name, weight, optimized in _weights(role):
        found[f"model/{name}"] = weight.detach()
        if optimized is not weight:
            found[f"main/{name}"] = optimized.detach()
        found |= {f"{moment}/{name}": _states(role)[optimized][moment] for moment in MOMENTS}
    return found


def write_numbers(role: Role, directory: Path) -> None:
    """Write the numbers that are the same on every rank."""
    states = _states(role)
    steps = {name: int(states[optimized]["step"]) for name, _, optimized in _weights(role)}
    (directory / NUMBERS).write_text(json.dumps({"steps": steps, "scheduler": role.scheduler.state_dict()}))


def load(role: Role, directory: Path) -> None:
    """Read into the role's own tensors. Collective. Raises ResumeError for another model's, or what is damaged."""
    try:
        numbers = json.loads((directory / NUMBERS).read_text())
        with refusing(directory):
            dcp.load(tensors(role), storage_reader=CheckedReader(directory))
        states = _states(role)
        for name, _, optimized in _weights(role):
            states[optimized]["step"] = torch.tensor(float(numbers["steps"][name]))
        role.scheduler.num_steps = 0  # Megatron's loader adds what was saved to what there is
        role.scheduler.load_state_dict(numbers["scheduler"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{directory} does not fit this run ({error}). Set checkpoint.resume to never.") from error


def check_format(role: Role, directory: Path) -> None:
    """Raises ResumeError for a checkpoint that was written with the other value of `parallel.shard`."""
    saved, mine = (directory / NUMBERS).exists(), is_fully_sharded(role)
    if saved != mine:
        names = {True: "full", False: "optimizer"}
        problem = f"{directory} was written with parallel.shard {names[saved]}, this run has {names[mine]}"
        raise ResumeError(f"{problem}. Set it back, or start from an export (save_to).")


def _weights(role: Role) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, weight, what Adam updates: the weight itself or its fp32 main weight) of what is trained."""
    (chunk,) = role.model  # there are no pipeline stages
    for name, weight in chunk.module.named_parameters():
        if weight.requires_grad:
            yield name, weight, getattr(weight, "main_param", weight)


def _states(role: Role) -> dict[torch.Tensor, Any]:
    optimizers = getattr(role.optimizer, "chained_optimizers", [role.optimizer])
    return {parameter: state for part in optimizers for parameter, state in part.optimizer.state.items()}
