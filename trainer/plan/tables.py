"""Which way to cut a model and what to give up for memory, by its size: the decision tables of the design.

Parallelism, by the number of weights. Tensor parallelism (70-80 % efficient: an all-reduce in every layer) stays inside
a node, pipeline parallelism (60-70 %: bubbles) goes across, data parallelism (over 90 %) takes the ranks that are left.

    below 7 B        data parallel only
    7 B to 30 B      tensor 8, data N/8
    30 B to 100 B    tensor 8, pipeline 2-4, data the rest
    100 B to 500 B   tensor 8, pipeline 8-16, data the rest
    experts          as above, and spread over as many ranks as match their number
    long sequences   as above, and context parallel as far as activations need: 16384 tokens and more, of which a rank
                     keeps 4096 at least (below that attention waits for the keys and values of others)

Memory, in this order while a layout does not fit: optimizer states sharded (ZeRO-1, always on); activations recomputed
(30 % more arithmetic, 50-70 % fewer activations); everything sharded (ZeRO-3, gathers every layer; where the layout
allows); optimizer states in host memory (as fast as the bus).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BILLION = 10**9
LONG, LEAST = 16384, 4096  # tokens of a sequence: from where on it may be cut, and the shortest piece
Shard = Literal["optimizer", "full"]
Recompute = Literal["none", "full"]


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
    """What is given up for memory; each costs more of the speed than the one before."""

    shard: Shard
    recompute: Recompute
    offload: bool
    told: str


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
