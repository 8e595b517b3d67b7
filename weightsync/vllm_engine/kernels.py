"""The kind of this CPU, and the library of kernels that vLLM has loaded for it."""

from __future__ import annotations

import itertools
import re
import sys
from enum import IntEnum
from pathlib import Path


class CpuKind(IntEnum):
    """The matrix instructions that a CPU has. Each kind has those of the kinds before it; AVX2 is that or less."""

    AVX2 = 0
    AVX512 = 1
    AVX512_BF16 = 2
    AMX = 3


FLAGS = ("avx512_f", "avx512_bf16", "amx_tile")  # of the kinds after AVX2, as torch.cpu.get_capabilities() names them


def cpu_kind() -> CpuKind:
    """The kind that torch sees, and vLLM with it. Where a virtual machine hides BF16, a CPU with AMX is AVX512."""
    import torch

    return CpuKind(sum(1 for _ in itertools.takewhile(torch.cpu.get_capabilities().get, FLAGS)))


def loaded_library() -> str | None:
    """vLLM's library of kernels in this process, such as "_C_AVX512"; None before `vllm._custom_ops` is imported."""
    found = re.search(r"/vllm/(_C\w*)\.", Path("/proc/self/maps").read_text())
    return found[1] if found else None


def report() -> None:
    """Write both into this process's log, whatever level vLLM gives its loggers."""
    print(f"hotswap: CPU kind {cpu_kind().name}, kernels vllm.{loaded_library()}", file=sys.stderr, flush=True)
