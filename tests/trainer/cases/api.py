"""Cases about the training API's tenants, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer.api.tenants import Tenant, Tenants
from trainer.api.wire import Adam, read_batch
from trainer.config import LoraConfig, ModelConfig, ParallelConfig
from trainer.config.sections import TrainDtype
from trainer.errors import TrainerError
from trainer.megatron.convert import export_hf
from trainer.megatron.hf_config import load_shape
from trainer.megatron.lora import adapters
from trainer.megatron.parallel import split


def tenants(path: str, micro_tokens: int = 8192, dtype: TrainDtype = "float32") -> Tenants:
    """As the server builds them. The case's process ends after it, and its groups with it."""
    split(ParallelConfig(), 0)
    return Tenants(ModelConfig(path, dtype), load_shape(path), micro_tokens)


def tenant_losses(path: str, directory: str, warm: str, batches: list[str], micro_tokens: int) -> list[dict[str, Any]]:
    """Two steps on the batch `warm`, then what each batch says; into `directory` the adapter, and for each batch the
    gradient by PEFT's names. Batches are bodies in base64."""
    model = tenants(path, micro_tokens)
    tenant = model.tenant(LoraConfig(rank=3, alpha=6.0), 1)
    for _ in range(2):
        model.run(tenant, _batch(warm))
        tenant.step(Adam(learning_rate=3e-2))
    model.export(tenant, "float32", Path(directory))
    said = []
    for number, body in enumerate(batches):
        logprobs, metrics = model.run(tenant, _batch(body))
        said.append({"logprobs": [row.tolist() for row in logprobs], "metrics": metrics})
        save_file(_gradient(model, tenant), Path(directory) / f"gradient-{number}.st")
        tenant.gradient = None
    return said


def accumulated(path: str, body: str) -> dict[str, float]:
    """Norms of the gradient: of a batch, of the batch twice, after a batch that is refused, and after a pass without
    gradient; the last three are of one accumulation."""
    model = tenants(path)
    tenant = model.tenant(LoraConfig(rank=3), 1)
    norms = {}
    model.run(tenant, _batch(body))
    norms["once"] = _norm(tenant)
    model.run(tenant, _batch(body))
    norms["twice"] = _norm(tenant)
    try:
        model.run(tenant, _batch(body).__class__("", 0, "nothing", _batch(body).data))
    except TrainerError:
        norms["refused"] = _norm(tenant)
    forward = _batch(body)
    model.run(tenant, forward.__class__("", 0, forward.loss, forward.data, forward.options, forward_only=True))
    norms["forward"] = _norm(tenant)
    return norms


def stepped(path: str, body: str, dtype: TrainDtype, file: str) -> dict[str, float]:
    """The largest difference of the weights from those of torch.optim.AdamW in float64 on the same gradients, after
    steps with other parameters each time, half of them after the tenant was written and read again; how far the steps
    went, and the largest difference of what the model computes with from the weights."""
    model = tenants(path, dtype=dtype)
    tenant = model.tenant(LoraConfig(rank=3), 1)
    begun = {name: w.double().clone() for name, w in tenant.weights.items()}
    theirs = {name: torch.nn.Parameter(w.clone()) for name, w in begun.items()}
    optimizer = torch.optim.AdamW(list(theirs.values()))
    for step in range(6):
        params = Adam(learning_rate=1e-3 / (step + 1), weight_decay=0.1 * step, eps=1e-9, grad_clip_norm=step % 3)
        model.run(tenant, _batch(body))
        for name, parameter in theirs.items():
            assert tenant.gradient is not None
            parameter.grad = tenant.gradient[name].double()
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(theirs.values(), params.grad_clip_norm)
        betas = (params.beta1, params.beta2)
        said = {"lr": params.learning_rate, "betas": betas, "weight_decay": params.weight_decay, "eps": params.eps}
        optimizer.param_groups[0].update(said)
        optimizer.step()
        tenant.step(params)
        if step % 2:
            tenant.write(Path(file))
            tenant = model.tenant(LoraConfig(rank=3), 2)
            tenant.read(Path(file), optimizer=True)
    return {
        "difference": max(float((w.double() - theirs[n]).abs().max()) for n, w in tenant.weights.items()),
        "moved": max(float((w.double() - begun[n]).abs().max()) for n, w in tenant.weights.items()),
        "rounding": max(float((p.float() - tenant.weights[n]).abs().max()) for n, p in tenant.parameters.items()),
    }


def _norm(tenant: Tenant) -> float:
    return sum(float(g.double().square().sum()) for g in (tenant.gradient or {}).values()) ** 0.5


def _batch(body: str) -> Any:
    return read_batch(base64.b64decode(body))


def _gradient(model: Tenants, tenant: Tenant) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in tenant.parameters.items()}
    assert tenant.gradient is not None
    named = [(name, tenant.gradient[names[id(p)]]) for name, p in adapters(model._chunk)]
    return {name: tensor.clone() for name, tensor in export_hf(named, model.shape)}
