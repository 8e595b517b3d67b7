"""Bytes a rank needs for training, from the model's sizes and the layout alone.

Weights are counted as Megatron places them, without building it. Gradients and optimizer states are counted as the
engine allocates them: gradients in fp32; fp32 main weights and the moments sharded over data-parallel ranks (ZeRO,
arXiv 1910.02054): Adam's two, and of a layer's matrices under Muon one; everything that is trained sharded under
`shard: full`, a reference whole.
Weights that are frozen under adapters have neither.
Activations are what the unfused layers of trainer/megatron keep for the backward pass, counted as in Korthikanti et al.
(arXiv 2205.05198) for this decoder: RMSNorm, rotary attention without a score matrix, gated feed-forward.

Not counted: the context of CUDA and NCCL (about 1 to 2 GiB), what an allocator wastes, and in float32 the keys and
values that a GPU repeats for the query heads of each group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainer.config import LoraConfig, ParallelConfig
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.logprobs import LOGITS

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4


@dataclass(frozen=True)
class Workload:
    """The work of a step: `length` in tokens a sequence, at most `micro_batch` sequences a forward pass, `sequences`
    an optimizer step, over all data-parallel ranks (0: more than any layout has under way at a time); `critics` models
    are trained besides the actor, `references` only evaluated. With `lora` adapters are trained over frozen weights.
    `optimizer` is `adamw` or `muon`."""

    length: int
    micro_batch: int = 1
    sequences: int = 0
    dtype: str = "bfloat16"
    recompute: str = "none"
    offload: bool = False
    critics: int = 0
    references: int = 0
    lora: LoraConfig | None = None
    optimizer: str = "adamw"

    def rows(self, parallel: ParallelConfig) -> int:
        """Sequences of a forward pass: no more than a rank has of an optimizer step."""
        mine = -(-self.sequences // parallel.data)
        return min(self.micro_batch, mine) if mine else self.micro_batch

    def under_way(self, parallel: ParallelConfig, stage: int) -> int:
        """Micro-batches whose activations a pipeline stage holds at a time (1F1B)."""
        most = parallel.pipeline - stage
        return min(most, -(-self.sequences // (parallel.data * self.rows(parallel)))) if self.sequences else most


@dataclass(frozen=True)
class Estimate:
    """Bytes of the fullest rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate(shape: ModelShape, parallel: ParallelConfig, workload: Workload) -> Estimate:
    """The bytes of a rank of the pipeline stage that needs most."""
    stages = [_stage(shape, parallel, workload, stage) for stage in range(parallel.pipeline)]
    return max(stages, key=lambda e: e.total)


def bytes_to_save(shape: ModelShape, parallel: ParallelConfig, work: Workload, *, copied: bool) -> int:
    """Bytes of host memory that saving takes of a rank at most: one of the first data-parallel replica, which gathers
    the optimizer states of all; under `shard: full` each rank has its own. `copied`: the background writes copies,
    which are kept from one checkpoint to the next. A GPU holds descriptions of the shards alone meanwhile."""
    stages = (rank_weights(shape, parallel, stage) for stage in range(parallel.pipeline))
    moved = max(stages, key=lambda w: w.total) if work.lora is None else adapter_weights(shape, parallel, work.lora)
    own = _optimizer_bytes(moved, parallel, Workload(work.length))  # in fp32: main weights and both moments
    trained, states, weights = 1 + work.critics, 3 * FP32 * moved.total, BYTES[work.dtype] * moved.total
    if parallel.shard == "full":
        weights = 0 if work.dtype == "float32" else weights // (parallel.data * parallel.context)
        return copied * trained * (own + weights)
    # While a role's states are gathered: a rank's own in one piece, of one kind those of all ranks, in pieces and
    # joined, and the pieces of the next.
    gathering = own + 3 * FP32 * moved.total
    return gathering + (states + trained * (states + weights) if copied else trained * states)


def _stage(shape: ModelShape, parallel: ParallelConfig, work: Workload, stage: int) -> Estimate:
    weights = rank_weights(shape, parallel, stage)
    adapters = Weights(0, 0, 0) if work.lora is None else adapter_weights(shape, parallel, work.lora)
    moved = weights if work.lora is None else adapters
    trained = 1 + work.critics
    size, full = BYTES[work.dtype], parallel.shard == "full"

    def held(part: Weights) -> int:
        return -(-part.total // (parallel.data * parallel.context)) if full else part.total

    return Estimate(
        weights=size
        * (
            trained * (held(weights) + held(adapters))
            + work.references * weights.total
            + (weights.largest if full else 0)
        ),
        gradients=trained * held(moved) * (size if full else FP32) + (moved.largest * size if full else 0),
        optimizer=trained * _optimizer_bytes(moved, parallel, work),
        activations=_activations(shape, parallel, work, stage),
        logits=_logits(shape, parallel, work) if stage == parallel.pipeline - 1 else 0,
    )


def _optimizer_bytes(weights: Weights, parallel: ParallelConfig, work: Workload) -> int:
    """fp32 main weights, where the model's are not that themselves, and the moments; all in host memory, or none."""
    main = 0 if work.dtype == "float32" else FP32
    adams = 0 if work.offload else main + 2 * FP32
    matrix = main + FP32 if work.optimizer == "muon" else adams
    replicas = parallel.data * parallel.context
    expert_replicas = max(parallel.tensor * replicas // (parallel.expert * parallel.expert_tensor_size), 1)
    others = weights.dense - weights.matrices
    return (
        adams * -(-others // replicas)
        + matrix * -(-weights.matrices // replicas)
        + matrix * -(-weights.expert // expert_replicas)
    )


def _activations(shape: ModelShape, parallel: ParallelConfig, work: Workload, stage: int) -> int:
    """Activations of all layers of a stage, for the micro-batches that are under way in it at a time (1F1B)."""
    layers = shape.layers // parallel.pipeline
    tokens = work.rows(parallel) * -(-work.length // parallel.context)
    size = BYTES[work.dtype]
    one = layer_bytes(shape, parallel, size)
    between = _cut(shape.hidden, parallel) * size
    kept = layers * between + one if work.recompute == "full" else layers * one
    if stage == parallel.pipeline - 1:
        kept += _norm_bytes(shape, parallel, size)
    in_flight = float(work.under_way(parallel, stage))
    if parallel.virtual_pipeline > 1:  # interleaved stages hold more (2205.05198, section 4.2.3)
        in_flight *= 1 + (parallel.pipeline - 1) / (parallel.pipeline * parallel.virtual_pipeline)
    return int(tokens * kept * in_flight)


def layer_bytes(shape: ModelShape, parallel: ParallelConfig, size: int) -> float:
    """Bytes a layer keeps for each token on one rank, in a precision of `size` bytes.

    Of h hidden, q query and k key (or value) features, and f of the feed-forward: two norms; queries, keys and values
    as they come from their linear layer (q + 2k), queries and keys rotated (q + k), attention's output (q); gate and up
    as they come (2f), what is made of each (2f), and their product (f).
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 2 * _norm_bytes(shape, parallel, size) + (3 * q + 3 * kv) * size / parallel.tensor
    if shape.qk_norm:
        kept += (2 * q + 2 * kv) * FP32 / parallel.tensor
    if not shape.experts:
        return kept + 5 * shape.ffn * size / parallel.tensor
    # Each token visits several experts: it is sent, and comes back, once for each.
    visit = 5 * shape.expert_ffn / parallel.expert_tensor_size + 2 * shape.hidden
    tokens = 1 / parallel.tensor if parallel.sequence else 1.0
    return kept + (shape.experts_per_token * visit + shape.hidden) * size * tokens


def _norm_bytes(shape: ModelShape, parallel: ParallelConfig, size: int) -> float:
    """RMSNorm's input and quotient in fp32, as it computes them, and its output. Fused kernels keep less."""
    return _cut(shape.hidden, parallel) * (2 * FP32 + size)


def _cut(hidden: int, parallel: ParallelConfig) -> float:
    """A rank's share of a vector between tensor-parallel regions."""
    return hidden / parallel.tensor if parallel.sequence else hidden


def _logits(shape: ModelShape, parallel: ParallelConfig, work: Workload) -> int:
    """Of a chunk (megatron/logprobs.py): logits in the model's precision and in fp32, and their softmax. And the
    gradient of the output layer, which chunks add to in fp32."""
    tokens = work.rows(parallel) * -(-work.length // parallel.context)
    columns = shape.padded_vocab(parallel.tensor) // parallel.tensor
    tokens = min(tokens, max(LOGITS // columns, 1))
    return columns * (tokens * (BYTES[work.dtype] + 2 * FP32) + shape.hidden * FP32)


@dataclass(frozen=True)
class Weights:
    """Weights of one rank: `dense` are replicated over data- and context-parallel ranks, `expert` over the ranks that
    hold the same experts. `largest` is the greatest part that full sharding gathers at a time. Of `dense` so many are
    in the layers' `matrices`, as all of `expert` are."""

    dense: int
    expert: int
    largest: int
    matrices: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert


def rank_weights(shape: ModelShape, parallel: ParallelConfig, stage: int) -> Weights:
    """The weights of a rank of pipeline stage `stage`."""
    layers = shape.layers // parallel.pipeline
    matrices, expert = _matrices(shape, parallel), _experts(shape, parallel)
    layer = matrices + _vectors(shape, parallel)
    vocabulary = shape.padded_vocab(parallel.tensor) // parallel.tensor * shape.hidden
    first, last = stage == 0, stage == parallel.pipeline - 1
    tables = first + (last and not (shape.tied and first))  # a tied output layer on another stage is a copy
    ends = tables * vocabulary + (shape.hidden if last else 0)
    return Weights(layers * layer + ends, layers * expert, max(layer + expert, ends), layers * matrices)


def adapter_weights(shape: ModelShape, parallel: ParallelConfig, lora: LoraConfig) -> Weights:
    """The adapters of a rank, which are the same many in every stage: of each pair A or B is cut with its layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}
    width = shape.expert_ffn if shape.experts else shape.ffn
    feed_forward = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width)

    def pairs(widths: dict[str, int], ranks: int) -> int:
        return sum(lora.rank * (shape.hidden + w // ranks) for name, w in widths.items() if name in lora.target_modules)

    dense, expert = pairs(attention, parallel.tensor), 0
    if shape.experts:
        expert = shape.experts // parallel.expert * pairs(feed_forward, parallel.expert_tensor_size)
    else:
        dense += pairs(feed_forward, parallel.tensor)
    layers = shape.layers // parallel.pipeline
    return Weights(layers * dense, layers * expert, dense + expert)


def _matrices(shape: ModelShape, parallel: ParallelConfig) -> int:
    """Those of one layer, its experts aside."""
    t, h = parallel.tensor, shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    feed_forward = shape.experts * h if shape.experts else 3 * shape.ffn * h // t
    return (q + 2 * kv) * h // t + h * q // t + feed_forward


def _vectors(shape: ModelShape, parallel: ParallelConfig) -> int:
    """The norms and biases of one layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    biases = (q + 2 * kv) // parallel.tensor if shape.qkv_bias else 0
    return biases + (2 * shape.head_dim if shape.qk_norm else 0) + 2 * shape.hidden


def _experts(shape: ModelShape, parallel: ParallelConfig) -> int:
    """The experts of one layer that live on one rank."""
    here = shape.experts // parallel.expert
    return here * 3 * shape.expert_ffn * shape.hidden // parallel.expert_tensor_size
