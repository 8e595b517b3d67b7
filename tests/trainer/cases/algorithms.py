"""Cases about algorithms in the engine, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.trainer.algorithms.batches import groups, preferences
from tests.trainer.cases import engine, numbers
from trainer.algorithms.base import VALUES, Algorithm
from trainer.batch import MASK, Fields, assemble
from trainer.checkpoint import engine_state
from trainer.config import PackingConfig
from trainer.megatron.convert import unwrap
from trainer.megatron.engine import Engine

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
    settings = {"gateway": {"url": "http://unused"}, "optimizer": {"lr": 3e-3}, "micro_batch": 2}
    return engine({"model": {"path": path}, "parallel": parallel, "algorithm": algorithm} | settings | config)


def _batch(algorithm: Algorithm, step: int, packing: PackingConfig | None = None, ranks: int = 1) -> Fields:
    sequences = algorithm.sequences(preferences(4, seed=step), groups(3, 3, seed=step), 5)
    return assemble(sequences, packing, ranks=ranks, minibatches=algorithm.minibatches)


def algorithms(
    path: str, parallel: dict[str, Any], names: list[str], packed: bool = False
) -> dict[str, list[dict[str, float]]]:
    """All numbers of two steps with each of the algorithms."""
    result = {}
    for name in names:
        with _built(path, ALGORITHMS[name], parallel) as built:
            packing = PackingConfig(max_tokens=40) if packed else None
            ranks = parallel.get("data", 1)
            result[name] = [numbers(built.step(_batch(built.algorithm, step, packing, ranks))) for step in range(2)]
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
        built.config = dataclasses.replace(built.config, micro_batch=64)
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
    with _built(path, ALGORITHMS["ppo"], {}, model={"path": path, "dtype": dtype}) as built:
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
