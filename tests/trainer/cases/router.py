"""Cases about the routers of mixtures, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.trainer.batches import random_batch, sampled_batch
from tests.trainer.cases import engine, numbers
from trainer.batch import MASK, ROUTING, Fields, Sequence, collate, pack, take_back
from trainer.errors import DataError
from trainer.megatron.convert import unwrap


def balanced(path: str, parallel: dict[str, Any], **model: Any) -> list[dict[str, float]]:
    """All numbers of three steps."""
    config = {"parallel": parallel, "optimizer": {"lr": 1e-2}, "micro_batch": 2}
    with engine({"model": {"path": path, **model}} | config) as built:
        return [numbers(built.step(random_batch(built.shape.vocab, rows=8, seed=step))) for step in range(3)]


def auxiliary(path: str, balance: float, z: float, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The auxiliary losses of one step of one micro-batch, as the engine reports them and by their formulas in
    float64; and the largest difference, and size, of the gradient that they add to the last layer's router."""

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

    fields = sampled_batch(17, rows=6)
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


def _recorded(shape: Any, seed: int, *, every: bool = True) -> list[Sequence]:
    """Sequences whose tokens went to random experts; of every second token, unless `every`, nobody knows."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in torch.randint(3, 12, (8,), generator=generator).tolist():
        tokens = torch.randint(0, shape.vocab, (length,), generator=generator).tolist()
        order = torch.rand(length - 1, shape.layers, shape.experts, generator=generator).argsort(-1)
        routing = order[..., : shape.experts_per_token]
        if not every:
            routing[::2] = -1
        made.append(Sequence(tuple(tokens[:2]), tuple(tokens[2:]), routing=routing))
    return made


def _laid_out(built: Any, sequences: list[Sequence], packed: bool) -> Fields:
    return pack(sequences, 40, ranks=built.config.parallel.data) if packed else collate(sequences)


def replayed(path: str, parallel: dict[str, Any], packed: bool = False, **model: Any) -> dict[str, Any]:
    """[loss, gradient norm] of three steps along recorded routing, and the log-probs of the second batch by it."""
    config = {"parallel": parallel, "optimizer": {"lr": 1e-2}, "micro_batch": 2}
    with engine({"model": {"path": path, **model}} | config) as built:
        batches = [_recorded(built.shape, seed, every=seed != 2) for seed in range(3)]
        trained = [built.step(_laid_out(built, batch, packed)) for batch in batches]
        logprobs = built.logprobs(_laid_out(built, batches[1], packed=False))
        return {
            "trained": [[stats.loss, stats.grad_norm] for stats in trained],
            "logprobs": None if logprobs is None else logprobs.double().sum().item(),
        }


def followed(path: str) -> dict[str, Any]:
    """Along recorded routing: whether every known token went where it was sent, with which weights (their largest
    difference to the softmax over the logits of those experts, in float64), and how many would have gone elsewhere."""
    result: dict[str, Any] = {"right": True, "weights": 0.0, "elsewhere": 0, "known": 0}
    with engine({"model": {"path": path}, "micro_batch": 16}) as built:
        sequences = _recorded(built.shape, 0, every=False)
        fields = collate(sequences)

        def check(router: Any, given: Any, output: Any) -> None:
            probs, chosen = output
            recorded = fields[ROUTING][:, :, router.layer_number - 1].transpose(0, 1).flatten(0, 1).long() - 1
            logits = given[0].detach().double().flatten(0, 1) @ router.weight.detach().double().t()
            own = logits.topk(recorded.shape[1]).indices
            known = recorded[:, 0] >= 0
            experts = torch.where(known[:, None], recorded, own)
            expected = torch.zeros_like(chosen).scatter(1, experts, True)
            result["right"] &= torch.equal(chosen, expected)
            weights = torch.zeros_like(logits).scatter(1, experts, logits.gather(1, experts).softmax(-1))
            result["weights"] = max(result["weights"], (weights - probs.double()).abs().max().item())
            result["known"] += int(known.sum())
            result["elsewhere"] += int((own.sort().values != experts.sort().values).any(1).sum())

        for layer in unwrap(built.model[0]).decoder.layers:
            layer.mlp.router.register_forward_hook(check)
        built.logprobs(fields)
    return result


def routing_refused(path: str) -> list[str]:
    """What the engine says of routing that cannot be the model's: too few layers, an expert too many, one twice."""
    said = []
    with engine({"model": {"path": path}}) as built:
        right = torch.tensor([0, 1]).expand(4, built.shape.layers, 2)
        for routing in (right[:, 1:], right + built.shape.experts - 1, torch.zeros_like(right)):
            try:
                built.step(collate([Sequence((1, 2), (3, 4, 5), routing=routing)]))
            except DataError as error:
                said.append(str(error))
    return said


def gaps(path: str, prompt: tuple[int, ...], sampled: list[tuple[Any, Any, Any]]) -> dict[str, float]:
    """The mean difference of the trainer's log-probs to those of `sampled` (tokens, log-probs, routing), which are
    answers to the prompt: along the recorded routing, and where the trainer's own routers send the tokens."""
    found = {}
    with engine({"model": {"path": path}, "micro_batch": 16}) as built:
        for name, along in (("replayed", True), ("free", False)):
            sequences = [
                Sequence(tuple(prompt), tuple(tokens), routing=torch.tensor(routing) if along else None)
                for tokens, _, routing in sampled
            ]
            values = take_back(built.logprobs(collate(sequences)), sequences, [[i] for i in range(len(sequences))])
            told = [torch.tensor(logprobs) for _, logprobs, _ in sampled]
            found[name] = (torch.cat(values) - torch.cat(told)).abs().mean().item()
    return found
