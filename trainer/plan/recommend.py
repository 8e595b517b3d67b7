"""The layout to train a model with on so many GPUs: the first in the decision tables (docs/trainer/plan.md) that is
possible and fits.

Tensor parallelism (70-80 % efficient: an all-reduce in every layer) stays inside a node, pipeline parallelism (60-70 %:
bubbles) goes across, data parallelism (over 90 %) takes the ranks that are left. Context parallelism starts at 16384
tokens and leaves a rank 4096 at least: below that attention waits for the keys and values of others.

While a layout does not fit: activations recomputed (30 % more arithmetic, 50-70 % fewer activations); everything
sharded (ZeRO-3, gathers every layer; where the layout allows); optimizer states in host memory (as fast as the bus).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainer.config import ParallelConfig
from trainer.errors import ConfigError, MemoryPlanError
from trainer.megatron.hf_config import ModelShape
from trainer.memory.ledger import GIB, gib
from trainer.plan.estimate import Estimate, Workload, estimate

BILLION = 10**9
LONG, LEAST = 16384, 4096  # tokens of a sequence: from where on it may be cut, and the shortest piece
Shard = Literal["optimizer", "full"]
Recompute = Literal["none", "full"]
MOST_GPUS = 1 << 16
RUNTIME_BYTES = 2 * GIB  # CUDA's and NCCL's own, and what an allocator wastes


@dataclass(frozen=True)
class Row:
    """Models of fewer than `below` weights are cut by `tensor`, over one of these numbers of pipeline stages."""

    below: float
    tensor: int
    pipelines: tuple[int, ...]
    told: str


ROWS = (
    Row(7 * BILLION, 1, (1,), "below 7 B: data parallel only"),
    Row(30 * BILLION, 8, (1,), "7 B to 30 B: tensor 8, data the rest"),
    Row(100 * BILLION, 8, (2, 4), "30 B to 100 B: tensor 8, pipeline 2-4, data the rest"),
    Row(500 * BILLION, 8, (8, 16), "100 B to 500 B: tensor 8, pipeline 8-16, data the rest"),
    Row(float("inf"), 8, (16, 32, 64), "above 500 B: tensor 8, pipeline 16 and more, data the rest"),
)


@dataclass(frozen=True)
class Economy:
    """A saving of memory; each costs more of the speed than the one before."""

    shard: Shard
    recompute: Recompute
    offload: bool
    told: str

    def serves(self, work: Workload) -> bool:
        """Whether the run's optimizer can do with it: Muon needs whole matrices, on the device."""
        return work.optimizer != "muon" or not (self.shard == "full" or self.offload)


ECONOMIES = (
    Economy("optimizer", "none", False, "optimizer states sharded (ZeRO-1)"),
    Economy("optimizer", "full", False, "and activations recomputed"),
    Economy("full", "full", False, "everything sharded (ZeRO-3), activations recomputed"),
    Economy("optimizer", "full", True, "ZeRO-1, activations recomputed, optimizer states in host memory"),
)


def contexts(length: int) -> list[int]:
    """Over how many ranks sequences of `length` tokens may be cut, in the order to try."""
    pieces = [1 << n for n in range((length // LEAST).bit_length())] if length >= LONG else []
    return pieces or [1]


def row_of(parameters: int) -> int:
    """The index in ROWS for a model of that many weights."""
    return next(i for i, row in enumerate(ROWS) if parameters < row.below)


@dataclass(frozen=True)
class Hardware:
    """`gpus` of `memory` bytes each, `per_node` of them joined by a fast bus."""

    gpus: int
    memory: int
    per_node: int = 8

    @property
    def room(self) -> int:
        """Bytes of a GPU that training may use."""
        return self.memory - min(RUNTIME_BYTES, self.memory // 10)


@dataclass(frozen=True)
class Choice:
    """A layout that is possible, what it costs, and which lines of the tables led to it."""

    parallel: ParallelConfig
    economy: Economy
    estimate: Estimate
    row: str
    room: int
    length: int

    @property
    def why(self) -> str:
        """The lines of the tables that led to it."""
        context = self.parallel.context
        rank = f"a rank keeps the activations of {-(-self.length // context)}"
        cut = f"sequences of {self.length} tokens cut over {context} ranks, since they are long: {rank}"
        return "; ".join([self.row, *[cut] * (context > 1), self.economy.told])

    @property
    def fits(self) -> bool:
        return self.estimate.total <= self.room


def recommend(shape: ModelShape, hardware: Hardware, workload: Workload) -> Choice:
    """The first that fits, in the tables' order. Raises MemoryPlanError with the nearest miss, and with how many such
    GPUs it would take."""
    tried = list(candidates(shape, hardware, workload))
    for choice in tried:
        if choice.fits:
            return choice
    raise MemoryPlanError(_refusal(shape, hardware, workload, tried), exit_code=2)


def candidates(shape: ModelShape, hardware: Hardware, workload: Workload) -> Iterator[Choice]:
    """Every possible layout the tables name for this model, in their order; then those for larger models."""
    seen: set[tuple[ParallelConfig, Economy]] = set()
    for row in ROWS[row_of(shape.parameters) :]:
        for pipeline in row.pipelines:
            for economy, context in itertools.product(ECONOMIES, contexts(workload.length)):
                parallel = _cut(shape, hardware, row.tensor, pipeline, context, economy)
                if parallel is None or (parallel, economy) in seen or not economy.serves(workload):
                    continue
                seen.add((parallel, economy))
                work = dataclasses.replace(workload, recompute=economy.recompute, offload=economy.offload)
                found = estimate(shape, parallel, work)
                yield Choice(parallel, economy, found, row.told, hardware.room, work.length)


def _cut(
    shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int, context: int, economy: Economy
) -> ParallelConfig | None:
    """The table's sizes, as far as the model and the GPUs can be divided by them; None where they cannot at all. Whole
    nodes that would be left over by the number of layers stay idle."""
    pipeline = _divisor(pipeline, shape.layers)
    usable = hardware.gpus // pipeline
    usable -= usable % hardware.per_node if usable > hardware.per_node else 0
    if not usable:
        return None
    tensor = _divisor(
        min(tensor, hardware.per_node), shape.heads, shape.kv_heads, shape.expert_ffn or shape.ffn, usable
    )
    context = _divisor(context, usable // tensor)
    expert = _divisor(shape.experts, shape.experts, usable) if shape.experts else 1
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": usable // (tensor * context)}
    sizes |= {"expert": expert, "sequence": tensor > 1}
    try:
        parallel = ParallelConfig(**sizes, expert_tensor=1 if expert > 1 else None, shard=economy.shard)  # type: ignore[arg-type]
        shape.check_parallel(parallel)
    except ConfigError:
        return None
    return parallel


def _divisor(most: int, *of: int) -> int:
    """The greatest number up to `most` that divides all of them."""
    return next(n for n in range(max(most, 1), 0, -1) if not any(whole % n for whole in of))


def _refusal(shape: ModelShape, hardware: Hardware, workload: Workload, tried: list[Choice]) -> str:
    if not tried:
        return f"{hardware.gpus} GPUs cannot be divided as this model wants. Take a multiple of {hardware.per_node}."
    nearest = min(tried, key=lambda choice: choice.estimate.total)
    p = nearest.parallel
    problem = f"no layout fits on {hardware.gpus} GPUs with {gib(hardware.memory)} each: the nearest (tensor {p.tensor}"
    problem += f", pipeline {p.pipeline}, context {p.context}, data {p.data}; {nearest.economy.told})"
    problem += f" needs {gib(nearest.estimate.total)} of {gib(hardware.room)}"
    enough = _enough(shape, hardware, workload)
    advice = f"Take {enough} such GPUs" if enough else "Take GPUs with more memory"
    return f"{problem}. {advice}, lower --length or micro_batch, or train a smaller model."


def _enough(shape: ModelShape, hardware: Hardware, workload: Workload) -> int:
    """The least power-of-two multiple of the GPUs at hand that will do; 0 if none does."""
    gpus = hardware.gpus * 2
    while gpus <= MOST_GPUS:
        more = dataclasses.replace(hardware, gpus=gpus)
        if any(choice.fits for choice in candidates(shape, more, workload)):
            return gpus
        gpus *= 2
    return 0
