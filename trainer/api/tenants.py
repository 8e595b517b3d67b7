"""What clients train on one base model, which is in memory once: adapters of many, or all weights for one at a time.

A tenant is what one training client trains, with its gradient and Adam's moments. One tenant's adapter at a time is on
the model's layers (`lora.put`), so that tenants cannot touch each other. A tenant without an adapter has the model's
own weights: the next one that is made takes them. Gradients add up in float32 until the step, as in PyTorch; the step
is torch's AdamW, on fp32 main weights. A tenant is read and written as one safetensors file.

Everything here runs on one thread, in a process that is the only rank.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.api.errors import BadRequest
from trainer.api.losses import TARGETS, WEIGHTS, Loss, check, column
from trainer.api.wire import Adam, Batch, Datum
from trainer.config import LoraConfig, ModelConfig, ParallelConfig
from trainer.config.sections import Dtype, LinearLayer
from trainer.errors import CheckpointError
from trainer.megatron.attention import rotary_positions
from trainer.megatron.convert import export_hf, load_hf, parameters, unwrap
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors, finish_adapter, finish_checkpoint, write_shards
from trainer.megatron.lora import Switch, adapter_config, adapters, build, freeze, put, take
from trainer.megatron.model import DTYPES, transformer_config
from trainer.megatron.parallel import device
from trainer.megatron.roles import load_model

WEIGHT, FIRST, SECOND = "weight", "exp_avg", "exp_avg_sq"
LOSS, CORRECT = "loss:sum", "correct_tokens:sum"  # metrics; the SDK adds up those of a batch in several requests
ATTENTION: Final[tuple[LinearLayer, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD: Final[tuple[LinearLayer, ...]] = ("gate_proj", "up_proj", "down_proj")
_CONFIG: Final = "lora"  # of a file's metadata


class Tenant:
    """One client's adapter, or all weights (`lora` is None). `gradient` is None until there is one."""

    def __init__(self, lora: LoraConfig | None, layers: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        self.lora, self.layers, self.parameters, self.steps = lora, layers, parameters, 0
        self.weights = {name: p.detach().float() for name, p in self.parameters.items()}  # themselves, if fp32
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.gradient: dict[str, Tensor] | None = None
        self.fresh()

    def fresh(self) -> None:
        """Adam as it begins."""
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self.steps = 0

    def collect(self) -> None:
        """Add what a backward pass has left to the gradient."""
        if self.gradient is None:
            self.gradient = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.gradient[name] += parameter.grad.float()
                parameter.grad = None

    def discard(self, before: dict[str, Tensor] | None) -> None:
        """The gradient as it was."""
        self.gradient = before
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, params: Adam) -> dict[str, float]:
        """One step of AdamW, which takes the gradient. Raises BadRequest, and changes nothing, without a gradient that
        is finite."""
        if (gradient := self.gradient) is None:
            raise BadRequest("there is no gradient: call forward_backward before optim_step", "no_gradient")
        self.gradient = None
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
        if not math.isfinite(norm):
            advice = "it was dropped and the weights are as before; lower the learning rate, or load a checkpoint"
            raise BadRequest(f"the gradient's norm is {norm}: {advice}", "not_finite")
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            for g in gradient.values():
                g *= params.grad_clip_norm / (norm + 1e-6)
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
        self._cast()
        return {"grad_norm": norm}

    def write(self, path: Path) -> None:
        """Everything but the gradient, so that the file is whole or not there, also after a power failure."""
        tensors = {f"{WEIGHT}.{name}": w for name, w in self.weights.items()}
        for name, pair in self.moments.items():
            tensors |= {f"{kind}.{name}": moment for kind, moment in zip((FIRST, SECOND), pair, strict=True)}
        about = {_CONFIG: json.dumps(described(self.lora)), "steps": str(self.steps)}
        _write_durably(path, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, about)

    def read(self, path: Path, *, optimizer: bool) -> None:
        """Raises CheckpointError; nothing has changed then."""
        try:
            with safe_open(path, framework="pt") as file:
                about, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        if {n: t.shape for n, t in found.items() if n.startswith(f"{WEIGHT}.")} != {
            f"{WEIGHT}.{n}": w.shape for n, w in self.weights.items()
        }:
            raise CheckpointError(f"{path} is of another adapter or base model")
        for name, weight in self.weights.items():
            weight.copy_(found[f"{WEIGHT}.{name}"])
        self.gradient = None
        self.fresh()
        if optimizer:
            self.steps = int(about["steps"])
            for name, pair in self.moments.items():
                for kind, moment in zip((FIRST, SECOND), pair, strict=True):
                    moment.copy_(found[f"{kind}.{name}"])
        self._cast()

    def _cast(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.weights[name])  # nothing happens where they are one


class Tenants:
    """The base model, and what a tenant's requests do on it. Built after `parallel.distributed`."""

    def __init__(self, model: ModelConfig, shape: ModelShape, micro_tokens: int, *, full: bool = False) -> None:
        """Raises TrainerError when the checkpoint cannot be trained on. `full`: tenants have no adapters."""
        self.shape, self._model, self._micro_tokens = shape, model, micro_tokens
        self._tensors = None if model.random_init else HfTensors(model.path)
        (self._chunk,) = load_model(shape, transformer_config(shape, ParallelConfig(), model), self._tensors)
        self._base = unwrap(self._chunk)
        if not full:
            freeze(self._base)
        self._on: Tenant | None = None

    def tenant(self, lora: LoraConfig | None, seed: int) -> Tenant:
        """A new one: A random, B zero; or the checkpoint's weights, which are then no other tenant's any more."""
        self._put(None)
        if lora is None:
            assert self._tensors is not None  # the configuration says so
            load_hf(self._base, self.shape, self._tensors.get)
            return Tenant(None, {}, dict(parameters(self._base)))
        layers = build(self._base, self.shape, lora, seed, Switch())
        for adapter in layers.values():
            adapter.to(device())
        named = {f"{at}.{n}": p for at, made in layers.items() for n, p in made.named_parameters()}
        return Tenant(lora, layers, named)

    def run(self, tenant: Tenant, batch: Batch) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
        """Log-probs of each sequence's targets, and the metrics, which are sums; unless the batch says `forward_only`
        its gradient is added to the tenant's. Raises BadRequest; the gradient is as before then."""
        loss, options = check(batch, self.shape.vocab, self.shape.max_positions)
        self._put(tenant)
        found: dict[int, NDArray[np.float32]] = {}
        metrics: dict[str, float] = {}
        before = tenant.gradient
        if before is not None and not batch.forward_only:
            tenant.gradient = {name: g.clone() for name, g in before.items()}
        try:
            for rows in self._micro_batches(batch.data):
                data = [batch.data[row] for row in rows]
                with torch.set_grad_enabled(not batch.forward_only):
                    logprobs_BT, value, counted = self._forward(data, loss, options)
                if not batch.forward_only:
                    value.backward()
                    tenant.collect()
                for name, summand in ({LOSS: float(value.detach())} | counted).items():
                    metrics[name] = metrics.get(name, 0.0) + summand
                said = logprobs_BT.detach().cpu().numpy()
                found |= {row: said[i, : len(d.tokens)] for i, (row, d) in enumerate(zip(rows, data, strict=True))}
        except BaseException:  # memory, most likely: half a batch counts for nothing
            tenant.discard(before)
            raise
        return [found[row] for row in range(len(batch.data))], metrics

    def export(self, tenant: Tenant, dtype: Dtype, directory: Path) -> None:
        """Write it as it is: PEFT's two files of an adapter, or a Hugging Face checkpoint. Once it returns, the
        directory is whole also after a power failure."""
        self._put(tenant)
        named = tenant.weights.items() if tenant.lora is None else adapters(self._chunk)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = ((name, t.detach().to("cpu", DTYPES[dtype])) for name, t in export_hf(named, self.shape))
        written = write_shards(directory, tensors, 0)
        if tenant.lora is None:
            finish_checkpoint(directory, written, self._model.path, dtype)
        else:
            finish_adapter(directory, written, adapter_config(self.shape, tenant.lora, self._model.path))
        for file in directory.iterdir():
            _sync(file)
        _sync(directory)

    def _forward(
        self, data: list[Datum], loss: Loss, options: Mapping[str, float]
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        lengths = torch.tensor([len(datum.tokens) for datum in data])
        width = int(lengths.max())
        tokens = torch.zeros(len(data), width, dtype=torch.int64)
        for row, datum in zip(tokens, data, strict=True):
            row[: len(datum.tokens)] = torch.from_numpy(datum.tokens)
        labels = column(loss, data, TARGETS, width, np.int64)
        fields = {key: column(loss, data, key, width, np.float32).to(device()) for key in loss.needs}
        positions = torch.arange(width).expand(len(data), -1)
        inside = (positions < lengths[:, None]).to(device())
        with rotary_positions(None):
            out = self._chunk(tokens.to(device()), positions.to(device()), None, labels=labels.to(device()))
        logprobs_BT = out[..., 0].float()
        by_token = loss.function(logprobs_BT, fields, options)
        right = {}
        if WEIGHTS in fields:
            right = {CORRECT: float((out[..., 2].detach() * inside * (fields[WEIGHTS] != 0)).sum())}
        return logprobs_BT, torch.where(inside, by_token, 0.0).sum(), right

    def _micro_batches(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        """Rows of about one length together, as many as `micro_tokens` has room for."""
        together: list[int] = []
        for row in sorted(range(len(data)), key=lambda i: (len(data[i].tokens), i)):
            if together and (len(together) + 1) * len(data[row].tokens) > self._micro_tokens:
                yield together
                together = []
            together.append(row)
        yield together

    def _put(self, tenant: Tenant | None) -> None:
        if self._on is not tenant:
            if self._on is not None:
                take(self._base, self._on.layers)
            self._on = tenant
            if tenant is not None:
                put(self._base, tenant.layers)


def described(lora: LoraConfig | None) -> dict[str, Any] | None:
    """What makes two tenants fit each other; None: all weights."""
    if lora is None:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.target_modules)}


def lora_from(said: Mapping[str, Any] | None) -> LoraConfig | None:
    """The inverse of `described`."""
    if said is None:
        return None
    return LoraConfig(rank=said["rank"], alpha=said["alpha"], target_modules=tuple(said["targets"]))


def lora_of(file: Path) -> LoraConfig | None:
    """The adapter that a state file is of; None: of all weights. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt") as opened:
            return lora_from(json.loads(opened.metadata()[_CONFIG]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error


def seed_of(text: str) -> int:
    """The same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _write_durably(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    save_file(tensors, str(beside), metadata=about)
    settle(beside, path)


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    settle(beside, path)


def settle(beside: Path, path: Path) -> None:
    """Rename a file that was written, so that it is there after a power failure."""
    _sync(beside)
    beside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
