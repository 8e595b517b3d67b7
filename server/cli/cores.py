"""Which cores an instance computes on when several share a host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"
THREADS_ENV = "OMP_NUM_THREADS"


def share_of_cores(index: int, instances: int, vllm_args: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Environment that gives instance `index` of `instances` its part of this process's cores, for vLLM on CPU.

    Nothing for a single instance, nor where the user has said it already; with fewer cores than instances they take
    turns on them.
    """
    if instances == 1 or BIND_ENV in env:
        return {}
    cores = _part(sorted(os.sched_getaffinity(0)), index, instances)
    ranks = _tensor_parallel(vllm_args)
    parts = [_part(cores, rank, ranks) for rank in range(ranks)]
    threads = env.get(THREADS_ENV) or str(len(parts[0]))
    return {BIND_ENV: "|".join(",".join(map(str, part)) for part in parts), THREADS_ENV: threads}


def _part(cores: Sequence[int], index: int, parts: int) -> Sequence[int]:
    """The `index`-th of `parts` runs of nearly equal length; single cores in turn if there are fewer than parts."""
    if len(cores) < parts:
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // parts : (index + 1) * len(cores) // parts]


def _tensor_parallel(vllm_args: Sequence[str]) -> int:
    """The number of ranks asked of vLLM; 1 if it is not said in a form vLLM would take."""
    words = [word for arg in vllm_args for word in arg.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name in ("-tp", "--tensor-parallel-size", "--tensor_parallel_size") and value.isdigit() and int(value) > 0:
            return int(value)
    return 1
