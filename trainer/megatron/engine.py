"""The training engine: the models of a run and their optimizers, asked for one step at a time.

An engine is built on every rank, after `parallel.distributed`. All its methods are collective.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from trainer.algorithms.base import (
    BEHAVIOUR_LOGPROBS,
    ENTROPY,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    VALUES,
    ActorCritic,
    Algorithm,
    LossOutput,
)
from trainer.batch import MASK, POSITIONS, ROUTING, SEGMENTS, TOKENS, Fields
from trainer.config import ParallelConfig, TrainerConfig
from trainer.config.sections import Dtype, TrainDtype
from trainer.errors import ConfigError, DataError, Diverged
from trainer.megatron.convert import Slice, export_hf, export_slices, parameters
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.lora import adapter_schema, adapters, merged
from trainer.megatron.model import DTYPES
from trainer.megatron.optimizer import reset_optimizer
from trainer.megatron.parallel import broadcast_json, device, is_rank_zero, on_rank_zero
from trainer.megatron.passes import run, together, tokens_once
from trainer.megatron.roles import Role, RoleName, build_roles
from trainer.megatron.router import reported, weigh
from trainer.megatron.shares import Shares, Whole


@dataclass(frozen=True)
class StepStats:
    """One step: the mean over its optimizer updates. `tokens` counts trained tokens over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    metrics: dict[str, float]


class Engine:
    """The roles of this rank: models, gradients, optimizers, learning-rate schedules."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> None:
        check_support(config, shape)
        self.config, self.shape, self.algorithm = config, shape, algorithm
        self.roles = build_roles(config, shape, algorithm)
        self.actor = self.roles["actor"]
        self._shares = Shares()

    @property
    def model(self) -> list[Any]:
        """The actor's chunks; so are `optimizer` and `scheduler` the actor's."""
        return self.actor.model

    @property
    def optimizer(self) -> Any:
        return self.actor.optimizer

    @property
    def scheduler(self) -> Any:
        return self.actor.scheduler

    @property
    def part(self) -> int:
        """The number under which this rank writes what `export` gives it."""
        return int(dist.get_rank())

    def step(self, fields: Fields) -> StepStats:
        """Train on the batch that rank 0 holds; what other ranks give is not looked at. Each data-parallel rank is sent
        the rows that it trains on. Raises Diverged before anything is published or saved."""
        on_rank_zero(lambda: _check_routing(fields, self.shape))
        filled = self.prefill_fields(fields)
        wholes = on_rank_zero(lambda: self._minibatches(self.algorithm.prepare(filled)))
        parts = self._shared_out(wholes) * self.algorithm.epochs
        warming = self._warming_up(len(parts))
        if self.algorithm.resets_optimizer:
            reset_optimizer(self.optimizer)
        return _mean([self._update(part, critic_only=warming) for part in parts])

    def prefill_fields(self, fields: Fields) -> Fields:
        """Rank 0's batch with what the algorithm `needs` of the models, where it is not there yet; nothing on the other
        ranks. May be called for any part of a batch before its step, as soon as that part is there."""
        roles: dict[str, RoleName] = {REFERENCE_LOGPROBS: "reference", OLD_LOGPROBS: "actor", VALUES: "critic"}
        missing: list[str] = broadcast_json(sorted(self.algorithm.needs - fields.keys()))
        found = self._said([roles[name] for name in missing], fields) if missing else []
        if not is_rank_zero():
            return {}
        return {k: t.cpu() for k, t in fields.items()} | dict(zip(missing, found, strict=True))

    def logprobs(self, fields: Fields, role: RoleName = "actor") -> torch.Tensor | None:
        """Log-probs [B, T] float32 of every token of rank 0's batch under the role's weights; None on other ranks."""
        return next(iter(self._said([role], fields)), None)

    def values(self, fields: Fields) -> torch.Tensor | None:
        """The critic's values [B, T] float32; None on other ranks."""
        return self.logprobs(fields, "critic")

    def storages(self) -> dict[str, list[torch.Tensor]]:
        """The tensors whose storages hold this rank's memory, by `actor`, `actor_optimizer`, `critic`,
        `critic_optimizer`, `reference`."""
        return {name: tensors for role in self.roles.values() for name, tensors in role.storages().items()}

    def slices(self, dtype: TrainDtype, whole: Container[str] = frozenset()) -> Iterator[Slice]:
        """This rank's slices of the tensors in `schema`, cast; each slice is some one rank's. No communication, except
        that those named in `whole`, and under `parallel.shard: full` all, are gathered one at a time: then every rank
        must exhaust it."""
        for chunk in self.model:
            for piece in export_slices(self._trained(chunk), self.shape, whole):
                yield piece._replace(tensor=piece.tensor.to(DTYPES[dtype]))

    def export(self, dtype: TrainDtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors in `schema`, cast, each on some one rank. Gathers one at a time: `slices` is what publishing
        uses."""
        for chunk in self.model:
            for name, tensor in export_hf(self._trained(chunk), self.shape):
                yield name, tensor.to(DTYPES[dtype])

    def export_merged(self, dtype: TrainDtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole model as `export` gives it without adapters, which are added to its weights."""
        for chunk in self.model:
            for name, tensor in export_hf(merged(chunk), self.shape):
                yield name, tensor.to(DTYPES[dtype])

    def schema(self, dtype: Dtype) -> list[tuple[str, Dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of every tensor that is trained and published: the model's under Hugging Face's names,
        or the adapter's under PEFT's."""
        lora = self.config.lora
        return self.shape.schema(dtype) if lora is None else adapter_schema(self.shape, lora, dtype)

    def _trained(self, chunk: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return parameters(chunk) if self.config.lora is None else adapters(chunk)

    def _minibatches(self, fields: Fields) -> list[Fields]:
        together = self._rows_together(fields)
        units = fields[MASK].shape[0] // together
        pieces = min(self.algorithm.minibatches, units)
        cuts = [units * i // pieces * together for i in range(pieces + 1)]
        parts = [{k: t[a:b] for k, t in fields.items()} for a, b in itertools.pairwise(cuts)]
        # Rows that packing added for the ranks' sake may be all there is in one.
        return [part for part in parts if part[MASK].any()] or parts[:1]

    def _shared_out(self, wholes: list[Fields] | None) -> list[list[Fields]]:
        """This rank's micro-batches of each of rank 0's batches."""
        size = self.config.micro_batch
        found = [Whole(fields, size, self._rows_together(fields)) for fields in wholes or []]
        return self._shares.hand_out(found, together(self.model))

    def _rows_together(self, fields: Fields) -> int:
        """Packed rows hold whatever belongs together whole."""
        return 1 if SEGMENTS in fields else self.algorithm.rows_together

    def _warming_up(self, updates: int) -> bool:
        """Whether this step trains the critic alone. Its scheduler counts updates, also across a resume."""
        critic = self.roles.get("critic")
        return critic is not None and critic.scheduler.num_steps < self.algorithm.critic_warmup * updates

    def _update(self, micro_batches: list[Fields], *, critic_only: bool) -> StepStats:
        """The critic's optimizer step, where there is one, then the actor's."""
        metrics: dict[str, float] = {}
        if (critic := self.roles.get("critic")) is not None:
            assert isinstance(self.algorithm, ActorCritic)  # it asked for values
            judged = self._optimizer_step(critic, micro_batches, self.algorithm.critic_loss)
            metrics = {"critic_loss": judged.loss, "critic_grad_norm": judged.grad_norm, **judged.metrics}
            if critic_only:
                return StepStats(0.0, 0.0, self.optimizer.param_groups[0]["lr"], judged.tokens, metrics)
        stats = self._optimizer_step(self.actor, micro_batches, self.algorithm.loss)
        return StepStats(stats.loss, stats.grad_norm, stats.lr, stats.tokens, stats.metrics | metrics)

    def _optimizer_step(self, role: Role, micro_batches: list[Fields], loss: Callable[..., LossOutput]) -> StepStats:
        def reduce(output_BT: torch.Tensor, batch: Fields) -> tuple[torch.Tensor, torch.Tensor, LossOutput]:
            output = loss(output_BT, batch)
            return output.total, tokens_once(output.denominator), output

        for chunk in role.model:
            chunk.zero_grad_buffer()
        role.optimizer.zero_grad()
        if balanced := self._balanced():
            weigh(role.transformer, *balanced, self._expected(micro_batches, loss))
        reduced = _reduce(self._run(role, micro_batches, reduce, forward_only=False))
        if balanced:
            reduced |= reported(self.shape.layers, len(micro_batches))
        updated, grad_norm, _ = role.optimizer.step()
        value, norm, lr = reduced.pop("loss"), float(grad_norm or 0.0), role.optimizer.param_groups[0]["lr"]
        if not (math.isfinite(value) and math.isfinite(norm)):
            problem = f"{role.name}: loss {value}, gradient norm {norm}"
            raise Diverged(f"{problem}. Lower optimizer.lr, or resume from a checkpoint.")
        if self.config.model.dtype == "float16":
            reduced |= {"loss_scale": float(role.optimizer.get_loss_scale()), "overflows": float(not updated)}
        if updated:  # else a gradient overflowed: the optimizer has lowered its loss scale instead
            role.scheduler.step(1)
        return StepStats(value, norm, lr, int(reduced.pop("tokens")), reduced)

    def _balanced(self) -> tuple[float, float] | None:
        """The coefficients of the routers' auxiliary losses, if there are any."""
        found = (self.config.model.router_balance_loss, self.config.model.router_z_loss)
        return found if any(found) else None

    def _expected(self, micro_batches: list[Fields], loss: Callable[..., LossOutput]) -> float:
        """The mean over all ranks' micro-batches of the loss's denominator, if the policy is the one that sampled."""
        total = torch.zeros(2, dtype=torch.float64)
        for batch in micro_batches:
            nothing = torch.zeros_like(batch[MASK])
            output = loss(batch.get(BEHAVIOUR_LOGPROBS, nothing), batch | {ENTROPY: nothing})
            total += torch.tensor([float(output.denominator), 1.0])
        total = total.to(device())
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        return (total[0] / total[1]).item()

    def _run(
        self, role: Role, micro_batches: list[Fields], reduce: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """The results of `reduce` on its micro-batches (passes.py). Recorded routing is the actor's: critic and
        reference have routers of their own."""
        if role.name != "actor":
            micro_batches = [{k: t for k, t in batch.items() if k != ROUTING} for batch in micro_batches]
        return run(
            role.model,
            role.transformer,
            micro_batches,
            reduce,
            forward_only=forward_only,
            values=role.name == "critic",
        )

    def _said(self, roles: list[RoleName], fields: Fields) -> list[torch.Tensor]:
        """The output of each of the roles for rank 0's batch, [B, T] float32, on rank 0; nothing on the other ranks."""
        asked = {name: fields[name] for name in (TOKENS, MASK, SEGMENTS, POSITIONS, ROUTING) if name in fields}
        (micro_batches,) = self._shared_out(on_rank_zero(lambda: [asked]))
        found = []
        for role in roles:
            with torch.no_grad(), self.roles[role].evaluating():
                parts = self._run(self.roles[role], micro_batches, lambda output_BT, _: output_BT, forward_only=True)
            like = [torch.zeros_like(batch[MASK]) for batch in micro_batches]
            if (said := self._shares.to_rank_zero(parts, like, len(fields.get(MASK, ())))) is not None:
                found.append(said)
        return found


def _reduce(outputs: list[LossOutput]) -> dict[str, float]:
    """Loss, token count and metrics of a step over micro-batches and data-parallel ranks, on every rank."""
    result: dict[str, float] = {}
    if ps.is_pipeline_last_stage():
        first, group = outputs[0], ps.get_data_parallel_group()
        sums = torch.stack([output.row() for output in outputs]).sum(0)
        dist.all_reduce(sums, group=group)
        total, denominator, tokens, *of_sums = sums.tolist()
        means = [value / max(denominator if first.sums_like_loss else tokens, 1) for value in of_sums]
        result = {"loss": total / max(denominator, 1), "tokens": tokens}
        result |= dict(zip(first.sums, means, strict=True))
        for name in first.maxima:
            value = torch.stack([o.maxima[name] for o in outputs]).max()
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
            result[name] = value.item()
    if ps.get_pipeline_model_parallel_world_size() == 1:
        return result
    shared: dict[str, float] = broadcast_json(result, dist.get_world_size() - 1)  # which is of the last stage
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


def check_support(config: TrainerConfig, shape: ModelShape) -> None:
    """Raise ConfigError naming the key that this machine, or this combination, cannot serve."""
    if config.model.fp8 != "none":
        _check_fp8(shape)
    for key in ("router_balance_loss", "router_z_loss"):
        if getattr(config.model, key) and not shape.experts:
            raise ConfigError(f"model.{key}", f"{shape.family} has no experts", "Leave it out")
    if config.rollout.routed_experts and not shape.experts:
        raise ConfigError("rollout.routed_experts", f"{shape.family} has no experts", "Leave it out")
    if config.parallel.shard == "full":
        _check_full_sharding(config)
    check_experts(config.parallel)


def check_experts(parallel: ParallelConfig) -> None:
    """Raise ConfigError for a layout of experts that this machine cannot have."""
    if parallel.expert > 1 and parallel.expert_tensor_size > 1 and not torch.cuda.is_available():
        problem = "cutting experts that are also spread gathers parts of different lengths, which gloo cannot"
        raise ConfigError("parallel.expert_tensor", problem, "Set it to 1, or use GPUs")


def _check_routing(fields: Fields, shape: ModelShape) -> None:
    """Raise DataError for recorded routing that is of another model."""
    if (routing := fields.get(ROUTING)) is None:
        return
    expected = (shape.layers, shape.experts_per_token)
    if tuple(routing.shape[2:]) != expected or int(routing.max()) > shape.experts:
        problem = f"{list(routing.shape[2:])} experts of up to {int(routing.max())}"
        raise DataError(
            f"the recorded routing is of another model: [layers, experts per token] are {problem}, the model has "
            f"{list(expected)} of {shape.experts}. Sample from the model that is trained."
        )
    ordered = routing.sort(-1).values
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] > 0)).any():
        raise DataError("the recorded routing sends a token to one expert twice. Record what the model's router chose.")


def _check_fp8(shape: ModelShape) -> None:
    if shape.experts:
        raise ConfigError("model.fp8", "experts are not run in 8 bits", "Set it to none")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        # Megatron-Core's local layers would ignore the switch in silence.
        raise ConfigError(
            "model.fp8", "needs a GPU with 8-bit matrix products (Ada, Hopper or later)", "Set it to none"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError("model.fp8", "needs TransformerEngine, which is not installed", "Install it, or set none")


def _check_full_sharding(config: TrainerConfig) -> None:
    if config.model.dtype == "float16":
        problem = "full keeps no scaled gradients for float16"
        raise ConfigError("parallel.shard", problem, "Set model.dtype to bfloat16 or float32")
    if config.optimizer.offload:
        raise ConfigError("optimizer.offload", "not with parallel.shard full", "Set one of them back")
