"""Cases about parallel layouts, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.trainer.batches import random_batch, sampled_batch
from tests.trainer.cases import engine, numbers
from trainer.batch import Sequence, collate, pack
from trainer.megatron.convert import parameters, unwrap
from trainer.megatron.hf_files import finish_checkpoint, write_shards
from trainer.megatron.parallel import device, gather_json, on_rank_zero


def ppo(path: str, parallel: dict[str, Any], **config: Any) -> list[dict[str, float]]:
    """All numbers of two PPO steps: actor, critic and reference in one layout."""
    algorithm = {"name": "ppo", "kl_coef": 0.1, "minibatches": 2, "critic_lr": 1e-2}
    common = {"algorithm": algorithm, "gateway": {"url": "http://unused"}, "optimizer": {"lr": 1e-2}, "micro_batch": 2}
    with engine({"model": {"path": path}, "parallel": parallel} | common | config) as built:
        return [numbers(built.step(sampled_batch(built.shape.vocab, seed=step))) for step in range(2)]


def packed(path: str, parallel: dict[str, Any], *, rows: bool, **more: Any) -> list[list[float]]:
    """[loss, gradient norm] of three steps on sequences of many lengths, packed or one a row."""
    config = {"model": {"path": path}, "parallel": parallel, "optimizer": {"lr": 1e-2}, "micro_batch": 3}
    with engine(config | more) as built:
        trained = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            lengths = torch.randint(2, 12, (9,), generator=generator).tolist()
            tokens = [torch.randint(0, 17, (length + 1,), generator=generator).tolist() for length in lengths]
            sequences = [Sequence(tuple(t[:1]), tuple(t[1:])) for t in tokens]
            ranks = built.config.parallel.data
            stats = built.step(collate(sequences) if rows else pack(sequences, 27, ranks=ranks))
            trained.append([stats.loss, stats.grad_norm])
        return trained


def footprint(path: str, parallel: dict[str, Any], **config: Any) -> dict[str, Any]:
    """What this rank holds: weights by kind, the length of its activations, what a step kept for its backward pass,
    where Adam's states are, and the largest share of the model that it exports."""
    with engine({"model": {"path": path}, "parallel": parallel, "micro_batch": 8} | config) as built:
        lengths: list[int] = []
        for chunk in built.model:
            for layer in unwrap(chunk).decoder.layers:
                layer.register_forward_hook(lambda _m, _i, out: lengths.append(out[0].shape[0]))
        kept = [0]

        def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() == -1:  # not what a backward pass computes again
                kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
            stats = built.step(random_batch(built.shape.vocab))
        local = [(n, _local(p).numel()) for chunk in built.model for n, p in parameters(chunk)]
        return {
            "weights": sum(size for _, size in local),
            "experts": sum(size for name, size in local if "local_experts" in name),
            "layers": sum(len(unwrap(chunk).decoder.layers) for chunk in built.model),
            "chunks": [unwrap(chunk).decoder.layers[0].layer_number for chunk in built.model],
            "length": lengths[0],
            "passes": len(lengths),
            "kept": kept[0],
            "exported": sum(piece.tensor.numel() for piece in built.slices("float32")),
            "metrics": stats.metrics,
        }


def overflow(path: str, loss_scale: float, steps: int) -> list[dict[str, float]]:
    """The metrics of float16 steps, the learning rate's counter and whether the weights moved."""
    optimizer = {"lr": 1e-2, "loss_scale": loss_scale}
    with engine({"model": {"path": path, "dtype": "float16"}, "optimizer": optimizer}) as built:
        result = []
        for step in range(steps):
            before = [p.detach().clone() for p in built.model[0].parameters()]
            stats = built.step(random_batch(built.shape.vocab, seed=step))
            moved = any(not torch.equal(a, b) for a, b in zip(before, built.model[0].parameters(), strict=True))
            result.append({**stats.metrics, "moved": float(moved), "updates": float(built.scheduler.num_steps)})
        return result


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def on_gpu(path: str, steps: int, **config: Any) -> dict[str, Any]:
    """Losses of a GPU run, where Adam's states and main weights are, whether those on the host are pinned, and the
    device memory in use after the last step."""
    with engine({"model": {"path": path}, "optimizer": {"lr": 1e-2}} | config) as built:
        trained = []
        for step in range(steps):
            batch = random_batch(built.shape.vocab, rows=7, seed=step)
            trained.append(built.step({name: field.to(device()) for name, field in batch.items()}).loss)
        parts = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
        states = [state["exp_avg"].device.type for part in parts for state in part.optimizer.state.values()]
        mains = [
            w
            for part in parts
            for state in part.optimizer.state.values()
            if (w := state.get("master_param")) is not None
        ]
        pinned = [w.is_pinned() for w in mains]
        told = {"states": sorted(set(states)), "pinned": sorted(set(pinned)), "bytes": torch.cuda.memory_allocated()}
        return {"losses": trained, **told}


def saved(path: str, parallel: dict[str, Any], directory: str) -> list[str]:
    """Write the weights as a Hugging Face checkpoint, as the end of a run does; the files this rank wrote."""
    with engine({"model": {"path": path}, "parallel": parallel}) as built:
        mine = write_shards(directory, built.export("float32"), built.part)
        everyone = [entry for share in gather_json(mine) for entry in share]
        on_rank_zero(lambda: finish_checkpoint(directory, everyone, path, "float32"))
        return sorted({file for _, file, _ in mine})
