"""Cases about low-rank adapters, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.trainer.batches import random_batch
from tests.trainer.cases import engine, logits
from trainer.batch import TOKENS, Fields
from trainer.megatron.convert import export_hf, placement
from trainer.megatron.hf_files import finish_adapter, finish_checkpoint, write_shards
from trainer.megatron.lora import Pair, adapter_config, adapters
from trainer.megatron.parallel import gather_json, on_rank_zero
from trainer.publish import WeightPublisher


def write_adapter(built: Any, directory: str) -> None:
    """What a run leaves in `save_to`."""
    shares = gather_json(write_shards(directory, built.export("float32"), built.part))
    written = [w for share in shares for w in share]
    lora, path = built.config.lora, built.config.model.path
    on_rank_zero(lambda: finish_adapter(directory, written, adapter_config(built.shape, lora, path)))


def adapted(path: str, parallel: dict[str, Any], lora: dict[str, Any], directory: str) -> list[float]:
    """Two steps; then into `directory` the adapter, `merged/` the model with the adapter in it, this stage's
    `logits.st`, and after one more step its `gradients-RANK.st` by PEFT's names. [loss, gradient norm] of that step."""
    config = {"parallel": parallel, "optimizer": {"lr": 3e-2, "clip_grad": 1e9}, "lora": lora}
    with engine({"model": {"path": path}} | config) as built:
        for step in range(2):
            built.step(random_batch(built.shape.vocab, seed=step))
        write_adapter(built, directory)
        merged = Path(directory) / "merged"
        on_rank_zero(lambda: merged.mkdir())
        shares = gather_json(write_shards(merged, built.export_merged("float32"), built.part))
        on_rank_zero(lambda: finish_checkpoint(merged, [w for share in shares for w in share], path, "float32"))
        batch = random_batch(built.shape.vocab, seed=2)
        if (found := logits(built, batch[TOKENS][:, :-1])) is not None and built.part in (0, 1):
            save_file({"logits": found[..., : built.shape.vocab].contiguous()}, Path(directory) / "logits.st")
        stats = built.step(batch)
        named = [(name, getattr(p, "main_grad", p.grad)) for chunk in built.model for name, p in adapters(chunk)]
        gradients = {name: tensor.clone() for name, tensor in export_hf(named, built.shape)}
        save_file(gradients, Path(directory) / f"gradients-{built.part}.st")
        return [stats.loss, stats.grad_norm]


def held(path: str, lora: dict[str, Any], **config: Any) -> dict[str, Any]:
    """What training an adapter holds and moves, before and after a step: gradients, optimizer states, weights."""
    with engine({"model": {"path": path}, "lora": lora} | config) as built:
        (chunk,) = built.model
        before = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        built.step(random_batch(built.shape.vocab))
        trained = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
        states = [p for part in built.optimizer.chained_optimizers for g in part.param_groups for p in g["params"]]
        return {
            "moved": sorted(n for n, p in chunk.named_parameters() if not torch.equal(p, before[n])),
            "trained": sorted(trained),
            "elements": sum(p.numel() for p in trained.values()),
            "gradients": sum(b.grad_data.numel() for b in (*chunk.buffers, *chunk.expert_parallel_buffers)),
            "graded": sorted(n for n, p in chunk.named_parameters() if p.grad is not None or hasattr(p, "main_grad")),
            "states": sum(p.numel() for p in states),
        }


def references(path: str, parallel: dict[str, Any], lora: dict[str, Any] | None) -> dict[str, Any]:
    """What the reference says of a batch before and after three steps of DPO, what the actor says then, and the bytes
    of all roles."""
    config = {"algorithm": {"name": "dpo"}, "parallel": parallel, "lora": lora, "optimizer": {"lr": 3e-2}}
    with engine({"model": {"path": path}} | config) as built:
        fields = random_batch(built.shape.vocab, rows=6, seed=9)
        before = _said(built, "reference", fields)
        losses = [built.step(random_batch(built.shape.vocab, rows=6, seed=step)).loss for step in range(3)]
        after, actor = _said(built, "reference", fields), _said(built, "actor", fields)
        tensors = {id(t): t for found in built.storages().values() for t in found}
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}
        parameters = {id(p) for role in built.roles.values() for chunk in role.model for p in chunk.parameters()}
        return {
            "before": before,
            "after": after,
            "actor": actor,
            "losses": losses,
            "storages": sorted(built.storages()),
            "bytes": sum(held.values()),
            "parameters": len(parameters),
        }


def repeated(path: str, lora: dict[str, Any], recompute: str) -> dict[str, Any]:
    """What the actor says twice of one batch without training, and the losses of two steps on the same batch at a
    learning rate of nearly zero."""
    model = {"path": path, "recompute": recompute}
    with engine({"model": model, "lora": lora, "optimizer": {"lr": 1e-12}}) as built:
        fields = random_batch(built.shape.vocab)
        built.actor.model[0].apply(_randomise)
        said = [_said(built, "actor", fields) for _ in range(2)]
        stats = [built.step(fields) for _ in range(2)]
        return {"said": said, "losses": [s.loss for s in stats], "norms": [s.grad_norm for s in stats]}


def _said(built: Any, role: str, fields: Fields) -> list[list[float]]:
    """What a role says of the batch: [B, T] on rank 0, nothing on the others."""
    found = built._said([role], fields)
    return found[0].tolist() if found else []


def _randomise(module: torch.nn.Module) -> None:
    """Make B count."""
    if isinstance(module, Pair):
        module.B.data.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(1))


def publish_adapter(path: str, parallel: dict[str, Any], store: str, lora: dict[str, Any], directory: str) -> int:
    """A version with the adapter after one step, which lies in `directory`, too."""
    section = {"model": "tiny", "store": store, "dtype": "float32", "timeout_s": 20}
    with engine({"model": {"path": path}, "parallel": parallel, "publish": section, "lora": lora}) as built:
        assert built.config.publish is not None
        with contextlib.closing(WeightPublisher(built.config.publish, built)) as publisher:
            built.step(random_batch(built.shape.vocab))
            write_adapter(built, directory)
            return publisher.publish(1).version


def replicas(path: str, parallel: dict[str, Any], lora: dict[str, Any]) -> dict[str, list[float]]:
    """After three steps, what this rank has of the matrices that are whole on every rank, by name."""
    config = {"parallel": parallel, "lora": lora, "optimizer": {"lr": 3e-2}}
    with engine({"model": {"path": path}} | config) as built:
        for step in range(3):
            built.step(random_batch(built.shape.vocab, seed=step))
        named = [(name, p) for chunk in built.model for name, p in adapters(chunk)]
        return {n: p.flatten().tolist() for n, p in named if placement(built.shape, n).cut == "replicated"}
