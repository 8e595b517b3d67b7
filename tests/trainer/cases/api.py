"""Cases about the training API's tenants, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from trainer.api.tenants import Tenant, Tenants
from trainer.api.wire import Adam, read_batch
from trainer.config import ModelConfig, ParallelConfig
from trainer.config.sections import LINEAR_LAYERS, TrainDtype
from trainer.errors import TrainerError
from trainer.megatron.convert import export_hf
from trainer.megatron.hf_config import load_shape
from trainer.megatron.parallel import split

LORA = {"rank": 3, "alpha": 32.0, "targets": list(LINEAR_LAYERS)}
ONE = "one"


def tenants(
    path: str, micro_tokens: int = 8192, dtype: TrainDtype = "float32", *, full: bool = False, **layout: Any
) -> Tenants:
    """As the server builds them. The case's process ends after it, and its groups with it."""
    parallel = ParallelConfig(**layout)
    split(parallel, 0)
    return Tenants(ModelConfig(path, dtype), load_shape(path), micro_tokens, parallel=parallel, full=full)


def tenant_losses(path: str, directory: str, warm: str, batches: list[str], micro_tokens: int) -> list[dict[str, Any]]:
    """Two steps on the batch `warm`, then what each batch says; into `directory` the adapter, and for each batch the
    gradient by PEFT's names. Batches are bodies in base64."""
    model = tenants(path, micro_tokens)
    model.make(ONE, LORA | {"alpha": 6.0}, "1")
    for _ in range(2):
        model.run(ONE, _batch(warm))
        model.step(ONE, Adam(learning_rate=3e-2).model_dump())
    model.export(ONE, "float32", directory)
    said = []
    for number, body in enumerate(batches):
        logprobs, metrics = model.run(ONE, _batch(body))
        said.append({"logprobs": [row.tolist() for row in logprobs], "metrics": metrics})
        save_file(_gradient(model), Path(directory) / f"gradient-{number}.st")
        _of(model).gradient = None
    return said


def accumulated(path: str, body: str) -> dict[str, float]:
    """Norms of the gradient: of a batch, of the batch twice, after a batch that is refused, and after a pass without
    gradient; the last three are of one accumulation."""
    model = tenants(path)
    model.make(ONE, LORA, "1")
    norms = {}
    model.run(ONE, _batch(body))
    norms["once"] = _norm(model)
    model.run(ONE, _batch(body))
    norms["twice"] = _norm(model)
    try:
        model.run(ONE, _batch(body).__class__("", 0, "nothing", _batch(body).data))
    except TrainerError:
        norms["refused"] = _norm(model)
    forward = _batch(body)
    model.run(ONE, forward.__class__("", 0, forward.loss, forward.data, forward.options, forward_only=True))
    norms["forward"] = _norm(model)
    return norms


def stepped(path: str, body: str, dtype: TrainDtype, file: str) -> dict[str, float]:
    """The largest difference of the weights from those of torch.optim.AdamW in float64 on the same gradients, after
    steps with other parameters each time, half of them after the tenant was written and read again; how far the steps
    went, and the largest difference of what the model computes with from the weights."""
    model = tenants(path, dtype=dtype)
    model.make(ONE, LORA, "1")
    begun = {name: w.double().clone() for name, w in _of(model).weights.items()}
    theirs = {name: torch.nn.Parameter(w.clone()) for name, w in begun.items()}
    optimizer = torch.optim.AdamW(list(theirs.values()))
    for step in range(6):
        params = Adam(learning_rate=1e-3 / (step + 1), weight_decay=0.1 * step, eps=1e-9, grad_clip_norm=step % 3)
        model.run(ONE, _batch(body))
        gradient = _of(model).gradient
        assert gradient is not None
        for name, parameter in theirs.items():
            parameter.grad = gradient[name].double()
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(theirs.values(), params.grad_clip_norm)
        betas = (params.beta1, params.beta2)
        said = {"lr": params.learning_rate, "betas": betas, "weight_decay": params.weight_decay, "eps": params.eps}
        optimizer.param_groups[0].update(said)
        optimizer.step()
        model.step(ONE, params.model_dump())
        if step % 2:
            model.write(ONE, file)
            model.drop(ONE)
            model.make(ONE, LORA, "2")
            model.read(ONE, file, True)
    tenant = _of(model)
    return {
        "difference": max(float((w.double() - theirs[n]).abs().max()) for n, w in tenant.weights.items()),
        "moved": max(float((w.double() - begun[n]).abs().max()) for n, w in tenant.weights.items()),
        "rounding": max(float((p.float() - tenant.weights[n]).abs().max()) for n, p in tenant.parameters.items()),
    }


def several_ranks(
    path: str, parallel: dict[str, Any], passes: list[list[str]], directory: str, *, full: bool, begin: str | None
) -> list[dict[str, Any]] | None:
    """Steps of a tenant, each after some passes, beside another tenant that is trained by turns with it: what rank 0 is
    told. Into `directory` its state, and below `export` what a sampler would get. `begin`: the state to go on from."""
    model = tenants(path, 24, full=full, **parallel)
    if dist.get_rank() > 0:
        return model.follow()
    lora = None if full else LORA
    said = []
    model.make(ONE, lora, "1")
    if begin is not None:
        model.read(ONE, begin, True)
    for bodies in passes:
        logprobs, losses = [], []
        for body in bodies:
            rows, loss = model.run(ONE, _batch(body))
            logprobs += [row.tolist() for row in rows]
            losses.append(loss)
        if not full:
            _disturb(model, bodies[0])
        norm = model.step(ONE, Adam(learning_rate=1e-2, grad_clip_norm=0.5).model_dump())["grad_norm"]
        said.append({"logprobs": logprobs, "losses": losses, "norm": norm})
    model.write(ONE, directory)
    model.export(ONE, "float32", f"{directory}/export")
    model.leave()
    return said


def _disturb(model: Tenants, body: str) -> None:
    """Another tenant takes a step, and a batch is refused."""
    if "other" not in model:
        model.make("other", LORA | {"rank": 2}, "9")
    model.run("other", _batch(body))
    with contextlib.suppress(TrainerError):
        model.run(ONE, _batch(body).__class__("", 0, "nothing", _batch(body).data))
    model.step("other", Adam().model_dump())
    with contextlib.suppress(TrainerError):
        model.step("other", Adam().model_dump())


def _of(model: Tenants) -> Tenant:
    return model._held[ONE]


def _norm(model: Tenants) -> float:
    return sum(float(g.double().square().sum()) for g in (_of(model).gradient or {}).values()) ** 0.5


def _batch(body: str) -> Any:
    return read_batch(base64.b64decode(body))


def _gradient(model: Tenants) -> dict[str, Any]:
    gradient = _of(model).gradient
    assert gradient is not None
    return {name: tensor.clone() for name, tensor in export_hf(gradient.items(), model.shape)}
