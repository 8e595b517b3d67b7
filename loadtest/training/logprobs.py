"""The memory and the time of a step's output layer: log-probs of the labels, forward and backward.

In chunks, as the trainer computes them (trainer/megatron/logprobs.py, with the entropy), beside Megatron-Core's own
loss over the logits of all tokens (without it). Each is measured in a process of its own, as what its resident memory
peaks at above the inputs; time is of the processor.

hotswap bench logprobs [--small]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from loadtest.measure.run import with_machine

VOCAB, HIDDEN, TOKENS = 151_936, 256, 4096
WAYS = ("whole", "chunks")
DTYPES = ("float32", "bfloat16")


def run(path: Path | None, *, small: bool) -> dict[str, Any]:
    """Measure, print a table, write JSON if asked; returns the figures."""
    tokens = 64 if small else TOKENS
    cases = [(way, dtype) for dtype in DTYPES for way in WAYS]
    rows: list[dict[str, Any]] = [{"way": w, "dtype": d, **_in_a_process(w, d, tokens)} for w, d in cases]
    figures = {"vocab": VOCAB, "hidden": HIDDEN, "tokens": tokens, "rows": rows}
    table = Table(title=f"log-probs of {tokens} tokens over {VOCAB:,} words")
    for column in ("way", "dtype", "peak, MB", "CPU s"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["way"], row["dtype"], f"{row['peak_mb']:,.0f}", f"{row['cpu_s']:.2f}")
    Console().print(table)
    return with_machine(figures, path)


def _in_a_process(way: str, dtype: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "loadtest.training.logprobs", way, dtype, str(tokens)]
    found: dict[str, float] = orjson.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def _measure(way: str, dtype: str, tokens: int) -> dict[str, float]:
    import torch

    from trainer.config import ParallelConfig
    from trainer.megatron.logprobs import logprobs_and_entropy
    from trainer.megatron.parallel import distributed

    with distributed(ParallelConfig(), seed=0):
        from megatron.core import parallel_state as ps
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        kind, group = getattr(torch, dtype), ps.get_tensor_model_parallel_group()
        hidden, weight = (torch.randn(n, HIDDEN).to(kind).requires_grad_() for n in (tokens, VOCAB))
        labels = torch.randint(0, VOCAB, (tokens,))

        def loss(count: int) -> Any:
            if way == "chunks":
                return -logprobs_and_entropy(hidden[:count], weight, labels[:count], VOCAB, group)[:, 0].sum()
            logits = (hidden[:count] @ weight.t())[:, None]
            return vocab_parallel_cross_entropy(logits.float(), labels[:count, None]).sum()

        loss(8).backward()  # what a first use takes, and the gradients of the inputs
        before, began = _resident(), time.process_time()
        loss(tokens).backward()
        return {"peak_mb": (_resident() - before) / 1e6, "cpu_s": time.process_time() - began}


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(orjson.dumps(_measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))).decode())
