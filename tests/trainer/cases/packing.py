"""Cases about packed rows, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.trainer.rollouts.trajectories import answer
from trainer.batch import Sequence, assemble, lay_out, plan_rows
from trainer.config import PackingConfig, ParallelConfig
from trainer.data.records import Record
from trainer.megatron.attention import Blocks, CausalAttention, ContextParallelAttention, local_positions
from trainer.megatron.engine import Engine
from trainer.megatron.parallel import split
from trainer.rewards.scorer import Score
from trainer.trajectory import TrajectoryGroup


def packed_attention(segments: list[list[int]], groups: int) -> dict[str, Any]:
    """Block-diagonal attention against a dense mask in float64: largest differences of output and gradients, and how
    many scores each computes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(segments)
    (rows, width), heads, size = ids.shape, 4, 8
    shapes = [(width, rows, heads, size), (width, rows, groups, size), (width, rows, groups, size)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    module = CausalAttention.__new__(CausalAttention)
    torch.nn.Module.__init__(module)
    module.scale = 0.3
    weights = _weights(ids, heads * size, generator)

    def run(output: torch.Tensor) -> list[torch.Tensor]:
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    mine, expected = run(module(*inputs, ids)), run(_dense(inputs, ids, 0.3))
    computed = sum(b.index.numel() * b.index.shape[1] for b in Blocks.of(ids).buckets)
    return {
        "differences": [(a - b).abs().max().item() for a, b in zip(mine, expected, strict=True)],
        "padding": mine[0][(ids == 0).t()].abs().sum().item(),
        "scores": computed,
        "causal_equals_plain": torch.allclose(
            module(*inputs, torch.ones_like(ids)), module(*inputs), rtol=1e-12, atol=1e-12
        ),
        "mean": F.mse_loss(mine[0], torch.zeros_like(mine[0])).item(),
    }


def _weights(ids: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """[T, B, size], to take a gradient by; 0 at padding."""
    shape = (ids.shape[1], ids.shape[0], size)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (ids > 0).t()[..., None]


def _dense(inputs: list[torch.Tensor], ids: torch.Tensor, scale: float) -> torch.Tensor:
    """By a dense mask: [T, B, heads * D], 0 at padding."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in inputs)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    width = ids.shape[1]
    same = (ids[:, :, None] == ids[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~same[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2) * (ids > 0).t()[..., None]


def context_attention(segments: list[list[int]], groups: int, *, packed: bool) -> dict[str, Any]:
    """What `packed_attention` says, of this rank's part of rows that are cut over all ranks. Rows that are not packed
    are one segment each."""
    from tests.trainer.cases import unsplit

    split(ParallelConfig(context=dist.get_world_size()), 0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(segments)
    (rows, width), heads, size = ids.shape, 4, 8
    shapes = [(width, rows, heads, size), (width, rows, groups, size), (width, rows, groups, size)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    weights = _weights(ids, heads * size, generator)
    whole = _dense(inputs, ids, 0.3)
    expected = [whole, *torch.autograd.grad((whole * weights).sum(), inputs)]

    module, scores = ContextParallelAttention.__new__(ContextParallelAttention), []
    torch.nn.Module.__init__(module)
    module.scale = 0.3
    plain = module._causal
    module._causal = lambda q, k, v: scores.append(q.shape[0] * q.shape[1] * k.shape[1]) or plain(q, k, v)
    mine = local_positions(width, ids.device)
    local = [t.detach()[mine].requires_grad_() for t in inputs]
    output = module(*local, ids if packed else None)
    found = [output, *torch.autograd.grad((output * weights[mine]).sum(), local)]
    unsplit()
    real = (ids > 0).t()[mine]
    return {
        "differences": [(a - b[mine])[real].abs().max().item() for a, b in zip(found, expected, strict=True)],
        "padding": output[~real].abs().sum().item() if packed else 0.0,
        "scores": sum(scores),
    }


def packed_training(
    path: str, parallel: dict[str, int], algorithm: dict[str, Any], max_tokens: int = 48, **config: Any
) -> dict[str, Any]:
    """The same steps on packed and on unpacked rows: their numbers, the log-probs before the first, the weights after
    the last (the largest difference), and how many cells each layout of the first batch has."""
    from tests.trainer.cases import engine
    from trainer.batch import take_back

    results: dict[str, Any] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    logprobs: dict[str, list[torch.Tensor]] = {}
    for name, packing in (("plain", None), ("packed", PackingConfig(max_tokens))):
        gateway = {"url": "http://unused"}
        sections = {"algorithm": algorithm, "gateway": gateway, "optimizer": {"lr": 1e-2}, "micro_batch": 4}
        with engine({"model": {"path": path}, "parallel": parallel} | sections | config) as built:
            steps = [_sequences(built, seed) for seed in range(3)]
            layout = {"ranks": built.config.parallel.data, "minibatches": built.algorithm.minibatches}
            rows = plan_rows(steps[0], max_tokens, **layout) if packing else [[i] for i in range(len(steps[0]))]
            if (found := built.logprobs(lay_out(steps[0], rows, packed=packing is not None))) is not None:
                logprobs[name] = take_back(found, steps[0], rows)
            batches = [assemble(sequences, packing, **layout) for sequences in steps]
            stats = [built.step(fields) for fields in batches]
            results[name] = [{"loss": s.loss, "grad_norm": s.grad_norm, "tokens": s.tokens, **s.metrics} for s in stats]
            results[f"{name}_cells"] = batches[0]["mask"].numel()
            weights[name] = {key: tensor.clone() for key, tensor in built.export("float32")}
    results["weights"] = max(
        [(weights["packed"][key] - tensor).abs().max().item() for key, tensor in weights["plain"].items()], default=0.0
    )
    pairs = zip(logprobs.get("plain", []), logprobs.get("packed", []), strict=True)
    results["logprobs"] = max([(a - b).abs().max().item() for a, b in pairs], default=0.0)
    return results


def _sequences(built: Engine, seed: int) -> list[Sequence]:
    """What the algorithm makes of random records and rollouts of very different lengths."""
    rng = np.random.default_rng(seed)

    def ids(longest: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, built.shape.vocab, rng.integers(1, longest + 1)).tolist())

    records, groups = [], []
    for index in range(6):
        records.append(Record(index, "", "", ids(9), ids(20), ids(20), ids(6)))
        count = built.algorithm.samples_per_prompt
        answers = [ids(20) for _ in range(count)]
        samples = [answer(a, tuple((-3 + 0.3 * rng.normal(size=len(a))).tolist()), "stop", ()) for a in answers]
        scores = tuple(Score(float(rng.integers(0, 2))) for _ in range(count))
        groups.append(TrajectoryGroup(records[-1].prompt_ids, tuple(samples), scores))
    return built.algorithm.sequences(records, groups if built.algorithm.samples_per_prompt else [])


def from_files(path: str, parallel: dict[str, int], data: str, directory: str, steps: list[int]) -> dict[str, Any]:
    """[loss, grad_norm] of steps [first, last) of packed fine-tuning on a file, and the prompts they used; what came
    before is read from `directory`, what follows can go on from there."""
    from tests.trainer.cases import engine
    from trainer.checkpoint import engine_state
    from trainer.config import JsonlData
    from trainer.data import build_dataset
    from trainer.data.tokenizer import Tokenizer
    from trainer.rollouts.experience import Experience

    files = {"kind": "jsonl", "path": data, "cache_dir": directory}
    sections = {"data": files, "packing": {"max_tokens": 40}, "batch": 12, "optimizer": {"lr": 1e-2}}
    with engine({"model": {"path": path}, "parallel": parallel} | sections) as built:
        c = built.config
        assert isinstance(c.data, JsonlData)
        experience = Experience(c, built.algorithm, build_dataset(c.data, Tokenizer(path), c.seed), None, 64)
        cursor = Path(directory) / "cursor.json"
        if steps[0]:
            engine_state.load(built, Path(directory))
            experience.feed.load_state_dict(json.loads(cursor.read_text()))
        trained, tokens = [], []
        for step in range(*steps):
            experience.begin(0, experience.feed.drawn, steps[1] - step)
            assert experience.part() is None
            fields = experience.batch()
            stats = built.step(fields)
            trained.append([stats.loss, stats.grad_norm])
            tokens.append(sorted(fields["tokens"].flatten().tolist()))
        if not steps[0]:
            engine_state.save(built, Path(directory))
            dist.barrier()
            cursor.write_text(json.dumps(experience.feed.state_dict()))
        return {"trained": trained, "tokens": [[t for t in step if t] for step in tokens]}
