"""Cases about algorithms in the engine, trajectories with tools in them, and log-probs and entropies in chunks, for the
ranks of tests/trainer/ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.algorithms.batches import groups, preferences
from tests.trainer.cases import engine, numbers
from trainer.algorithms.base import ENTROPY, VALUES, Algorithm
from trainer.batch import MASK, Fields, assemble
from trainer.checkpoint import engine_state
from trainer.config import PackingConfig
from trainer.megatron import passes
from trainer.megatron.convert import unwrap
from trainer.megatron.engine import Engine
from trainer.megatron.logprobs import logprobs_and_entropy
from trainer.rewards.scorer import Score
from trainer.trajectory import Trajectory, TrajectoryGroup, Turn

POLICY = {"samples_per_prompt": 3, "minibatches": 2, "kl_coef": 0.1}
CORRECTED = {"kind": "truncated", "max_lag": 1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.5, "minibatches": 2},
    "gspo": {"name": "grpo", "ratio": "sequence", "normalize": "sequence", **POLICY},
    "async": {"name": "grpo", "correction": CORRECTED, **POLICY, "epochs": 2},
    "rloo": {"name": "rloo", **POLICY},
    "kimi": {"name": "kimi", "tau": 0.5, **POLICY},
    "reinforce": {"name": "reinforce++", **POLICY},
    "ppo": {"name": "ppo", **POLICY, "epochs": 2},
    "custom": {"name": "custom", "loss": "tests.trainer.algorithms.losses:by_answer", **POLICY},
    "distill": {"name": "distill", "teacher": {"url": "http://unused", "model": "teacher"}, **POLICY},
}


def _built(path: str, algorithm: dict[str, Any], parallel: dict[str, Any], **config: Any) -> Any:
    settings = {"algorithm": algorithm, "optimizer": {"lr": 3e-3}, "micro_batch": 2}
    return engine(path, parallel, **settings | config)


def _batch(algorithm: Algorithm, step: int, ranks: int = 1) -> Fields:
    sequences = algorithm.sequences(preferences(4, seed=step), groups(3, 3, seed=step), 5)
    return assemble(sequences, None, ranks=ranks, minibatches=algorithm.minibatches)


def algorithms(path: str, parallel: dict[str, Any], names: list[str]) -> dict[str, list[dict[str, float]]]:
    """All numbers of two steps with each of the algorithms."""
    result = {}
    for name in names:
        with _built(path, ALGORITHMS[name], parallel) as built:
            ranks = parallel.get("data", 1)
            result[name] = [numbers(built.step(_batch(built.algorithm, step, ranks=ranks))) for step in range(2)]
    return result


def second_step(path: str, parallel: dict[str, Any], **config: Any) -> list[float]:
    """How far an engine's second step moves its weights, and how far from where a new optimizer moves them."""
    batches = [partial(_batch, step=step, ranks=parallel.get("data", 1)) for step in range(2)]
    algorithm = ALGORITHMS["kimi"] | config.pop("algorithm", {})
    with _built(path, algorithm, parallel, **config) as built:
        built.step(batches[0](built.algorithm))
        first = _weights(built)
        built.step(batches[1](built.algorithm))
        second = _weights(built)
    with _built(path, algorithm, parallel, **config) as built:
        for parameter, weight in zip(_parameters(built), first, strict=True):
            parameter.data.copy_(weight)
        built.step(batches[1](built.algorithm))
        return [_farthest(second, first), _farthest(second, _weights(built))]


def _parameters(built: Engine) -> Iterator[torch.nn.Parameter]:
    yield from (parameter for chunk in built.model for parameter in chunk.parameters())


def _weights(built: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in _parameters(built)]


def _farthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def _norms(built: Engine) -> dict[str, float]:
    """Sum of absolute weights by role."""
    return {
        name: sum(p.detach().abs().double().sum().item() for chunk in role.model for p in chunk.parameters())
        for name, role in built.roles.items()
    }


def critic_warmup(path: str) -> dict[str, Any]:
    """Weights by role before and after each of three steps, the first two of which are the critic's alone."""
    algorithm = {"name": "ppo", "critic_warmup": 2, "minibatches": 2, "epochs": 2, "critic_lr": 1e-2}
    with _built(path, algorithm, {}) as built:
        values = built.values(_batch(built.algorithm, 0))
        seen, stats = [_norms(built)], []
        for step in range(3):
            stats.append(numbers(built.step(_batch(built.algorithm, step))))
            seen.append(_norms(built))
        rates = [role.optimizer.param_groups[0]["lr"] for role in (built.actor, built.roles["critic"])]
        return {"untrained": values.abs().max().item(), "weights": seen, "stats": stats, "rates": rates}


def critic_is_the_trunk(path: str) -> float:
    """With a head that reads one hidden number, the values are that number of the trunk's last norm."""
    with _built(path, {"name": "ppo"}, {}) as built:
        critic, actor = (unwrap(built.roles[name].model[0]) for name in ("critic", "actor"))
        with torch.no_grad():
            critic.output_layer.weight[0, 3] = 1.0
        hidden: list[torch.Tensor] = []
        actor.decoder.register_forward_hook(lambda _m, _i, output: hidden.append(output))
        fields = _batch(built.algorithm, 0)
        built.config = msgspec.structs.replace(built.config, micro_batch=64)
        values = built.values(fields)
        built.logprobs(fields)
        return (values - hidden[0][..., 3].t()).abs().max().item()


def prefilled_in_parts(path: str) -> list[float]:
    """Largest differences between fields filled for parts of a batch and for the whole of it."""
    with _built(path, ALGORITHMS["ppo"], {}) as built:
        fields = _batch(built.algorithm, 1)
        half = len(fields[MASK]) // 2
        whole = built.prefill_fields(fields)
        parts = [
            built.prefill_fields({k: t[cut] for k, t in fields.items()}) for cut in (slice(half), slice(half, None))
        ]
        added = sorted(whole.keys() - fields.keys())
        assert added == sorted(built.algorithm.needs)
        kept = {**fields, VALUES: torch.full_like(fields[MASK], 7.0)}
        assert torch.equal(built.prefill_fields(kept)[VALUES], kept[VALUES])  # what is there is not computed again
        return [(torch.cat([p[name] for p in parts]) - whole[name]).abs().max().item() for name in added]


def role_storages(path: str, dtype: str) -> dict[str, Any]:
    """Bytes by part before and after a step, and whether any storage is listed twice."""
    with _built(path, ALGORITHMS["ppo"], {}, model={"dtype": dtype}) as built:
        before = {name: sum(t.untyped_storage().nbytes() for t in ts) for name, ts in built.storages().items()}
        built.step(_batch(built.algorithm, 0))
        after = {name: sum(t.untyped_storage().nbytes() for t in ts) for name, ts in built.storages().items()}
        every = [t.untyped_storage().data_ptr() for ts in built.storages().values() for t in ts]
        return {"before": before, "after": after, "distinct": len(set(every)) == len(every)}


def critic_steps(path: str, parallel: dict[str, Any], directory: str, resume: bool = False) -> list[dict[str, float]]:
    """Four PPO steps, two of them the critic's alone, saved after the first; or the last three, from what was saved."""
    algorithm = {**ALGORITHMS["ppo"], "critic_warmup": 2}
    with _built(path, algorithm, parallel) as built:
        if resume:
            engine_state.load(built, Path(directory))
        stats = []
        for step in range(1 if resume else 0, 4):
            stats.append(numbers(built.step(_batch(built.algorithm, step))))
            if step == 0:
                engine_state.save(built, Path(directory))
        return stats


def gradients(path: str, algorithm: dict[str, Any], packed: bool) -> dict[str, float]:
    """The largest difference that other targets make to a step's gradient: at the tools' tokens, and at the policy's.
    And the largest gradient that reaches a log-prob or an entropy at a tool's token, and at a policy's."""
    plain, reached = _gradient(path, algorithm, packed, None)
    tools, _ = _gradient(path, algorithm, packed, 0.0)
    policy, _ = _gradient(path, algorithm, packed, 1.0)
    return {
        "largest": max(g.abs().max().item() for g in plain.values()),
        "tools": max((tools[name] - g).abs().max().item() for name, g in plain.items()),
        "policy": max((policy[name] - g).abs().max().item() for name, g in plain.items()),
        "reaches_tools": reached[0],
        "reaches_policy": reached[1],
    }


def _gradient(
    path: str, algorithm: dict[str, Any], packed: bool, change: float | None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """By parameter; the targets where the mask is `change` are others. And what reaches tokens of mask 0 and 1."""
    with engine(path, algorithm=algorithm, micro_batch=2) as built, pytest.MonkeyPatch.context() as patched:
        loss, inputs, vocabulary = built.algorithm.loss, passes.inputs, built.shape.vocab
        reached, changed = [0.0, 0.0], 0

        def other(batch: Fields, config: Any) -> passes.Inputs:
            nonlocal changed
            given = inputs(batch, config)
            where = batch[MASK] == (-1.0 if change is None else change)
            changed += int(where.sum())
            return given._replace(labels=torch.where(where, (given.labels + 1) % vocabulary, given.labels))

        def watched(logprobs_BT: torch.Tensor, fields: Fields) -> Any:
            for tensor in (logprobs_BT, fields[ENTROPY]):
                tensor.register_hook(lambda gradient: _note(gradient, fields[MASK], reached))
            return loss(logprobs_BT, fields)

        patched.setattr(passes, "inputs", other)
        patched.setattr(built.algorithm, "loss", watched)
        packing = PackingConfig(max_tokens=64) if packed else None
        built.step(assemble(built.algorithm.sequences([], _groups(built.shape.vocab), 0), packing))
        assert (changed > 0) == (change is not None)
        (chunk,) = built.model
        return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}, reached


def _note(gradient: torch.Tensor, mask: torch.Tensor, reached: list[float]) -> None:
    for value in (0, 1):
        here = gradient[mask == value].abs()
        reached[value] = max(reached[value], here.max().item() if here.numel() else 0.0)


def _groups(vocabulary: int) -> list[TrajectoryGroup]:
    """Two groups of three trajectories: a call, what the tool says, and an answer, of random lengths."""
    rng = np.random.default_rng(0)

    def ids() -> tuple[int, ...]:
        return tuple(rng.integers(0, vocabulary, rng.integers(2, 9)).tolist())

    def of_policy() -> Turn:
        written = ids()
        return Turn(written, tuple((-3 + 0.3 * rng.normal(size=len(written))).tolist()))

    def group() -> TrajectoryGroup:
        trajectories = tuple(Trajectory((of_policy(), Turn(ids()), of_policy()), "stop") for _ in range(3))
        return TrajectoryGroup(ids(), trajectories, tuple(Score(reward) for reward in (0.0, 1.0, 0.5)))

    return [group(), group()]


def chunked_logprobs(
    tokens: int, hidden: int, vocab: int, padded: int, chunks: list[int], dtypes: list[str], exact: bool = False
) -> list[dict[str, Any]]:
    """`_chunked` for every chunk size and dtype."""
    return [_chunked(tokens, hidden, vocab, padded, chunk, dtype, exact) for chunk in chunks for dtype in dtypes]


def _chunked(tokens: int, width: int, vocab: int, padded: int, chunk: int, dtype: str, exact: bool) -> dict[str, Any]:
    """The largest differences to log-softmax over whole logits in float64, and the most numbers in a tensor meanwhile.
    `padded` rows are cut over the ranks, `chunk` tokens are a chunk."""
    generator = torch.Generator().manual_seed(3)
    kind = getattr(torch, dtype)
    hidden, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(kind).requires_grad_()
        for size in ((tokens, width), (padded, width))
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    towards = torch.randn(tokens, 2, generator=generator, dtype=torch.float64)
    whole_hidden, whole_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = (whole_hidden @ whole_weight[:vocab].t()).log_softmax(-1)
    labels[::2] = log_p[::2].argmax(-1)
    expected = torch.stack([log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], -1)
    (expected * towards).sum().backward()

    size, rank = padded // dist.get_world_size(), dist.get_rank()
    mine = weight[rank * size : (rank + 1) * size]
    largest = [0]
    with Largest(largest):
        found = logprobs_and_entropy(hidden, mine, labels, vocab, dist.group.WORLD, most=chunk * size, exact=exact)
        (found[:, :2].double() * towards).sum().backward()
    dist.all_reduce(hidden.grad)
    of_rows = weight.grad[rank * size : (rank + 1) * size] - whole_weight.grad[rank * size : (rank + 1) * size]
    best = log_p.detach().topk(2, -1)
    clear = best.values[:, 0] - best.values[:, 1] > 0.1  # in any precision
    return {
        "values": (found[:, :2] - expected).abs().max().item(),
        "likeliest": torch.equal((found[:, 2] == 1)[clear], (labels == best.indices[:, 0])[clear]),
        "by_hidden": (hidden.grad - whole_hidden.grad).abs().max().item(),
        "by_weight": of_rows.abs().max().item(),
        "largest": largest[0],
        "dtype": [dtype, str(found.dtype).removeprefix("torch.")],
    }


class Largest(TorchDispatchMode):
    """Notes the most elements that a tensor had."""

    def __init__(self, into: list[int]) -> None:
        super().__init__()
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._into[0] = max(self._into[0], result.numel())
        return result
