"""`hotswap train --plan`: what a configuration's layout needs, and the layout the tables recommend instead."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from trainer.config import ClassifierReward, PpoConfig, TrainerConfig
from trainer.config.algorithms import DpoConfig, PolicyConfig
from trainer.errors import ConfigError
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.memory.ledger import GIB, gib
from trainer.plan.estimate import Estimate, Workload, bytes_to_save, estimate
from trainer.plan.recommend import Choice, Hardware, recommend

LONGEST = 4096  # tokens, unless the model takes fewer or --length says otherwise


@dataclass(frozen=True)
class PlanOptions:
    """The additions of the command line to the configuration; None: the layout's number of GPUs, and a length of our
    own."""

    gpus: int | None = None
    memory_gib: float = 80.0
    per_node: int = 8
    length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("gpus", self.gpus), ("gpus-per-node", self.per_node), ("length", self.length)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name}", f"must be positive, got {value}", "Give a number above 0")
        if not self.memory_gib > 0:
            raise ConfigError("--gpu-memory", f"must be positive, got {self.memory_gib:g}", "Give GiB of one GPU")


def workload_of(config: TrainerConfig, length: int) -> Workload:
    """The workload of a run with this configuration."""
    algorithm, batch = config.algorithm, config.batch
    samples = getattr(algorithm, "samples_per_prompt", 1) if isinstance(algorithm, PolicyConfig) else 1
    together = 2 if isinstance(algorithm, DpoConfig) else 1  # a preference's answers stay in one micro-batch
    reference = isinstance(algorithm, DpoConfig) or getattr(algorithm, "kl_coef", 0.0) > 0
    packed = config.packing is not None
    return Workload(
        length=config.packing.max_tokens if config.packing is not None else length,
        micro_batch=1 if packed else max(config.micro_batch // together, 1) * together,
        sequences=-(-batch * samples * together // getattr(algorithm, "minibatches", 1)),
        dtype=config.model.dtype,
        recompute=config.model.recompute,
        offload=config.optimizer.offload,
        critics=int(isinstance(algorithm, PpoConfig)),
        references=int(reference and config.lora is None),
        lora=config.lora,
        optimizer=config.optimizer.name,
    )


def reward_models(config: TrainerConfig) -> dict[str, int]:
    """Bytes of host memory that classifiers take while answers are scored, by the list of rewards that names them: as
    many as their files, for each worker. 0 where the files are not there."""
    lists = {"rewards": config.rewards} if config.gateway is not None else {}
    lists |= {f"eval {entry.name}": entry.rewards for entry in config.eval if entry.rewards is not None}
    models = {name: [r for r in rewards if isinstance(r, ClassifierReward)] for name, rewards in lists.items()}
    return {name: sum(file_bytes(m.path) * m.workers for m in found) for name, found in models.items() if found}


def file_bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def print_plan(config: TrainerConfig, options: PlanOptions, console: Console | None = None) -> None:
    """Print both. Raises ConfigError for a layout the model cannot be cut into, MemoryPlanError when none fits."""
    console = console or Console()
    shape = load_shape(config.model.path)
    shape.check_parallel(config.parallel)
    work = workload_of(config, min(options.length or LONGEST, shape.max_positions))
    gpus = options.gpus or config.parallel.world_size
    hardware = Hardware(gpus, int(options.memory_gib * GIB), options.per_node)
    _say_what(console, config, shape, work)
    _say_rewards(console, config)
    _say_configured(console, config, shape, work, hardware)
    choice = recommend(shape, hardware, work)
    _say_recommended(console, choice, hardware)
    if config.checkpoint is not None:
        taken = bytes_to_save(shape, choice.parallel, work, copied=config.checkpoint.asynchronous)
        ranks = "every rank" if choice.parallel.shard == "full" else "each rank of the first data-parallel replica"
        console.print(f"a checkpoint: up to {gib(taken)} of host memory for {ranks}, beside the GPUs'")


def as_yaml(choice: Choice) -> str:
    """The keys of a configuration that choose this layout."""
    parallel = {
        field.name: getattr(choice.parallel, field.name)
        for field in msgspec.structs.fields(choice.parallel)
        if getattr(choice.parallel, field.name) != field.default
    }
    lines = [f"parallel: {_flow(parallel)}", f"model: {{recompute: {choice.economy.recompute}}}"]
    return "\n".join([*lines, "optimizer: {offload: true}"] if choice.economy.offload else lines)


def _flow(values: dict[str, Any]) -> str:
    told = {True: "true", False: "false"}
    return "{" + ", ".join(f"{k}: {told.get(v, v) if isinstance(v, bool) else v}" for k, v in values.items()) + "}"


def _say_what(console: Console, config: TrainerConfig, shape: ModelShape, work: Workload) -> None:
    mixture = f", {shape.experts} experts of which {shape.experts_per_token} work" if shape.experts else ""
    others = [f"{work.critics} critic"] * bool(work.critics) + [f"{work.references} reference"] * bool(work.references)
    besides = f" and {', '.join(others)}" if others else ""
    actor = "actor" if work.lora is None else f"adapters of rank {work.lora.rank}"
    console.print(f"{shape.family}, {shape.parameters / 1e9:.2f} B weights{mixture}; {actor}{besides}, {work.dtype}")
    console.print(f"{config.algorithm.name}: micro-batches of {work.rows(config.parallel)} x {work.length} tokens")


def _say_rewards(console: Console, config: TrainerConfig) -> None:
    for name, size in reward_models(config).items():
        told = gib(size) if size else "an unknown part (their files are not here)"
        console.print(f"classifiers of {name}: {told} of host memory, beside the GPUs'")


def _say_configured(
    console: Console, config: TrainerConfig, shape: ModelShape, work: Workload, hardware: Hardware
) -> None:
    p = config.parallel
    if p.world_size == 1 and hardware.gpus > 1:
        return
    found = estimate(shape, p, work)
    verdict = "fits" if found.total <= hardware.room else f"does not fit into {gib(hardware.room)}"
    console.print(_table(f"configured: {_layout(p)} -- {verdict}", found))


def _say_recommended(console: Console, choice: Choice, hardware: Hardware) -> None:
    used = choice.parallel.world_size
    gpus = f"{used}" if used == hardware.gpus else f"{used} of {hardware.gpus}"
    title = f"recommended for {gpus} x {gib(hardware.memory)}: {_layout(choice.parallel)}"
    console.print(_table(title, choice.estimate))
    console.print(f"{choice.why}; {gib(choice.room - choice.estimate.total)} to spare a GPU")
    console.print(as_yaml(choice), highlight=False)


def _layout(p: Any) -> str:
    parts = [("tensor", p.tensor), ("pipeline", p.pipeline), ("context", p.context), ("expert", p.expert)]
    return ", ".join(f"{name} {size}" for name, size in [*parts, ("data", p.data)] if size > 1 or name == "data")


def _table(title: str, found: Estimate) -> Table:
    table = Table(*(field.name for field in dataclasses.fields(found)), "total", title=title, title_justify="left")
    table.add_row(*(gib(getattr(found, field.name)) for field in dataclasses.fields(found)), gib(found.total))
    return table
