"""Muon beside a plain float64 reference and beside torch's, for one rank of tests/trainer/ranks.py."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.trainer.batches import random_batch
from tests.trainer.cases import engine
from trainer.config import MemoryConfig
from trainer.megatron.convert import cut, parameters, placement
from trainer.memory.build import trainer_components

LR, DECAY, MOMENTUM, STEPS = 1e-2, 0.1, 0.9, 5
BETAS, EPS = (0.9, 0.95), 1e-8
Named = dict[str, torch.Tensor]


def muon_reference(path: str) -> dict[str, Any]:
    """Over three steps, the largest difference of a weight to the reference's, by whose it is; and by what share of it
    each matrix's way differs from that of torch.optim.Muon, which computes in bfloat16."""
    optimizer = {"name": "muon", "lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_steps": STEPS}
    with engine({"model": {"path": path}, "optimizer": optimizer}) as built:
        names = {p: name for name, p in parameters(built.model[0])}
        seen: Named = {}
        parts = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
        for part in parts:
            _watch(built, part, names, seen)
        start = {name: tensor.double() for name, tensor in built.export("float32")}
        reference = {name: tensor.clone() for name, tensor in start.items()}
        states: dict[str, list[torch.Tensor]] = {n: [torch.zeros_like(t)] * 2 for n, t in start.items()}
        theirs = {n: torch.nn.Parameter(t.float().clone()) for n, t in start.items() if _is_matrix(n, t)}
        torchs = torch.optim.Muon(
            theirs.values(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
        )
        result: dict[str, Any] = {"muon": 0.0, "adamw": 0.0, "matrices": len(theirs), "others": 0}
        for step in range(3):
            built.step(random_batch(built.shape.vocab, rows=7, seed=step))
            for name, gradient in seen.items():
                kind = _muon if name in theirs else _adamw
                reference[name], states[name] = kind(reference[name], gradient.double(), states[name], step + 1)
            for name, parameter in theirs.items():
                parameter.grad = seen[name].clone()
            torchs.step()
            for name, tensor in built.export("float32"):
                owner = "muon" if name in theirs else "adamw"
                result[owner] = max(result[owner], (tensor.double() - reference[name]).abs().max().item())
        result["others"] = len(seen) - len(theirs)
        mine = {name: tensor.double() - start[name] for name, tensor in built.export("float32") if name in theirs}
        gaps = [(mine[n] - (p.detach().double() - start[n])).norm() / mine[n].norm() for n, p in theirs.items()]
        result["torch"] = sorted(gap.item() for gap in gaps)
        return result


def muon_states(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """The bytes of this rank's optimizer states after a step, and the numbers that it updates; what all of it takes
    then, and what the memory manager expected before."""
    with engine({"model": {"path": path}, "parallel": parallel, "optimizer": {"name": "muon"}}) as built:
        (component,) = (c for c in trainer_components(MemoryConfig(), built) if c.name == "actor_optimizer")
        expected = component.bytes
        built.step(random_batch(built.shape.vocab, rows=7))
        parts = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
        states = [(p, s) for part in parts for p, s in part.optimizer.state.items()]
        kept = sum(s[n].untyped_storage().nbytes() for _, s in states for n in ("exp_avg", "exp_avg_sq"))
        held = sum(tensor.untyped_storage().nbytes() for tensor in built.storages()["actor_optimizer"])
        return {"bytes": kept, "numbers": sum(p.numel() for p, _ in states), "held": held, "expected": expected}


def _watch(built: Any, part: Any, names: dict[Any, str], seen: Named) -> None:
    """Before each update, write the gradients down under the names of Hugging Face."""
    original = part.optimizer.step

    def step() -> None:
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            place = placement(built.shape, names[parameter])
            for piece in cut(built.shape, place, main.grad.view(parameter.shape), 1, 0):
                seen[piece.name] = piece.tensor.clone()
        original()

    part.optimizer.step = step


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name


def _muon(
    weight: torch.Tensor, gradient: torch.Tensor, state: list[torch.Tensor], _: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    momentum = MOMENTUM * state[0] + (1 - MOMENTUM) * gradient
    ahead = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
    u, s, v = torch.linalg.svd(ahead, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(STEPS):  # what a step of Newton and Schulz does to singular values
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    update = 0.2 * math.sqrt(max(weight.shape)) * (u * s) @ v
    return weight - LR * (DECAY * weight + update), [momentum, state[1]]


def _adamw(
    weight: torch.Tensor, gradient: torch.Tensor, state: list[torch.Tensor], step: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first = BETAS[0] * state[0] + (1 - BETAS[0]) * gradient
    second = BETAS[1] * state[1] + (1 - BETAS[1]) * gradient**2
    update = first / (1 - BETAS[0] ** step) / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)
    decay = 0.0 if weight.ndim == 1 else DECAY
    return weight - LR * (decay * weight + update), [first, second]
