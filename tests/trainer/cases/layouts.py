"""Cases about parallel layouts, about what ranks tell each other, and about the routers of mixtures, for the ranks of
tests/trainer/ranks.py."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.distributed.distributed_c10d import _set_pg_timeout

from server.ports import free_port
from tests.trainer.batches import random_batch, sampled_batch
from tests.trainer.cases import engine, numbers
from trainer.batch import MASK, ROUTING, Fields, Sequence, collate, pack, take_back
from trainer.config import ParallelConfig
from trainer.errors import DataError
from trainer.megatron import passes
from trainer.megatron.convert import parameters, unwrap
from trainer.megatron.hf_files import finish_checkpoint, write_shards
from trainer.megatron.parallel import broadcast_json, device, distributed, gather_json, is_rank_zero, on_rank_zero


def ppo(path: str, parallel: dict[str, Any], **config: Any) -> list[dict[str, float]]:
    """All numbers of two PPO steps: actor, critic and reference in one layout."""
    algorithm = {"name": "ppo", "kl_coef": 0.1, "minibatches": 2, "critic_lr": 1e-2}
    common = {"algorithm": algorithm, "optimizer": {"lr": 1e-2}, "micro_batch": 2}
    with engine(path, parallel, **common | config) as built:
        return [numbers(built.step(sampled_batch(built.shape.vocab, seed=step))) for step in range(2)]


def packed(path: str, parallel: dict[str, Any], *, rows: bool, **more: Any) -> list[list[float]]:
    """[loss, gradient norm] of three steps on sequences of many lengths, packed or one a row."""
    with engine(path, parallel, **{"optimizer": {"lr": 1e-2}, "micro_batch": 3} | more) as built:
        trained = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            lengths = torch.randint(2, 12, (9,), generator=generator).tolist()
            tokens = [torch.randint(0, 17, (length + 1,), generator=generator).tolist() for length in lengths]
            sequences = [Sequence(tuple(t[:1]), tuple(t[1:])) for t in tokens]
            ranks = built.config.parallel.data
            stats = built.step(collate(sequences) if rows else pack(sequences, 27, ranks=ranks))
            trained.append([stats.loss, stats.grad_norm])
        return trained


def footprint(path: str, parallel: dict[str, Any], **config: Any) -> dict[str, Any]:
    """The rank's holdings: weights by kind, the length of its activations, what a step kept for its backward pass,
    where Adam's states are, and the largest share of the model that it exports."""
    with engine(path, parallel, **{"micro_batch": 8} | config) as built:
        lengths: list[int] = []
        for chunk in built.model:
            for layer in unwrap(chunk).decoder.layers:
                layer.register_forward_hook(lambda _m, _i, out: lengths.append(out[0].shape[0]))
        kept = [0]

        def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() == -1:  # not what a backward pass computes again
                kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
            stats = built.step(random_batch(built.shape.vocab))
        local = [(n, _local(p).numel()) for chunk in built.model for n, p in parameters(chunk)]
        return {
            "weights": sum(size for _, size in local),
            "experts": sum(size for name, size in local if "local_experts" in name),
            "layers": sum(len(unwrap(chunk).decoder.layers) for chunk in built.model),
            "chunks": [unwrap(chunk).decoder.layers[0].layer_number for chunk in built.model],
            "length": lengths[0],
            "passes": len(lengths),
            "kept": kept[0],
            "exported": sum(piece.tensor.numel() for piece in built.slices("float32")),
            "metrics": stats.metrics,
        }


def overflow(path: str, loss_scale: float, steps: int) -> list[dict[str, float]]:
    """The metrics of float16 steps, the learning rate's counter and whether the weights moved."""
    optimizer = {"lr": 1e-2, "loss_scale": loss_scale}
    with engine(path, model={"dtype": "float16"}, optimizer=optimizer) as built:
        result = []
        for step in range(steps):
            before = [p.detach().clone() for p in built.model[0].parameters()]
            stats = built.step(random_batch(built.shape.vocab, seed=step))
            moved = any(not torch.equal(a, b) for a, b in zip(before, built.model[0].parameters(), strict=True))
            result.append({**stats.metrics, "moved": float(moved), "updates": float(built.scheduler.num_steps)})
        return result


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def on_gpu(path: str, steps: int, **config: Any) -> dict[str, Any]:
    """Losses of a GPU run, where Adam's states and main weights are, whether those on the host are pinned, and the
    device memory in use after the last step."""
    with engine(path, **{"optimizer": {"lr": 1e-2}} | config) as built:
        trained = []
        for step in range(steps):
            batch = random_batch(built.shape.vocab, rows=7, seed=step)
            trained.append(built.step({name: field.to(device()) for name, field in batch.items()}).loss)
        parts = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
        states = [state for part in parts for state in part.optimizer.state.values()]
        devices = {state["exp_avg"].device.type for state in states}
        pinned = {state["master_param"].is_pinned() for state in states if state.get("master_param") is not None}
        told = {"states": sorted(devices), "pinned": sorted(pinned), "bytes": torch.cuda.memory_allocated()}
        return {"losses": trained, **told}


def saved(path: str, parallel: dict[str, Any], directory: str) -> list[str]:
    """Write the weights as a Hugging Face checkpoint, as the end of a run does; the files this rank wrote."""
    with engine(path, parallel) as built:
        mine = write_shards(directory, built.export("float32"), built.part)
        everyone = [entry for share in gather_json(mine) for entry in share]
        on_rank_zero(lambda: finish_checkpoint(directory, everyone, path, "float32"))
        return sorted({file for _, file, _ in mine})


def lead_takes_longer_than_a_collective_may(made_with_s: float, timeout_s: float) -> dict[str, Any]:
    """The lead alone enters collectives of the groups that compute: each fails when its time is over, while the others
    wait for rank 0. The groups are made with another limit, as ranks may take longer than `timeout_s` to meet."""
    world = dist.get_world_size()
    port = torch.tensor([free_port()])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(port))
    failed: list[str] = []

    def work() -> list[str]:
        for group in groups:
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except RuntimeError as error:
                failed.append(str(error))
        return failed

    with distributed(ParallelConfig(data=world), seed=0, timeout_s=made_with_s):
        groups: tuple[Any, ...] = (dist.group.WORLD, ps.get_data_parallel_group())
        limits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
        broadcast_json(None)
        for group in groups:
            _set_pg_timeout(timedelta(seconds=timeout_s), group)
        began = time.monotonic()
        told = broadcast_json(on_rank_zero(work))
        waited_s = time.monotonic() - began
        return {"limits": limits, "told": told, "waited_s": waited_s, "lead": is_rank_zero()}


def received_in_a_step(path: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Bytes of tensors that reach this rank in a GRPO step of eight rows with a reference, and the rows it trains."""
    algorithm = {"name": "grpo", "kl_coef": 0.1}
    nbytes, rows, scatter, run = [0], [0], dist.scatter, passes.run

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nbytes[0] += tensor.nbytes
        return scatter(tensor, *args, **kwargs)

    def trained(chunks: Any, config: Any, micro_batches: list[Fields], reduce: Any, **how: Any) -> Any:
        rows[0] += 0 if how["forward_only"] else sum(len(batch[MASK]) for batch in micro_batches)
        return run(chunks, config, micro_batches, reduce, **how)

    with (
        engine(path, parallel, algorithm=algorithm, micro_batch=2) as built,
        patch.object(dist, "scatter", counted),
        patch("trainer.megatron.engine.run", trained),
    ):
        stats = built.step(sampled_batch(built.shape.vocab) if is_rank_zero() else {})
        return {"nbytes": nbytes[0], "rows": rows[0], "loss": stats.loss}


def balanced(path: str, parallel: dict[str, Any], **model: Any) -> list[dict[str, float]]:
    """All numbers of three steps."""
    with engine(path, parallel, model=model, optimizer={"lr": 1e-2}, micro_batch=2) as built:
        return [numbers(built.step(random_batch(built.shape.vocab, rows=8, seed=step))) for step in range(3)]


def auxiliary(path: str, balance: float, z: float, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The auxiliary losses of one step of one micro-batch, as the engine reports them and by their formulas in
    float64; and the largest difference, and size, of the gradient that they add to the last layer's router."""

    def step(**model: Any) -> tuple[dict[str, float], torch.Tensor, list[torch.Tensor]]:
        optimizer = {"lr": 1e-2, "clip_grad": 1e6}
        with engine(path, model=model, optimizer=optimizer, micro_batch=16, algorithm=algorithm) as built:
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
    with engine(path, parallel, model=model, optimizer={"lr": 1e-2}, micro_batch=2) as built:
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
    with engine(path, micro_batch=16) as built:
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
    """The engine's refusals of routing that cannot be the model's: too few layers, an expert too many, one twice."""
    said = []
    with engine(path) as built:
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
    with engine(path, micro_batch=16) as built:
        for name, along in (("replayed", True), ("free", False)):
            sequences = [
                Sequence(tuple(prompt), tuple(tokens), routing=torch.tensor(routing) if along else None)
                for tokens, _, routing in sampled
            ]
            values = take_back(built.logprobs(collate(sequences)), sequences, [[i] for i in range(len(sequences))])
            told = [torch.tensor(logprobs) for _, logprobs, _ in sampled]
            found[name] = (torch.cat(values) - torch.cat(told)).abs().mean().item()
    return found
