"""The training engine: one Megatron-Core model with its optimizer, asked for one step at a time.

An engine is built on every rank, after `parallel.distributed`. All its methods are collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from trainer.algorithms.base import Algorithm, LossOutput
from trainer.batch import MASK, TOKENS, Fields, share
from trainer.config import Dtype, TrainerConfig
from trainer.errors import Diverged
from trainer.megatron.convert import Slice, export_hf, export_slices, load_hf
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors
from trainer.megatron.model import DTYPES, build_model, transformer_config
from trainer.megatron.parallel import broadcast_json, device

REFERENCE_LOGPROBS = "reference_logprobs"


@dataclass(frozen=True)
class StepStats:
    """One optimizer step (or the mean over a batch's minibatches). `tokens` counts trained tokens over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    metrics: dict[str, float]


class Engine:
    """Model, gradients, optimizer and learning-rate schedule of this rank."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> None:
        self.config, self.shape, self.algorithm = config, shape, algorithm
        self.transformer = transformer_config(shape, config.parallel, config.model)
        tensors = None if config.model.random_init else HfTensors(config.model.path)
        self.reference = self._load(tensors) if algorithm.needs_reference else None
        self.model = DistributedDataParallel(
            self.transformer,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            self._load(tensors),
        )
        self.optimizer = get_megatron_optimizer(_optimizer_config(config), [self.model])
        self.scheduler = _scheduler(config, self.optimizer)
        self.transformer.finalize_model_grads_func = finalize_model_grads
        self.transformer.grad_scale_func = self.optimizer.scale_loss

    @property
    def pipeline_rank(self) -> int:
        return int(ps.get_pipeline_model_parallel_rank())

    def step(self, fields: Fields) -> StepStats:
        """Train on a batch that every rank holds whole. Raises Diverged before anything is published or saved."""
        if self.reference is not None:
            # Only where the loss is computed are these real; other pipeline stages carry zeros.
            fields = fields | {REFERENCE_LOGPROBS: self._gathered_logprobs(self.reference, fields)}
        rows = fields[MASK].shape[0]
        pieces = min(self.algorithm.minibatches, rows)
        cuts = [rows * i // pieces for i in range(pieces + 1)]
        parts = [{k: t[a:b] for k, t in fields.items()} for a, b in itertools.pairwise(cuts)]
        return _mean([self._optimizer_step(part) for part in parts])

    def logprobs(self, fields: Fields) -> torch.Tensor | None:
        """Log-probs [B, T] float32 of every token under the current weights; None off the last pipeline stage."""
        result = self._gathered_logprobs(self.model, fields)
        return result if ps.is_pipeline_last_stage() else None

    def slices(self, dtype: Dtype) -> Iterator[Slice]:
        """This rank's slices of the Hugging Face tensors, cast, without communication; none on other replicas."""
        if ps.get_data_parallel_rank() == 0:
            for piece in export_slices(self.model, self.shape):
                yield piece._replace(tensor=piece.tensor.to(DTYPES[dtype]))

    def export(self, dtype: Dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors of this pipeline stage, cast, on one rank of it. Gathers: `slices` is what publishing uses."""
        if ps.get_data_parallel_rank() == 0:
            for name, tensor in export_hf(self.model, self.shape):
                yield name, tensor.to(DTYPES[dtype])

    def _load(self, tensors: HfTensors | None) -> Any:
        model = build_model(self.shape, self.transformer)
        if tensors is not None:
            tensors.check(self.shape.schema("float32"))
            load_hf(model, self.shape, tensors.get)
        model = model.to(device())
        return Float16Module(self.transformer, model) if self.transformer.bf16 else model

    def _optimizer_step(self, fields: Fields) -> StepStats:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run(self.model, fields, self._loss, forward_only=False)
        reduced = _reduce(outputs)
        _, grad_norm, _ = self.optimizer.step()
        loss, norm, lr = reduced.pop("loss"), float(grad_norm or 0.0), self.optimizer.param_groups[0]["lr"]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"loss {loss}, gradient norm {norm}. Lower optimizer.lr, or resume from a checkpoint.")
        self.scheduler.step(1)
        return StepStats(loss, norm, lr, int(reduced.pop("tokens")), reduced)

    def _run(self, model: Any, fields: Fields, reduce: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over this rank's micro-batches; what `reduce` collected, on the last pipeline stage."""
        ranks, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        micro_batches = share(fields, rank, ranks, self.config.micro_batch)
        size, width = micro_batches[0][MASK].shape
        positions = torch.arange(width, device=device()).expand(size, -1)

        def forward(batches: Iterator[Fields], part: Any) -> tuple[Any, Callable[..., Any]]:
            batch = next(batches)
            output = part(batch[TOKENS][:, :-1], positions, None, labels=batch[TOKENS][:, 1:])
            return output, lambda nll_BT, **_: reduce(-nll_BT.float(), batch)

        result: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=width,
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return result

    def _loss(self, logprobs_BT: torch.Tensor, batch: Fields) -> tuple[torch.Tensor, torch.Tensor, LossOutput]:
        output = self.algorithm.loss(logprobs_BT, batch)
        return output.total, output.tokens.to(torch.int), output

    def _gathered_logprobs(self, model: Any, fields: Fields) -> torch.Tensor:
        """[B, T] over all data-parallel ranks on the last pipeline stage, zeros on the others."""
        with torch.no_grad():
            parts = self._run(model, fields, lambda logprobs_BT, _: logprobs_BT, forward_only=True)
        if not ps.is_pipeline_last_stage():
            return torch.zeros_like(fields[MASK])
        mine = torch.cat(parts).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(ps.get_data_parallel_world_size())]
        dist.all_gather(everyone, mine, group=ps.get_data_parallel_group())
        return torch.cat(everyone)[: fields[MASK].shape[0]]


def _reduce(outputs: list[LossOutput]) -> dict[str, float]:
    """Loss, token count and metrics of a step over micro-batches and data-parallel ranks, on every rank."""
    result: dict[str, float] = {}
    if ps.is_pipeline_last_stage():
        first, group = outputs[0], ps.get_data_parallel_group()
        rows = [torch.stack([o.total.detach().float(), o.tokens, *o.sums.values()]) for o in outputs]
        sums = torch.stack(rows).double().sum(0)
        dist.all_reduce(sums, group=group)
        tokens = sums[1].clamp(min=1)
        result = dict(zip(("loss", "tokens", *first.sums), (sums / tokens).tolist(), strict=True))
        result["tokens"] = sums[1].item()
        for name in first.maxima:
            value = torch.stack([o.maxima[name] for o in outputs]).max()
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
            result[name] = value.item()
    if ps.get_pipeline_model_parallel_world_size() == 1:
        return result
    group = ps.get_pipeline_model_parallel_group()
    shared: dict[str, float] = broadcast_json(result, ps.get_pipeline_model_parallel_last_rank(), group)
    # JSON has no NaN: it arrives as null.
    return {name: math.nan if value is None else value for name, value in shared.items()}


def _mean(stats: list[StepStats]) -> StepStats:
    count = len(stats)
    return StepStats(
        loss=sum(s.loss for s in stats) / count,
        grad_norm=sum(s.grad_norm for s in stats) / count,
        lr=stats[-1].lr,
        tokens=sum(s.tokens for s in stats),
        metrics={name: sum(s.metrics[name] for s in stats) / count for name in stats[0].metrics},
    )


def _optimizer_config(config: TrainerConfig) -> OptimizerConfig:
    optimizer, dtype = config.optimizer, DTYPES[config.model.dtype]
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _scheduler(config: TrainerConfig, optimizer: Any) -> OptimizerParamScheduler:
    c = config.optimizer
    updates = config.steps * getattr(config.algorithm, "minibatches", 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=c.lr / (c.warmup_steps + 1),  # the first step already moves
        max_lr=c.lr,
        min_lr=c.min_lr,
        lr_warmup_steps=c.warmup_steps,
        lr_decay_steps=max(updates, c.warmup_steps + 1),
        lr_decay_style=c.decay,
        start_wd=c.weight_decay,
        end_wd=c.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run may have been given more steps
    )
