"""Cases about phases that share memory, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tests.trainer.batches import random_batch, sampled_batch
from tests.trainer.cases import engine
from trainer.config import MemoryConfig, TrainerConfig, strict
from trainer.errors import TrainerError
from trainer.megatron.hf_config import load_shape
from trainer.megatron.parallel import gather_json
from trainer.memory.build import build_memory, open_serving
from trainer.memory.ledger import Restartable, private_bytes
from trainer.memory.phases import SharedMemory
from trainer.tiny_model import tiny_run

GATEWAY = {"url": "http://unused"}


def phases(
    path: str, parallel: dict[str, int], directory: str, spare: float | None, steps: int = 3, **config: Any
) -> dict[str, Any]:
    """Steps of PPO in phases beside a server that takes as much as the trainer. `spare`: the budget, in parts of what
    all components together hold; None: no memory manager. Losses, what was held, and resident memory by phase."""
    algorithm = {"name": "ppo", "kl_coef": 0.1, "minibatches": 2}
    given = {"algorithm": algorithm, "gateway": GATEWAY, "optimizer": {"lr": 1e-2}, "parallel": parallel} | config
    log: list[str] = []
    with engine({"model": {"path": path}} | given) as built:
        own = sum(t.untyped_storage().nbytes() for tensors in built.storages().values() for t in tensors)
        trainer = sum(gather_json(2 * own))  # Adam's states are not there yet
        serving = Restartable(
            "engine", trainer, lambda: log.append("wake"), lambda: log.append("sleep"), "instantiated"
        )
        memory = build_memory(built.config, built, [serving])
        if spare is not None:
            section = {"budget_gib": spare * 2 * trainer / 2**30, "directory": directory}
            memory = _memory(built, section, serving)
        result: dict[str, Any] = {"losses": [], "held": [], "resident": [], "log": log, "took": []}
        for step in range(steps):
            result["took"].append(sorted(memory.enter("rollout")))
            result["resident"].append(private_bytes())
            memory.enter("inference")
            fields = built.prefill_fields(sampled_batch(built.shape.vocab, seed=step))
            memory.enter("train")
            stats = built.step(fields)
            result["resident"].append(private_bytes())
            result["losses"].append([stats.loss, stats.grad_norm, stats.metrics["critic_loss"]])
            if isinstance(memory, SharedMemory):
                result["held"].append(memory.ledger.held <= memory.ledger.budget)
        result["own"] = sum(t.untyped_storage().nbytes() for ts in built.storages().values() for t in ts)
        return result


def _memory(built: Any, section: dict[str, Any], serving: Restartable) -> Any:
    config = dataclasses.replace(built.config, memory=MemoryConfig(**section))
    return build_memory(config, built, [serving])


def phases_refused(path: str, parallel: dict[str, int], directory: str) -> list[Any]:
    """What is said to a budget that no phase fits into, by a model that is asked while it is away, and when the last
    rank cannot write what it holds."""
    problems: list[Any] = []

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except TrainerError as error:
            problems.append([type(error).__name__, str(error)])

    with engine({"model": {"path": path}, "parallel": parallel}) as built:
        serving = Restartable("engine", 1 << 20, lambda: None, lambda: None, "instantiated")
        with told():
            _memory(built, {"budget_gib": 1e-4, "directory": directory}, serving)
        memory = _memory(built, {"budget_gib": 1.0, "directory": directory}, serving)
        memory.ledger.put_away("actor")
        with told():
            built.logprobs(random_batch(built.shape.vocab))
        memory.ledger.bring("actor")
        # One rank's disk is full, or not there: all ranks must leave, none may wait for it.
        mine = f"{directory}/gone" if dist.get_rank() == dist.get_world_size() - 1 else directory
        memory = _memory(built, {"budget_gib": 1.0, "directory": mine}, serving)
        with told():
            memory._everywhere(memory.ledger.put_away, ("actor",))
    return problems


def opened(path: str, parallel: dict[str, int], memory: dict[str, Any]) -> list[tuple[str, str]]:
    """The server's components, with their states, when nothing of the trainer is there yet."""
    given = {"data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": 1, "model": {"path": path}}
    config = strict.build(TrainerConfig, tiny_run(given | {"parallel": parallel, "memory": memory}))
    serving = open_serving(config, load_shape(path))
    return [(component.name, component.state) for component in serving.components]
