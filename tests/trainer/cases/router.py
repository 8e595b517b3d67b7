"""Cases about the routers of mixtures, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.trainer.batches import random_batch
from trainer.batch import MASK
from trainer.megatron.convert import unwrap


def balanced(path: str, parallel: dict[str, Any], **model: Any) -> list[dict[str, float]]:
    """All numbers of three steps."""
    from tests.trainer.cases import engine

    config = {"parallel": parallel, "optimizer": {"lr": 1e-2}, "micro_batch": 2}
    with engine({"model": {"path": path, **model}} | config) as built:
        result = []
        for step in range(3):
            stats = built.step(random_batch(built.shape.vocab, rows=8, seed=step))
            numbers = {k: v for k, v in dataclasses.asdict(stats).items() if k != "metrics"}
            result.append(numbers | stats.metrics)
        return result


def auxiliary(path: str, balance: float, z: float, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The auxiliary losses of one step of one micro-batch, as the engine reports them and by their formulas in
    float64; and the largest difference, and size, of the gradient that they add to the last layer's router."""
    from tests.trainer.cases import engine

    def step(**model: Any) -> tuple[dict[str, float], torch.Tensor, list[torch.Tensor]]:
        config = {"optimizer": {"lr": 1e-2, "clip_grad": 1e6}, "micro_batch": 16, "algorithm": algorithm}
        config |= {"gateway": {"url": "http://unused"}}
        with engine({"model": {"path": path, **model}} | config) as built:
            layers = unwrap(built.model[0]).decoder.layers
            seen: list[torch.Tensor] = []
            for layer in layers:
                layer.mlp.router.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
            weights = [layer.mlp.router.weight for layer in layers]
            before = [w.detach().double().clone() for w in weights]
            stats = built.step(fields)
            return stats.metrics, weights[-1].main_grad.double().clone(), _logits(seen, before)

    fields = random_batch(17, rows=6)
    generator = torch.Generator().manual_seed(1)
    fields["advantages"] = torch.randn(fields[MASK].shape, generator=generator) * fields[MASK]
    fields["behaviour_logprobs"] = -3 + 0.3 * torch.randn(fields[MASK].shape, generator=generator)
    inputs_last, weight_last = [], []

    def _logits(seen: list[torch.Tensor], before: list[torch.Tensor]) -> list[torch.Tensor]:
        real = _real(fields[MASK])
        inputs_last.append(seen[-1].double()[real])
        weight_last.append(before[-1])
        return [x.double()[real] @ w.t() for x, w in zip(seen, before, strict=True)]

    metrics, with_losses, logits = step(router_balance_loss=balance, router_z_loss=z)
    _, without, _ = step()
    weight = weight_last[0].requires_grad_(True)
    formulas = [_formulas(x) for x in logits]
    by_balance, by_z = _formulas(inputs_last[0] @ weight.t())
    expected = torch.autograd.grad(balance * by_balance + z * by_z, weight)[0]
    added = with_losses - without
    return {
        "metrics": [metrics["router_balance_loss"], metrics["router_z_loss"]],
        "formulas": [sum(f[i].item() for f in formulas) / len(formulas) for i in (0, 1)],
        "difference": (added - expected).abs().max().item(),
        "size": expected.abs().max().item(),
    }


def _real(mask: torch.Tensor) -> torch.Tensor:
    """bool [T, B]: up to each row's last trained token."""
    lengths = torch.tensor([int(row.nonzero()[-1]) + 1 for row in mask])
    return torch.arange(mask.shape[1])[:, None] < lengths


def _formulas(logits: torch.Tensor, chosen: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    shares = torch.zeros(experts, dtype=torch.float64)
    for row in logits.topk(chosen).indices.tolist():
        for expert in row:
            shares[expert] += 1 / (tokens * chosen)
    means = logits.softmax(-1).mean(0)
    return experts * (shares * means).sum(), logits.logsumexp(-1).square().mean()
