"""The tenants of one base model, which is in memory once: adapters of many, or all weights for one at a time.

A tenant is what one training client trains, with its gradient and Adam's moments. One tenant's adapter at a time is on
the model's layers (`lora.put`), so that tenants cannot touch each other. A tenant without an adapter has the model's
own weights: the next one that is made takes them. Gradients add up in float32 until the step, as in PyTorch; the step
is torch's AdamW, on fp32 main weights.

Every rank has its part of the model and of each tenant. Rank 0 is asked, and tells the others what it is asked
(`_everywhere`): they wait in `follow`, over gloo and for as long as it takes, and do the same. The batches are rank 0's
alone, and so are log-probs and losses. A TrainerError is every rank's; after any other error the ranks are no longer
together, and must all start again (Ended). The code here runs on one thread of a rank.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.algorithms.base import LIKELIEST
from trainer.api import states
from trainer.api.errors import ApiError, Ended
from trainer.api.losses import LOSSES, TARGETS, WEIGHTS, Loss, check, column
from trainer.api.states import lora_from
from trainer.api.wire import Adam, Batch, Datum
from trainer.batch import LABELS, MASK, TOKENS, Fields
from trainer.config import LoraConfig, ModelConfig, ParallelConfig
from trainer.config.sections import Dtype, LinearLayer
from trainer.errors import TrainerError
from trainer.exports import write_parts
from trainer.faults.supervision import is_lost_contact
from trainer.megatron import passes
from trainer.megatron.convert import export_hf, load_hf, parameters, unwrap
from trainer.megatron.gradients import Apart, Gradient, adding, reduce
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors, finish_adapter, finish_checkpoint
from trainer.megatron.lora import Adapter, Switch, adapter_config, adapters, build, freeze, put, take
from trainer.megatron.model import DTYPES, transformer_config
from trainer.megatron.parallel import broadcast_json, device, on_rank_zero
from trainer.megatron.roles import load_model
from trainer.megatron.shares import Shares, Whole

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
WEIGHT, FIRST, SECOND = "weight", "exp_avg", "exp_avg_sq"
LOSS, CORRECT = "loss:sum", "correct_tokens:sum"  # metrics; the SDK adds up those of a batch in several requests
ATTENTION: Final[tuple[LinearLayer, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD: Final[tuple[LinearLayer, ...]] = ("gate_proj", "up_proj", "down_proj")
DEEP: Final = 4  # micro-batches for each pipeline stage, which idles while the first comes and the last goes
_LEAVE: Final = "leave"
Layers = list[dict[str, Adapter]]  # adapters of each chunk of the model, by their places


class Tenant:
    """This rank's part of one client's adapter, or of all weights (`lora` is None). `parameters` are what the model
    computes with, by their global Megatron names; `gradient` is None until there is one, and before a step each rank
    has what its own passes have added."""

    def __init__(self, lora: LoraConfig | None, layers: Layers, parameters: Mapping[str, Any]) -> None:
        self.lora, self.layers, self.parameters, self.steps = lora, layers, parameters, 0
        self.weights = {name: p.detach().float() for name, p in self.parameters.items()}  # themselves, if fp32
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.gradient: Gradient | None = None
        self.fresh()

    def fresh(self) -> None:
        """Adam as it begins."""
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self.steps = 0

    def zeros(self) -> Gradient:
        return {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def add(self, gradient: Gradient) -> None:
        """A pass is over, and counts."""
        if self.gradient is None:
            self.gradient = gradient
        else:
            for name, g in gradient.items():
                self.gradient[name] += g

    def kinds(self, *, optimizer: bool = True) -> states.Kinds:
        """The tenant's tensors that a state has, by kind."""
        moments = {k: {n: pair[i] for n, pair in self.moments.items()} for i, k in enumerate((FIRST, SECOND))}
        return {WEIGHT: self.weights, **(moments if optimizer else {})}

    def step(self, gradient: Gradient, params: Adam) -> None:
        """One step of AdamW."""
        names = list(self.weights)
        with torch.no_grad():
            adamw(
                [self.weights[n] for n in names],
                [gradient[n] for n in names],
                [self.moments[n][0] for n in names],
                [self.moments[n][1] for n in names],
                [],
                [torch.tensor(float(self.steps)) for _ in names],
                foreach=False,
                amsgrad=False,
                beta1=params.beta1,
                beta2=params.beta2,
                lr=params.learning_rate,
                weight_decay=params.weight_decay,
                eps=params.eps,
                maximize=False,
            )
        self.steps += 1
        self.cast()

    def cast(self) -> None:
        """Have the model compute with the weights."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.weights[name])  # nothing happens where they are one


_COMMANDS: Final[dict[str, Callable[..., Any]]] = {}


def _everywhere(method: Callable[Concatenate[Tenants, P], R]) -> Callable[Concatenate[Tenants, P], R]:
    """All ranks do rank 0's calls. Positional arguments are JSON, and the other ranks get them too; named ones
    are rank 0's alone."""
    name: str = getattr(method, "__name__", "")
    _COMMANDS[name] = method

    @functools.wraps(method)
    def asked(self: Tenants, /, *given: P.args, **own: P.kwargs) -> R:
        if self.ended is not None:
            raise self.ended
        try:
            broadcast_json([name, *given])
            return method(self, *given, **own)
        except TrainerError:
            raise
        except Exception as error:
            if dist.get_world_size() == 1:
                raise
            if lost := isinstance(error, RuntimeError) and is_lost_contact(error):
                log.error("lost another rank (%s)", _first_line(error))
            else:
                log.exception("%s failed on this rank", name)
            why = "one of them was lost" if lost else f"{name} failed: {_first_line(error)}"
            self.ended = Ended(f"the server's ranks start again ({why}): ask again")
            raise self.ended from error

    return asked


class Tenants:
    """The base model, and the tenants that are in memory, by name. Built after `parallel.distributed`."""

    def __init__(
        self,
        model: ModelConfig,
        shape: ModelShape,
        micro_tokens: int,
        *,
        parallel: ParallelConfig | None = None,
        full: bool = False,
        resident: int = 16,
    ) -> None:
        """Raises TrainerError when the checkpoint cannot be trained on. `full`: tenants have no adapters. Of tenants
        without a gradient the `resident` that were used last stay in memory."""
        self.shape, self._model, self._micro_tokens, self._most = shape, model, micro_tokens, resident
        self._tensors = HfTensors(model.path)
        self._transformer = transformer_config(shape, parallel or ParallelConfig(), model)
        self._chunks = [Apart(self._transformer, c) for c in load_model(shape, self._transformer, self._tensors)]
        self._bases = [unwrap(chunk) for chunk in self._chunks]
        if not full:
            for base in self._bases:
                freeze(base)
        self._shares = Shares()
        self._held: OrderedDict[str, Tenant] = OrderedDict()
        self._on: Tenant | None = None
        self.ended: Ended | None = None  # why no rank can be asked any more

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def follow(self) -> None:
        """On the other ranks: do what rank 0 is asked, until it leaves."""
        while (said := broadcast_json(None))[0] != _LEAVE:
            with contextlib.suppress(TrainerError):  # rank 0 has the same, and tells
                _COMMANDS[said[0]](self, *said[1:])

    def leave(self) -> None:
        """On rank 0: the other ranks may go."""
        broadcast_json([_LEAVE])

    @_everywhere
    def make(self, name: str, lora: dict[str, Any] | None, seed: str) -> None:
        """A new one: A random, B zero; or the checkpoint's weights, which are then no other tenant's any more. `lora`
        is `described`, `seed` a whole number of any size."""
        self._put(None)
        if lora is None:
            self._held.clear()
            named = {name: p for base in self._bases for name, p in parameters(base)}
            load_hf(named.items(), self.shape, self._tensors.get)
            self._held[name] = Tenant(None, [], named)
            return
        config = lora_from(lora)
        assert config is not None
        layers = [build(base, self.shape, config, int(seed), Switch()) for base in self._bases]
        for adapter in (adapter for made in layers for adapter in made.values()):
            adapter.to(device())
        self._place(layers)
        named = {at: parameter for base in self._bases for at, parameter in adapters(base)}
        self._on = self._held[name] = Tenant(config, layers, named)
        self._kept(name)

    @_everywhere
    def drop(self, name: str) -> None:
        """Forget it, if it is there."""
        if (found := self._held.pop(name, None)) is not None and found is self._on:
            self._put(None)

    @_everywhere
    def read(self, name: str, directory: str, optimizer: bool) -> None:
        """Read the files that `write` has written, with Adam's moments or without. Raises CheckpointError; nothing has
        changed then."""
        tenant = self._held[name]
        kinds = tenant.kinds(optimizer=optimizer)
        steps = states.read(Path(directory), kinds, self.shape, tenant.lora)
        tenant.gradient = None
        if optimizer:
            tenant.steps = steps
        else:
            tenant.fresh()
        tenant.cast()

    @_everywhere
    def write(self, name: str, directory: str) -> None:
        """Everything but the gradient. Raises CheckpointError."""
        tenant = self._held[name]
        states.write(Path(directory), tenant.kinds(), self.shape, tenant.lora, tenant.steps)

    @_everywhere
    def export(self, name: str, dtype: Dtype, directory: str) -> None:
        """Write it as it is: PEFT's two files of an adapter, or a Hugging Face checkpoint. Once it returns, the
        directory is whole also after a power failure. Raises CheckpointError."""
        tenant, target = self._held[name], Path(directory)
        named = tenant.weights if tenant.lora is None else tenant.parameters
        states.fresh(target)
        tensors = ((n, t.detach().to("cpu", DTYPES[dtype])) for n, t in export_hf(named.items(), self.shape))
        written, like = write_parts(target, tensors, dist.get_rank()), self._model.path

        def finish() -> None:
            with states.writing(target):
                if tenant.lora is None:
                    finish_checkpoint(target, written, like, dtype)
                else:
                    finish_adapter(target, written, adapter_config(self.shape, tenant.lora, like))

        on_rank_zero(finish)
        states.flush(target)

    @_everywhere
    def step(self, name: str, adam: dict[str, float]) -> dict[str, float]:
        """One step of AdamW, which takes the gradient. Raises ApiError (400), and changes nothing, without a finite
        gradient."""
        tenant, params = self._used(name), Adam(**adam)
        if (gradient := tenant.gradient) is None:
            raise ApiError(400, "there is no gradient: call forward_backward before optim_step", "no_gradient")
        tenant.gradient = None
        norm = reduce(self._chunks, tenant.parameters, gradient)
        if not np.isfinite(norm):
            advice = "it was dropped and the weights are as before; lower the learning rate, or load a checkpoint"
            raise ApiError(400, f"the gradient's norm is {norm}: {advice}", "not_finite")
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            for g in gradient.values():
                g *= params.grad_clip_norm / (norm + 1e-6)
        tenant.step(gradient, params)
        return {"grad_norm": norm}

    def run(self, name: str, batch: Batch) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
        """Log-probs of each sequence's targets, and the metrics, which are sums; unless the batch says `forward_only`
        its gradient is added to the tenant's. Raises ApiError (400); the gradient is as before then."""
        _, options = check(batch, self.shape.vocab, self.shape.max_positions)
        return self._run(name, batch.loss, options, batch.forward_only, data=batch.data)

    @_everywhere
    def _run(
        self, name: str, kind: str, options: dict[str, float], forward_only: bool, *, data: Sequence[Datum] = ()
    ) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
        tenant, loss = self._used(name), LOSSES[kind]
        together = list(self._together(data))  # none on the other ranks, which have no data
        wholes = [self._whole(loss, [data[row] for row in rows]) for rows in together]
        found: dict[int, NDArray[np.float32]] = {}
        total, gradient = np.zeros(2), {} if forward_only else tenant.zeros()
        with torch.no_grad() if forward_only else adding(tenant.parameters, gradient):
            for number, mine in enumerate(self._shares.hand_out(wholes, passes.together(self._chunks))):
                rows = together[number] if together else []
                if (said_BT3 := self._pass(loss, options, mine, len(rows), forward_only=forward_only)) is not None:
                    total += said_BT3[..., 1:].sum((0, 1)).double().numpy()
                    found |= {row: said_BT3[i, : len(data[row].tokens), 0].numpy() for i, row in enumerate(rows)}
        if not forward_only:
            tenant.add(gradient)
        metrics = {LOSS: float(total[0])} | ({CORRECT: float(total[1])} if WEIGHTS in loss.needs else {})
        return [found[row] for row in range(len(data))], metrics

    def _pass(
        self, loss: Loss, options: Mapping[str, float], mine: list[Fields], rows: int, *, forward_only: bool
    ) -> Tensor | None:
        """On rank 0 of each target in the `rows` of a batch its log-prob, its loss, and whether it counts and is the
        likeliest token, [B, T, 3]; None on the other ranks."""

        def reduced(logprobs_BT: Tensor, fields: Fields) -> Any:
            inside = fields[MASK] > 0
            by_token = torch.where(inside, loss.function(logprobs_BT, fields, options), 0.0)
            counts = inside & (fields[WEIGHTS] != 0) if WEIGHTS in fields else torch.zeros_like(inside)
            said = torch.stack([logprobs_BT, by_token, fields[LIKELIEST] * counts], -1).detach()
            return said if forward_only else (by_token.sum(), inside.new_zeros((), dtype=torch.int), said)

        said = passes.run(self._chunks, self._transformer, mine, reduced, forward_only=forward_only)
        like = [fields[MASK].new_zeros(*fields[MASK].shape, 3) for fields in mine]
        return self._shares.to_rank_zero(said, like, rows)

    def _together(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        """Rows of about one length, as many as the ranks have room for at once: `micro_tokens` in each forward pass."""
        stages = ps.get_pipeline_model_parallel_world_size()
        passes_at_once = len(self._shares) * (DEEP * stages if stages > 1 else 1)
        together: list[int] = []
        for row in sorted(range(len(data)), key=lambda i: (len(data[i].tokens), i)):
            if together and len(together) >= passes_at_once * self._room(len(data[row].tokens)):
                yield together
                together = []
            together.append(row)
        if together:
            yield together

    def _room(self, length: int) -> int:
        """Sequences in a forward pass."""
        return max(self._micro_tokens // length, 1)

    def _whole(self, loss: Loss, data: list[Datum]) -> Whole:
        lengths = torch.tensor([len(datum.tokens) for datum in data])
        width = int(lengths.max())
        tokens = torch.zeros(len(data), width + 1, dtype=torch.int64)
        for row, datum in zip(tokens, data, strict=True):
            row[: len(datum.tokens)] = torch.from_numpy(datum.tokens)
        fields = {TOKENS: tokens, LABELS: column(loss, data, TARGETS, width, np.int64)}
        fields[MASK] = (torch.arange(width) < lengths[:, None]).float()
        fields |= {key: column(loss, data, key, width, np.float32) for key in loss.needs}
        return Whole(fields, self._room(width))

    def _used(self, name: str) -> Tenant:
        """It is on the model then."""
        tenant = self._held[name]
        self._put(tenant)
        self._kept(name)
        return tenant

    def _kept(self, name: str) -> None:
        self._held.move_to_end(name)
        idle = [other for other, one in self._held.items() if one.gradient is None and other != name]
        for other in idle[: max(len(idle) + 1 - self._most, 0)]:
            del self._held[other]

    def _put(self, tenant: Tenant | None) -> None:
        if self._on is not tenant:
            for base, made in zip(self._bases, self._on.layers if self._on is not None else (), strict=False):
                take(base, made)
            self._on = tenant
            self._place(tenant.layers if tenant is not None else [])

    def _place(self, layers: Layers) -> None:
        for base, made in zip(self._bases, layers, strict=False):  # all weights have none
            put(base, made)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def seed_of(text: str) -> int:
    """The same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
