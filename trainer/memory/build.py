"""The components of a run, from its configuration and its engine, and the device that they share with a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.config import MemoryConfig, TrainerConfig
from trainer.errors import ConfigError, MemoryPlanError, TrainerError
from trainer.megatron.engine import Engine
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.optimizer import moment_bytes
from trainer.megatron.parallel import broadcast_json, gather_json, on_rank_zero
from trainer.memory.ledger import GIB, Component, Ledger, Restartable, State, device_bytes
from trainer.memory.offload import DiskVault, HostVault, StorageComponent, Vault, guard
from trainer.memory.phases import Memory, NothingShared, SharedMemory
from trainer.memory.serving import Fleet, ServingEngine
from trainer.plan.estimate import Estimate, estimate
from trainer.plan.recommend import Hardware
from trainer.plan.report import LONGEST, workload_of

PUBLISHED_BYTES = {"bfloat16": 2, "float32": 4}


class Models(Protocol):
    """Models that rewards hold in host memory."""

    @property
    def nbytes(self) -> int: ...

    def rest(self) -> None: ...

    def wake(self) -> None: ...


@dataclass(frozen=True)
class Serving:
    """The server that shares the device with the trainer, as this rank sees it: rank 0 gives the orders (`fleet`), the
    others only count what it holds. Close it at the end."""

    components: Sequence[Component] = ()
    fleet: Fleet | None = None

    def close(self) -> None:
        """Leave the device to the server."""
        if self.fleet is not None:
            self.fleet.close()


def open_serving(config: TrainerConfig, shape: ModelShape) -> Serving:
    """The server that `memory.serving` names, if any. Collective, before the engine is built: where the device has no
    room for the trainer beside the server, the server sleeps from now on. Raises MemoryPlanError."""
    section = config.memory.serving if config.memory is not None else None
    if config.memory is None or section is None:
        return Serving()
    fleet: Any = on_rank_zero(lambda: Fleet(section))
    nbytes = int(section.engine_gib * GIB) if section.engine_gib is not None else _published(config, shape)
    caches = int(section.kv_cache_gib * GIB)
    awake = not broadcast_json(on_rank_zero(lambda: fleet.asleep()))
    room = budget_bytes(config.memory, nbytes + caches if awake else 0) - reserve_bytes(config, shape)
    if _trainer_bytes(config, shape) + nbytes + caches > room:
        on_rank_zero(lambda: fleet.sleep())  # asleep already, its orders may be of a run that has ended: give them anew
        awake = False
    state: State = "instantiated" if awake else "destroyed"
    engine = on_rank_zero(lambda: ServingEngine(fleet, nbytes, section.level))
    counted = Restartable("kv_cache", caches, _nothing, _nothing, state)  # it comes and goes with the engine
    return Serving([engine or Restartable("engine", nbytes, _nothing, _nothing, state), counted], fleet)


def build_memory(
    config: TrainerConfig, engine: Engine, serving: Sequence[Component] = (), models: Models | None = None
) -> Memory:
    """The memory manager of a run; one that does nothing unless the configuration has a section `memory`. Collective.

    `serving`: what shares the device besides the trainer's own components (`open_serving`). `models`: those of the
    rewards (`RankZeroComponents` in trainer/run.py), on rank 0. Raises MemoryPlanError when a phase cannot be held,
    ConfigError.
    """
    if config.memory is None:
        return NothingShared()
    awake = sum(component.bytes for component in serving if component.state == "instantiated")
    ledger = Ledger(budget_bytes(config.memory, awake))
    for component in (*trainer_components(config.memory, engine), *serving, *_reward_model(models)):
        ledger.add(component)
    return SharedMemory(ledger, reserve_bytes(config, engine.shape))


def budget_bytes(section: MemoryConfig, awake: int) -> int:
    """The bytes that components may hold: `budget_gib`, or the room for them, on the rank that has least. On a GPU that
    room is the free bytes, those of this process, and the server's part that is awake (`awake` bytes), less the bytes
    that CUDA and NCCL take for themselves. Collective."""
    if section.budget_gib is not None:
        return int(section.budget_gib * GIB)
    here = Hardware(1, device_bytes() + awake).room if torch.cuda.is_available() else device_bytes()
    return int(min(gather_json(here)))


def reserve_bytes(config: TrainerConfig, shape: ModelShape) -> int:
    """The reserve of the budget: `reserve_gib`, or on a GPU the activations and logits that the plan estimates."""
    assert config.memory is not None
    if config.memory.reserve_gib is not None:
        return int(config.memory.reserve_gib * GIB)
    found = _estimate(config, shape)
    return found.activations + found.logits if torch.cuda.is_available() else 0


def _trainer_bytes(config: TrainerConfig, shape: ModelShape) -> int:
    """The bytes that the trainer's components will hold of a device."""
    found = _estimate(config, shape)
    ranks = 1 if torch.cuda.is_available() else config.parallel.world_size
    return ranks * (found.weights + found.gradients + found.optimizer)


def _estimate(config: TrainerConfig, shape: ModelShape) -> Estimate:
    return estimate(shape, config.parallel, workload_of(config, min(LONGEST, shape.max_positions)))


def trainer_components(config: MemoryConfig, engine: Engine) -> Iterator[StorageComponent]:
    """One for each entry of `engine.storages()`; a model whose weights are away refuses to run."""
    for name in engine.storages():
        component = StorageComponent(
            name,
            lambda name=name: engine.storages()[name],  # type: ignore[misc]
            _vault(config),
            scratch=lambda name=name: _gradients(engine, name),  # type: ignore[misc]
            expected=_expected(engine, name),
        )
        for chunk in _chunks(engine, name):
            guard(chunk, component)
        yield component


def _vault(config: MemoryConfig) -> Vault:
    if config.offload == "host" and not torch.cuda.is_available():
        raise ConfigError("memory.offload", "host is where a trainer without a GPU is already", "Set it to disk")
    on_disk = config.offload == "disk" or not torch.cuda.is_available()
    return DiskVault(config.directory) if on_disk else HostVault()


def _gradients(engine: Engine, name: str) -> Iterable[torch.Tensor]:
    """The gradient buffers among a role's storages: every step zeroes them before it uses them."""
    flat = [chunk for chunk in _chunks(engine, name) if hasattr(chunk, "expert_parallel_buffers")]
    return [b.grad_data for chunk in flat for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _chunks(engine: Engine, name: str) -> list[Any]:
    """The chunks of a role's model; none for the name of an optimizer."""
    role = engine.roles.get(name)  # type: ignore[call-overload]
    return role.model if role is not None else []


def _expected(engine: Engine, name: str) -> int:
    """Bytes an optimizer will hold once its first step has made its states; 0 for what is there already."""
    if not name.endswith("_optimizer"):
        return 0
    optimizer: Any = engine.roles[name.removesuffix("_optimizer")].optimizer  # type: ignore[index]
    held = sum(tensor.untyped_storage().nbytes() for tensor in engine.storages()[name])
    return held + moment_bytes(optimizer)


def _reward_model(models: Models | None) -> Sequence[Component]:
    """The rewards' models, as rank 0 knows them. They run on the CPU: with a GPU, that is not the shared memory."""
    nbytes: int = broadcast_json(models.nbytes if models is not None else 0)
    if nbytes == 0 or torch.cuda.is_available():
        return []
    start, stop = (_nothing, _nothing) if models is None else (lambda: _wake(models), models.rest)
    return [Restartable("reward_model", nbytes, start, stop, "instantiated")]


def _wake(models: Models) -> None:
    try:
        models.wake()
    except TrainerError as error:
        raise MemoryPlanError(f"the models of the rewards did not come back: {error}") from error


def _published(config: TrainerConfig, shape: ModelShape) -> int:
    dtype = config.publish.dtype if config.publish is not None else "bfloat16"
    return shape.parameters * PUBLISHED_BYTES[dtype]


def _nothing() -> None: ...
