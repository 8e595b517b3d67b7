"""Log-probs of the labels, the entropy of the distribution, and whether a label is its likeliest token, from hidden
states, a chunk of tokens at a time.

With logits z = W h of a token (W: the output layer's weights, cut along the vocabulary over tensor-parallel ranks) and
log p = z - log sum exp z:

    log-prob   log p_label          its gradient by z_j: [j = label] - p_j
    entropy    H = -sum p log p     its gradient by z_j: -p_j (log p_j + H)
    likeliest  z_label = max z      without a gradient

The logits of the whole vocabulary are there for one chunk only. The backward pass computes them again, from what is
kept by token: the hidden state, log sum exp z and H. Rows that pad W for the sake of the layout are left out.

In half precision z is rounded to 8 or 11 bits before anything is in fp32: log-probs near 0 lose all their digits
(MiniMax-M1, arXiv 2506.13585, section 3.2). `exact` computes the products in fp32, from a copy of W that is there for
as long as the pass through it takes.

Shapes: N tokens, H hidden, V rows of W on this rank, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOGITS = 1 << 25
"""Of a chunk, on a rank: 128 MiB in fp32, and some 220 tokens where the vocabulary has 150,000."""


def logprobs_and_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    vocab: int,
    group: Any,
    most: int = LOGITS,
    *,
    exact: bool = False,
) -> Tensor:
    """[N, 3] in fp32 (or the precision of the hidden states, if that is higher), the same on all ranks of `group`: the
    log-prob, the entropy, and 1 where no token is likelier than the label, else 0.

    `vocab` counts the real rows of the whole matrix. The gradient by `hidden_NH` is that of this rank's rows alone: the
    ranks' are to be summed. `exact`: the products too are in that precision.
    """
    result: Tensor = _LogProbs.apply(hidden_NH, weight_VH, labels_N, vocab, group, most, exact)
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        vocab: int,
        group: Any,
        most: int,
        exact: bool,
    ) -> Tensor:
        first = dist.get_rank(group) * len(weight_VH)
        ctx.real = min(max(vocab - first, 0), len(weight_VH))
        ctx.chunk = max(1, most // len(weight_VH))
        ctx.exact, wide = exact, torch.promote_types(hidden_NH.dtype, torch.float32)
        factor_VH = weight_VH.to(wide) if exact else weight_VH
        found = torch.empty(len(labels_N), 3, dtype=wide, device=hidden_NH.device)
        total = found.new_empty(len(labels_N))
        for part in _chunks(len(labels_N), ctx.chunk):
            z = _logits(hidden_NH[part], factor_VH, ctx.real, wide)
            here, place = _places(labels_N[part] - first, ctx.real)
            peak = z.amax(1)
            _reduce(peak, dist.ReduceOp.MAX, group)
            p = (z - peak[:, None]).exp_()  # times a factor, yet
            sums = torch.stack([z.gather(1, place)[:, 0] * here, p.sum(1), z.mul_(p).sum(1)])
            _reduce(sums, dist.ReduceOp.SUM, group)
            chosen, mass, weighted = sums
            total[part] = peak + mass.log()
            found[part, 0], found[part, 1] = chosen - total[part], total[part] - weighted / mass
            found[part, 2] = chosen >= peak
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N - first, total, found[:, 1].clone())
        return found

    @staticmethod
    def backward(ctx: Any, gradient_N3: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_NH, weight_VH, labels_N, total_N, entropy_N = ctx.saved_tensors
        rows = max(ctx.real, 1)
        of_hidden = torch.empty_like(hidden_NH)
        of_weight = weight_VH.new_zeros(weight_VH.shape, dtype=total_N.dtype)
        factor_VH = weight_VH.to(total_N.dtype) if ctx.exact else weight_VH
        for part in _chunks(len(labels_N), ctx.chunk):
            by_logprob, by_entropy = gradient_N3[part, :1], gradient_N3[part, 1:2]
            hidden_nH = hidden_NH[part].to(factor_VH.dtype)
            log_p = _logits(hidden_nH, factor_VH, ctx.real, total_N.dtype).sub_(total_N[part, None])
            p = log_p.exp()
            by_z = log_p.add_(entropy_N[part, None]).mul_(-by_entropy).sub_(by_logprob).mul_(p)
            here, place = _places(labels_N[part], ctx.real)
            by_z.scatter_add_(1, place, by_logprob * here[:, None])
            by_z = by_z.to(factor_VH.dtype)
            of_hidden[part] = by_z @ factor_VH[:rows]
            of_weight[:rows] += by_z.t() @ hidden_nH
        return of_hidden, of_weight.to(weight_VH.dtype), None, None, None, None, None


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _logits(hidden_nH: Tensor, weight_VH: Tensor, real: int, dtype: torch.dtype) -> Tensor:
    """[n, real rows]; one column that counts for nothing on a rank that has padding alone."""
    z = (hidden_nH.to(weight_VH.dtype) @ weight_VH[: max(real, 1)].t()).to(dtype)
    return z if real else z.fill_(torch.finfo(dtype).min)


def _places(local_n: Tensor, real: int) -> tuple[Tensor, Tensor]:
    """Whether each label is among this rank's rows, [n], and in which one, [n, 1] (any, if it is not)."""
    return (local_n >= 0) & (local_n < real), local_n.clamp(0, max(real - 1, 0))[:, None]


def _reduce(values: Tensor, how: Any, group: Any) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=how, group=group)
