"""Cases about memory: what training really holds, and phases that share it, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.batches import random_batch, sampled_batch
from tests.trainer.cases import engine
from trainer.checkpoint.engine_state import StagedEngine
from trainer.checkpoint.shards import Buffers
from trainer.config import MemoryConfig, TrainerConfig, strict
from trainer.errors import TrainerError
from trainer.megatron.hf_config import load_shape
from trainer.megatron.parallel import device, gather_json
from trainer.memory.build import build_memory, open_serving
from trainer.memory.ledger import Restartable, private_bytes
from trainer.memory.phases import SharedMemory
from trainer.tiny_model import tiny_run


def phases(
    path: str, parallel: dict[str, int], directory: str, spare: float | None, steps: int = 3, **config: Any
) -> dict[str, Any]:
    """Steps of PPO in phases beside a server that takes as much as the trainer. `spare`: the budget, in parts of what
    all components together hold; None: no memory manager. Losses, what was held, and resident memory by phase."""
    algorithm = {"name": "ppo", "kl_coef": 0.1, "minibatches": 2}
    log: list[str] = []
    with engine(path, parallel, **{"algorithm": algorithm, "optimizer": {"lr": 1e-2}} | config) as built:
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
    config = msgspec.structs.replace(built.config, memory=MemoryConfig(**section))
    return build_memory(config, built, [serving])


def phases_refused(path: str, parallel: dict[str, int], directory: str) -> list[Any]:
    """Messages to a budget that no phase fits into, by a model that is asked while it is away, and when the last rank
    cannot write what it holds."""
    problems: list[Any] = []

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except TrainerError as error:
            problems.append([type(error).__name__, str(error)])

    with engine(path, parallel) as built:
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


def measured(path: str, parallel: dict[str, Any], rows: int = 2, length: int = 64, **config: Any) -> dict[str, int]:
    """Bytes of this rank: weights, gradients, optimizer (after a step), and what one micro-batch keeps for its
    backward pass."""
    with engine(path, parallel, micro_batch=rows, **config) as built:
        fields = random_batch(built.shape.vocab, rows=rows * parallel.get("data", 1), width=length)
        kept = _kept_by(lambda: built.step(fields), built)
        role = built.roles["actor"]
        buffers = [b for chunk in role.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights = sum(p.numel() * p.element_size() for chunk in role.model for p in chunk.parameters())
        return {
            "stage": ps.get_pipeline_model_parallel_rank(),
            "parameters": sum(p.numel() for chunk in role.model for p in chunk.parameters()),
            "weights": weights,
            "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
            "optimizer": sum(t.untyped_storage().nbytes() for t in built.storages()["actor_optimizer"]),
            "kept": kept,
            "rank": dist.get_rank(),
        }


def reference_bytes(path: str, parallel: dict[str, Any]) -> int:
    """Of this rank."""
    with engine(path, parallel, algorithm={"name": "dpo"}) as built:
        return sum(t.untyped_storage().nbytes() for t in built.storages()["reference"])


def _kept_by(step: Any, built: Any) -> int:
    """Bytes of distinct storages that autograd keeps at one time, the weights aside."""
    weights = {p.untyped_storage().data_ptr() for chunk in built.model for p in chunk.parameters()}
    sizes: dict[int, int] = {}
    uses: Counter[int] = Counter()  # how many saved tensors use a storage
    peak = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal peak
            storage = tensor.untyped_storage()
            self.tensor, self.key = tensor, storage._cdata
            sizes[self.key] = 0 if storage.data_ptr() in weights else storage.nbytes()
            uses[self.key] += 1
            peak = max(peak, sum(sizes[key] for key, count in uses.items() if count))

        def __del__(self) -> None:
            uses[self.key] -= 1

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        step()
    return peak


class _Made(TorchDispatchMode):
    """Bytes of the storages that operators have made, those that are alive and their peak."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self.alive, self.peak = known, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = _storage(tensor)
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def saving(path: str, parallel: dict[str, Any], copied: bool, **model: Any) -> int:
    """The most bytes of this rank that exist because of a checkpoint, the second of a run."""
    with engine(path, parallel, model=model) as built:
        built.step(random_batch(built.shape.vocab, rows=4))
        known = {_storage(t)._cdata for tensors in built.storages().values() for t in tensors}
        buffers = Buffers() if copied else None
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, _Made(known) as made:
            for directory in (first, second):
                StagedEngine(built, Path(directory), buffers).write()
            return made.peak


def saving_on_gpu(path: str, parallel: dict[str, Any] | None = None, **model: Any) -> list[int]:
    """The bytes of the device that a checkpoint takes for a moment, and the model's parameters."""
    with engine(path, parallel, model=model) as built, tempfile.TemporaryDirectory() as directory:
        fields = random_batch(built.shape.vocab, rows=4)
        built.step({name: field.to(device()) for name, field in fields.items()})
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        StagedEngine(built, Path(directory), Buffers()).write()
        parameters = sum(p.numel() for chunk in built.model for p in chunk.parameters())
        return [torch.cuda.max_memory_allocated() - held, parameters]
