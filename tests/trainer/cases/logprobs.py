"""Cases about log-probs and entropies in chunks, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.megatron.logprobs import logprobs_and_entropy


def chunked_logprobs(
    tokens: int, hidden: int, vocab: int, padded: int, chunks: list[int], dtypes: list[str], exact: bool = False
) -> list[dict[str, Any]]:
    """`_chunked` for every chunk size and dtype."""
    return [_chunked(tokens, hidden, vocab, padded, chunk, dtype, exact) for chunk in chunks for dtype in dtypes]


def _chunked(tokens: int, width: int, vocab: int, padded: int, chunk: int, dtype: str, exact: bool) -> dict[str, Any]:
    """The largest differences to log-softmax over whole logits in float64, and the most numbers in a tensor meanwhile.
    `padded` rows are cut over the ranks, `chunk` tokens are a chunk."""
    generator = torch.Generator().manual_seed(3)
    kind = getattr(torch, dtype)
    hidden, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(kind).requires_grad_()
        for size in ((tokens, width), (padded, width))
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    towards = torch.randn(tokens, 2, generator=generator, dtype=torch.float64)
    whole_hidden, whole_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = (whole_hidden @ whole_weight[:vocab].t()).log_softmax(-1)
    labels[::2] = log_p[::2].argmax(-1)
    expected = torch.stack([log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], -1)
    (expected * towards).sum().backward()

    size, rank = padded // dist.get_world_size(), dist.get_rank()
    mine = weight[rank * size : (rank + 1) * size]
    largest = [0]
    with Largest(largest):
        found = logprobs_and_entropy(hidden, mine, labels, vocab, dist.group.WORLD, most=chunk * size, exact=exact)
        (found[:, :2].double() * towards).sum().backward()
    dist.all_reduce(hidden.grad)
    of_rows = weight.grad[rank * size : (rank + 1) * size] - whole_weight.grad[rank * size : (rank + 1) * size]
    best = log_p.detach().topk(2, -1)
    clear = best.values[:, 0] - best.values[:, 1] > 0.1  # in any precision
    return {
        "values": (found[:, :2] - expected).abs().max().item(),
        "likeliest": torch.equal((found[:, 2] == 1)[clear], (labels == best.indices[:, 0])[clear]),
        "by_hidden": (hidden.grad - whole_hidden.grad).abs().max().item(),
        "by_weight": of_rows.abs().max().item(),
        "largest": largest[0],
        "dtype": [dtype, str(found.dtype).removeprefix("torch.")],
    }


class Largest(TorchDispatchMode):
    """Notes the most elements that a tensor had."""

    def __init__(self, into: list[int]) -> None:
        super().__init__()
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._into[0] = max(self._into[0], result.numel())
        return result
