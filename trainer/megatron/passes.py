"""One pass of a batch through a model: cut into micro-batches, through Megatron's schedule, in any layout.

The schedule is plain accumulation without pipeline stages, 1F1B with them, and the interleaved one where stages hold
several chunks of layers. In every layout `reduce` is asked about whole sequences: under context parallelism every
rank gets the outputs of the others as well, and the gradient of its own part goes back.

Shapes: B sequences, T label positions, N context-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trainer.algorithms.base import ENTROPY, LIKELIEST
from trainer.batch import LABELS, MASK, POSITIONS, ROUTING, SEGMENTS, TOKENS, Fields
from trainer.megatron.attention import local_positions, rotary_positions, whole_sequence
from trainer.megatron.convert import unwrap
from trainer.megatron.router import routing_pass

FP8_TOKENS = 16  # what 8-bit matrix products want the number of tokens to be a multiple of


class Inputs(NamedTuple):
    """The inputs of this rank: its part [B, T / N] of the sequences, and the segments of all of them."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    rotary: Tensor | None
    segments: Tensor | None
    padding: Tensor | None
    routing: Tensor | None


def run(
    chunks: list[Any],
    config: TransformerConfig,
    micro_batches: list[Fields],
    reduce: Callable[[Tensor, Fields], Any],
    *,
    forward_only: bool,
    values: bool = False,
) -> list[Any]:
    """The results of `reduce(output_BT, micro_batch)` for each micro-batch of this data-parallel rank, on the last
    pipeline stage; an empty list on the others. Collective.

    `chunks` are the model's parts on this rank. Their output are the log-probs float32 [B, T] of the tokens at t + 1,
    or of the field LABELS, and the micro-batch's fields ENTROPY and LIKELIEST are those there; or the values of a
    critic (`values`). To train, `reduce` returns (loss, number of tokens, anything).
    """
    size, width = micro_batches[0][MASK].shape

    def forward(batches: Iterator[Fields], part: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(batches)
        given = inputs(batch, config)
        labels = None if values else given.labels
        experts = _of_tensor_rank(given.routing, config)
        with rotary_positions(given.rotary), routing_pass(experts, training=not forward_only):
            output = part(
                given.tokens,
                given.positions,
                given.segments,
                labels=labels,
                padding_mask=_of_layers(given.padding, unwrap(part), config),
            )

        def reduced(out: Tensor, **_: Any) -> Any:
            whole = _whole(out, width)
            return reduce(
                whole[..., 0], batch if values else batch | {ENTROPY: whole[..., 1], LIKELIEST: whole[..., 2]}
            )

        return output, reduced

    batches = [iter(micro_batches) for _ in chunks]
    result: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=_fitted(width, config),
        micro_batch_size=size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return result


def inputs(batch: Fields, config: TransformerConfig) -> Inputs:
    """This rank's part of a micro-batch, padded on the right to a width that the layout can cut."""
    tokens, width = batch[TOKENS], batch[MASK].shape[1]
    mine = local_positions(_fitted(width, config), tokens.device)

    def padded(field: Tensor, value: float = 0) -> Tensor:
        return F.pad(field, (0, _fitted(width, config) - field.shape[1]), value=value)

    return Inputs(
        tokens=padded(tokens[:, :-1])[:, mine],
        labels=padded(batch[LABELS] if LABELS in batch else tokens[:, 1:])[:, mine],
        positions=mine.expand(len(tokens), -1),
        rotary=padded(batch[POSITIONS][:, :-1])[:, mine] if POSITIONS in batch else None,
        segments=padded(batch[SEGMENTS][:, :-1]) if SEGMENTS in batch else None,
        padding=padded(_padding(batch), True)[:, mine] if config.num_moe_experts else None,
        routing=_widened(batch[ROUTING], _fitted(width, config))[:, mine] if ROUTING in batch else None,
    )


def _widened(routing: Tensor, width: int) -> Tensor:
    return F.pad(routing, (0, 0, 0, 0, 0, width - routing.shape[1]))


def _padding(batch: Fields) -> Tensor:
    """bool [B, T]: what comes after the last trained token of a row, or is in no segment. A row of padding keeps its
    first token, so that there is something to take a mean of."""
    trained = batch[MASK] > 0
    padding = ~trained.flip(1).cumsum(1).flip(1).bool()
    if SEGMENTS in batch:
        padding = padding | (batch[SEGMENTS][:, :-1] == 0)
    padding[:, 0] = False
    return padding


def _of_layers(padding: Tensor | None, part: Any, config: TransformerConfig) -> Tensor | None:
    """As Megatron wants it: it cuts the sequence over tensor-parallel ranks itself, but on the first stage alone."""
    return padding if part.pre_process else _of_tensor_rank(padding, config)


def _of_tensor_rank(field: Tensor | None, config: TransformerConfig) -> Tensor | None:
    """The columns that the layers of this tensor-parallel rank see."""
    if field is None or not config.sequence_parallel:
        return field
    return field.chunk(ps.get_tensor_model_parallel_world_size(), dim=1)[ps.get_tensor_model_parallel_rank()]


def tokens_once(tokens: Tensor) -> Tensor:
    """The number of tokens as Megatron wants it: it adds up all ranks', and context-parallel ranks have the same."""
    return (tokens if ps.get_context_parallel_rank() == 0 else torch.zeros_like(tokens)).to(torch.int)


def _whole(output: Tensor, width: int) -> Tensor:
    return whole_sequence(output.float(), 1, copies=True)[:, :width]


def _fitted(width: int, config: TransformerConfig) -> int:
    context = config.context_parallel_size
    local = math.lcm(
        2 if context > 1 else 1,
        config.tensor_model_parallel_size if config.sequence_parallel else 1,
        FP8_TOKENS if config.fp8 else 1,
    )
    return -(-width // (context * local)) * context * local


def together(chunks: list[Any]) -> int:
    """Micro-batches go through interleaved chunks in groups as large as the pipeline: this many."""
    return int(ps.get_pipeline_model_parallel_world_size()) if len(chunks) > 1 else 1
