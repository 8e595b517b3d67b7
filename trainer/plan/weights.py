"""How many weights a rank holds under a layout: what Megatron builds there, counted without building it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import ParallelConfig
from trainer.megatron.hf_config import ModelShape


@dataclass(frozen=True)
class Weights:
    """Weights of one rank: `dense` are replicated over data- and context-parallel ranks, `expert` over the ranks that
    hold the same experts. `largest` is the greatest part that full sharding gathers at a time."""

    dense: int
    expert: int
    largest: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def rank_weights(shape: ModelShape, parallel: ParallelConfig, stage: int) -> Weights:
    """Of a rank of pipeline stage `stage`."""
    layers = shape.layers // parallel.pipeline
    layer, expert = _layer(shape, parallel), _experts(shape, parallel)
    vocabulary = shape.padded_vocab(parallel.tensor) // parallel.tensor * shape.hidden
    first, last = stage == 0, stage == parallel.pipeline - 1
    tables = first + (last and not (shape.tied and first))  # a tied output layer on another stage is a copy
    ends = tables * vocabulary + (shape.hidden if last else 0)
    return Weights(layers * layer + ends, layers * expert, max(layer + expert, ends))


def _layer(shape: ModelShape, parallel: ParallelConfig) -> int:
    """One layer, its experts aside."""
    t, h = parallel.tensor, shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = (q + 2 * kv) * h // t + h * q // t
    attention += (q + 2 * kv) // t if shape.qkv_bias else 0
    attention += 2 * shape.head_dim if shape.qk_norm else 0
    feed_forward = shape.experts * h if shape.experts else 3 * shape.ffn * h // t
    return attention + feed_forward + 2 * h


def _experts(shape: ModelShape, parallel: ParallelConfig) -> int:
    """The experts of one layer that live on one rank."""
    here = shape.experts // parallel.expert
    return here * 3 * shape.expert_ffn * shape.hidden // parallel.expert_tensor_size
