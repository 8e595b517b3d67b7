"""Cases about packed rows, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from trainer.megatron.attention import CausalAttention
from trainer.megatron.blocks import Blocks


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
    weights = (
        torch.randn(width, rows, heads * size, generator=generator, dtype=torch.float64) * (ids > 0).t()[..., None]
    )

    def run(output: torch.Tensor) -> list[torch.Tensor]:
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    def dense() -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in inputs)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        same = (ids[:, :, None] == ids[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~same[:, None], -torch.inf)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2) * (ids > 0).t()[..., None]

    mine, expected = run(module(*inputs, ids)), run(dense())
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
