"""Cases about packed rows, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import varlen

from tests.trainer.cases import engine, unsplit
from tests.trainer.rollouts.trajectories import answer
from trainer.batch import Sequence, assemble, lay_out, plan_rows, take_back
from trainer.checkpoint import engine_state
from trainer.config import JsonlData, PackingConfig, ParallelConfig
from trainer.data import build_dataset
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.megatron import attention
from trainer.megatron.attention import Blocks, CausalAttention, ContextParallelAttention, local_positions
from trainer.megatron.engine import Engine
from trainer.megatron.parallel import split
from trainer.rewards.scorer import Score
from trainer.rollouts.experience import Experience
from trainer.trajectory import TrajectoryGroup


def packed_attention(segments: list[list[int]], groups: int, *, ragged: bool = False) -> dict[str, Any]:
    """Block-diagonal attention against a dense mask in float64: largest differences of output and gradients, and how
    many scores each computes. `ragged`: by the way of GPUs."""
    as_on_a_gpu = _ragged_on_cpu() if ragged else []
    as_on_a_gpu.clear()
    ids, inputs, weights = _drawn(segments, groups)
    module = _attention(CausalAttention)
    mine = _with_gradients(module(*inputs, ids), inputs, weights)
    expected = _with_gradients(_dense(inputs, ids, 0.3), inputs, weights)
    computed = (
        sum(as_on_a_gpu[:1]) if ragged else sum(b.index.numel() * b.index.shape[1] for b in Blocks.of(ids).buckets)
    )
    return {
        "differences": [(a - b).abs().max().item() for a, b in zip(mine, expected, strict=True)],
        "padding": mine[0][(ids == 0).t()].abs().sum().item(),
        "scores": computed,
        "causal_equals_plain": torch.allclose(
            module(*inputs, torch.ones_like(ids)), module(*inputs), rtol=1e-12, atol=1e-12
        ),
        "mean": F.mse_loss(mine[0], torch.zeros_like(mine[0])).item(),
    }


def _drawn(segments: list[list[int]], groups: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The segments; queries, keys and values; and [T, B, heads * D] to take a gradient by, which is 0 at padding."""
    generator, ids = torch.Generator().manual_seed(0), torch.tensor(segments)
    (rows, width), heads, size = ids.shape, 4, 8
    shapes = [(width, rows, heads, size), (width, rows, groups, size), (width, rows, groups, size)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    weights = torch.randn((width, rows, heads * size), generator=generator, dtype=torch.float64)
    return ids, inputs, weights * (ids > 0).t()[..., None]


def _attention(kind: Any) -> Any:
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.scale = 0.3
    return module


def _with_gradients(output: torch.Tensor, inputs: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def _dense(inputs: list[torch.Tensor], ids: torch.Tensor, scale: float) -> torch.Tensor:
    """By a dense mask: [T, B, heads * D], 0 at padding."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in inputs)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    width = ids.shape[1]
    same = (ids[:, :, None] == ids[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~same[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2) * (ids > 0).t()[..., None]


@functools.cache
def _ragged_on_cpu() -> list[int]:
    """Let packed rows go the way that they go on a GPU, with a reference in place of torch's kernels. The list, the
    same one each time, gets the number of scores of each call. Not undone: a case has its own processes."""
    scores: list[int] = []

    def pieces(query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, scale: float) -> Iterator[Any]:
        """The places of a piece's queries and keys; its queries, keys and values, [heads, tokens, D]; what each query
        pays to each key."""
        for piece in range(len(query_ends) - 1):
            here, there = (slice(int(e[piece]), int(e[piece + 1])) for e in (query_ends, key_ends))
            q, k, v = query[here].transpose(0, 1), key[there].transpose(0, 1), value[there].transpose(0, 1)
            k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            yield here, there, q, k, v, (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)

    def forward(q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        longest_q, longest_k, causal, scale, window, *grouped = given  # what is as by default is left out
        lengths = [q_ends.diff(), k_ends.diff()]
        assert [longest_q, longest_k] == [int(n.max()) for n in lengths]
        assert (causal, window, grouped) == (True, [-1, 0], [True] * (q.shape[1] != k.shape[1]))
        assert q_ends.dtype == k_ends.dtype == torch.int32
        scores.append(int((lengths[0] * lengths[1]).sum()))
        out = [(pays @ v).transpose(0, 1) for *_, v, pays in pieces(q, k, v, q_ends, k_ends, scale)]
        return torch.cat(out), q.new_zeros(0), torch.zeros(2, dtype=torch.uint64)

    def backward(gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        q_ends, k_ends, *_, scale, _ = given
        of_q, of_k, of_v = (torch.zeros_like(t) for t in (q, k, v))
        for here, there, queries, keys, values, pays in pieces(q, k, v, q_ends, k_ends, scale):
            by_out = gradient[here].transpose(0, 1)
            by_pays = by_out @ values.mT
            by_product = pays * (by_pays - (by_pays * pays).sum(-1, keepdim=True)) * scale
            of_q[here] += (by_product @ keys).transpose(0, 1)
            for total, each in ((of_k, by_product.mT @ queries), (of_v, pays.mT @ by_out)):
                total[there] += each.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
        return of_q, of_k, of_v

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    attention.takes_ragged = lambda _: True
    return scores


def context_attention(segments: list[list[int]], groups: int, *, packed: bool, ragged: bool = False) -> dict[str, Any]:
    """Results of `packed_attention`, of this rank's part of rows that are cut over all ranks. Rows that are not packed
    are one segment each."""
    as_on_a_gpu = _ragged_on_cpu() if ragged else []
    as_on_a_gpu.clear()
    split(ParallelConfig(context=dist.get_world_size()), 0)
    ids, inputs, weights = _drawn(segments, groups)
    expected = _with_gradients(_dense(inputs, ids, 0.3), inputs, weights)

    module, scores = _attention(ContextParallelAttention), list[int]()
    plain = module._causal
    module._causal = lambda q, k, v: scores.append(q.shape[0] * q.shape[1] * k.shape[1]) or plain(q, k, v)
    mine = local_positions(ids.shape[1], ids.device)
    local = [t.detach()[mine].requires_grad_() for t in inputs]
    output = module(*local, ids if packed else None)
    found = _with_gradients(output, local, weights[mine])
    unsplit()
    real = (ids > 0).t()[mine]
    return {
        "differences": [(a - b[mine])[real].abs().max().item() for a, b in zip(found, expected, strict=True)],
        "padding": output[~real].abs().sum().item() if packed else 0.0,
        "scores": sum(as_on_a_gpu[:1] if ragged else scores),
    }


def packed_training(
    path: str, parallel: dict[str, int], algorithm: dict[str, Any], max_tokens: int = 48, **config: Any
) -> dict[str, Any]:
    """The same steps on packed and on unpacked rows: their numbers, the log-probs before the first, the weights after
    the last (the largest difference), and how many cells each layout of the first batch has."""
    results: dict[str, Any] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    logprobs: dict[str, list[torch.Tensor]] = {}
    for name, packing in (("plain", None), ("packed", PackingConfig(max_tokens))):
        sections = {"algorithm": algorithm, "optimizer": {"lr": 1e-2}, "micro_batch": 4}
        with engine(path, parallel, **sections | config) as built:
            steps = [sequences(built, seed) for seed in range(3)]
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


def sequences(built: Engine, seed: int) -> list[Sequence]:
    """Sequences that the algorithm makes of random records and rollouts of very different lengths."""
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
    files = {"kind": "jsonl", "path": data, "cache_dir": directory}
    sections = {"packing": {"max_tokens": 40}, "batch": 12, "optimizer": {"lr": 1e-2}}
    with engine(path, parallel, data=files, **sections) as built:
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
