"""The components of a run, from its configuration and its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from trainer.config import MemoryConfig, TrainerConfig
from trainer.errors import ConfigError, MemoryPlanError, TrainerError
from trainer.megatron.engine import Engine
from trainer.megatron.hf_config import load_shape
from trainer.megatron.optimizer import moment_bytes
from trainer.megatron.parallel import broadcast_json, on_rank_zero
from trainer.memory.ledger import GIB, Component, Ledger, Restartable, State, device_bytes
from trainer.memory.offload import DiskVault, HostVault, StorageComponent, Vault, guard
from trainer.memory.phases import Memory, NothingShared, SharedMemory
from trainer.memory.serving import Fleet, ServingEngine

PUBLISHED_BYTES = {"bfloat16": 2, "float32": 4}


class Models(Protocol):
    """Models that rewards hold in host memory."""

    @property
    def nbytes(self) -> int: ...

    def rest(self) -> None: ...

    def wake(self) -> None: ...


def build_memory(
    config: TrainerConfig,
    engine: Engine,
    serving: Sequence[Component] | None = None,
    models: Models | None = None,
) -> Memory:
    """The memory manager of a run; one that does nothing unless the configuration has a section `memory`. Collective.

    `serving`: what shares the device besides the trainer's own components; None: what `memory.serving` says. `models`:
    those of the rewards (`RankZeroComponents` in trainer/run.py), on rank 0. Raises OverBudget when a phase cannot be
    held, SleepTimeout when the fleet cannot be asked, ConfigError.
    """
    if config.memory is None:
        return NothingShared()
    budget = config.memory.budget_gib
    ledger = Ledger(int(budget * GIB) if budget is not None else device_bytes())
    for owned in trainer_components(config.memory, engine):
        ledger.add(owned)
    close: Callable[[], None] = _nothing
    if serving is None:
        serving, close = _fleet(config)
    for component in (*serving, *_reward_model(models)):
        ledger.add(component)
    return SharedMemory(ledger, int(config.memory.reserve_gib * GIB), close)


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


def _fleet(config: TrainerConfig) -> tuple[Sequence[Component], Callable[[], None]]:
    """The serving side as this rank sees it: rank 0 gives the orders, the others only count it."""
    assert config.memory is not None
    section = config.memory.serving
    if section is None:
        return [], _nothing
    kv_cache = int(section.kv_cache_gib * GIB)
    engine = int(section.engine_gib * GIB) if section.engine_gib is not None else _published(config)
    opened = on_rank_zero(lambda: _open(section, engine))
    awake = broadcast_json(opened[1].state == "instantiated" if opened is not None else None)
    state: State = "instantiated" if awake else "destroyed"
    caches = Restartable("kv_cache", kv_cache, _nothing, _nothing, state)  # it comes and goes with the engine
    if opened is not None:
        return [opened[1], caches], opened[0].close
    return [Restartable("engine", engine, _nothing, _nothing, state), caches], _nothing


def _open(section: Any, engine: int) -> tuple[Fleet, ServingEngine]:
    fleet = Fleet(section)
    return fleet, ServingEngine(fleet, engine, section.level)


def _reward_model(models: Models | None) -> Sequence[Component]:
    """What rewards hold, as rank 0 knows. They run on the CPU: where there is a GPU, that is not the shared memory."""
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


def _published(config: TrainerConfig) -> int:
    dtype = config.publish.dtype if config.publish is not None else "bfloat16"
    return load_shape(config.model.path).parameters * PUBLISHED_BYTES[dtype]


def _nothing() -> None: ...
