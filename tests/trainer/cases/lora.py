"""Cases about low-rank adapters, and about Muon beside a plain float64 reference and beside torch's, for the ranks of
tests/trainer/ranks.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.trainer.batches import random_batch
from tests.trainer.cases import engine, logits, publishing
from trainer.batch import TOKENS, Fields
from trainer.config import MemoryConfig
from trainer.megatron.convert import cut, export_hf, parameters, placement
from trainer.megatron.hf_files import finish_adapter, finish_checkpoint, write_shards
from trainer.megatron.lora import Pair, adapter_config, adapters
from trainer.megatron.parallel import gather_json, on_rank_zero
from trainer.memory.build import trainer_components


def write_adapter(built: Any, directory: str) -> None:
    """The adapter that a run leaves in `save_to`."""
    shares = gather_json(write_shards(directory, built.export("float32"), built.part))
    written = [w for share in shares for w in share]
    lora, path = built.config.lora, built.config.model.path
    on_rank_zero(lambda: finish_adapter(directory, written, adapter_config(built.shape, lora, path)))


def adapted(path: str, parallel: dict[str, Any], lora: dict[str, Any], directory: str) -> list[float]:
    """Two steps; then into `directory` the adapter, `merged/` the model with the adapter in it, this stage's
    `logits.st`, and after one more step its `gradients-RANK.st` by PEFT's names. [loss, gradient norm] of that step."""
    with engine(path, parallel, optimizer={"lr": 3e-2, "clip_grad": 1e9}, lora=lora) as built:
        for step in range(2):
            built.step(random_batch(built.shape.vocab, seed=step))
        write_adapter(built, directory)
        merged = Path(directory) / "merged"
        on_rank_zero(lambda: merged.mkdir())
        shares = gather_json(write_shards(merged, built.export_merged("float32"), built.part))
        on_rank_zero(lambda: finish_checkpoint(merged, [w for share in shares for w in share], path, "float32"))
        batch = random_batch(built.shape.vocab, seed=2)
        if (found := logits(built, batch[TOKENS][:, :-1])) is not None and built.part in (0, 1):
            save_file({"logits": found[..., : built.shape.vocab].contiguous()}, Path(directory) / "logits.st")
        stats = built.step(batch)
        named = [(name, getattr(p, "main_grad", p.grad)) for chunk in built.model for name, p in adapters(chunk)]
        gradients = {name: tensor.clone() for name, tensor in export_hf(named, built.shape)}
        save_file(gradients, Path(directory) / f"gradients-{built.part}.st")
        return [stats.loss, stats.grad_norm]


def held(path: str, lora: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Bytes that training an adapter holds and moves, before and after a step: gradients, optimizer states, weights."""
    with engine(path, lora=lora, **config) as built:
        (chunk,) = built.model
        before = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        built.step(random_batch(built.shape.vocab))
        trained = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
        states = [p for part in built.optimizer.chained_optimizers for g in part.param_groups for p in g["params"]]
        return {
            "moved": sorted(n for n, p in chunk.named_parameters() if not torch.equal(p, before[n])),
            "trained": sorted(trained),
            "elements": sum(p.numel() for p in trained.values()),
            "gradients": sum(b.grad_data.numel() for b in (*chunk.buffers, *chunk.expert_parallel_buffers)),
            "graded": sorted(n for n, p in chunk.named_parameters() if p.grad is not None or hasattr(p, "main_grad")),
            "states": sum(p.numel() for p in states),
        }


def references(path: str, parallel: dict[str, Any], lora: dict[str, Any] | None) -> dict[str, Any]:
    """The reference's word on a batch before and after three steps of DPO, the actor's word then, and the bytes of all
    roles."""
    with engine(path, parallel, algorithm={"name": "dpo"}, lora=lora, optimizer={"lr": 3e-2}) as built:
        fields = random_batch(built.shape.vocab, rows=6, seed=9)
        before = _said(built, "reference", fields)
        losses = [built.step(random_batch(built.shape.vocab, rows=6, seed=step)).loss for step in range(3)]
        after, actor = _said(built, "reference", fields), _said(built, "actor", fields)
        tensors = {id(t): t for found in built.storages().values() for t in found}
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}
        parameters = {id(p) for role in built.roles.values() for chunk in role.model for p in chunk.parameters()}
        return {
            "before": before,
            "after": after,
            "actor": actor,
            "losses": losses,
            "storages": sorted(built.storages()),
            "bytes": sum(held.values()),
            "parameters": len(parameters),
        }


def repeated(path: str, lora: dict[str, Any], recompute: str) -> dict[str, Any]:
    """The actor's two answers on one batch without training, and the losses of two steps on the same batch at a
    learning rate of nearly zero."""
    with engine(path, model={"recompute": recompute}, lora=lora, optimizer={"lr": 1e-12}) as built:
        fields = random_batch(built.shape.vocab)
        built.actor.model[0].apply(_randomise)
        said = [_said(built, "actor", fields) for _ in range(2)]
        stats = [built.step(fields) for _ in range(2)]
        return {"said": said, "losses": [s.loss for s in stats], "norms": [s.grad_norm for s in stats]}


def _said(built: Any, role: str, fields: Fields) -> list[list[float]]:
    """A role's log-probabilities of the batch: [B, T] on rank 0, nothing on the others."""
    found = built._said([role], fields)
    return found[0].tolist() if found else []


def _randomise(module: torch.nn.Module) -> None:
    """Make B count."""
    if isinstance(module, Pair):
        module.B.data.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(1))


def publish_adapter(path: str, parallel: dict[str, Any], store: str, lora: dict[str, Any], directory: str) -> int:
    """A version with the adapter after one step, which lies in `directory`, too."""
    with publishing(path, parallel, store, "float32", lora) as (built, publisher):
        built.step(random_batch(built.shape.vocab))
        write_adapter(built, directory)
        return publisher.publish(1).version


def replicas(path: str, parallel: dict[str, Any], lora: dict[str, Any]) -> dict[str, list[float]]:
    """After three steps, what this rank has of the matrices that are whole on every rank, by name."""
    with engine(path, parallel, lora=lora, optimizer={"lr": 3e-2}) as built:
        for step in range(3):
            built.step(random_batch(built.shape.vocab, seed=step))
        named = [(name, p) for chunk in built.model for name, p in adapters(chunk)]
        return {n: p.flatten().tolist() for n, p in named if placement(built.shape, n).cut == "replicated"}


LR, DECAY, MOMENTUM, STEPS = 1e-2, 0.1, 0.9, 5
BETAS, EPS = (0.9, 0.95), 1e-8
Named = dict[str, torch.Tensor]


def muon_reference(path: str) -> dict[str, Any]:
    """Over three steps, the largest difference of a weight to the reference's, by whose it is; and by what share of it
    each matrix's way differs from that of torch.optim.Muon, which computes in bfloat16."""
    optimizer = {"name": "muon", "lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_steps": STEPS}
    with engine(path, optimizer=optimizer) as built:
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
    with engine(path, parallel, optimizer={"name": "muon"}) as built:
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
