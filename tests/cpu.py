"""The kind of this processor, and tests of what only some kinds execute."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import pytest
import torch


class CpuKind(IntEnum):
    """The matrix instructions that a CPU has. Each kind has those of the kinds before it; AVX2 is that or less."""

    AVX2 = 0
    AVX512 = 1
    AVX512_BF16 = 2
    AMX = 3


FLAGS = ("avx512_f", "avx512_bf16", "amx_tile")  # of the kinds after AVX2, as torch.cpu.get_capabilities() names them


def cpu_kind(capabilities: Mapping[str, Any] | None = None) -> CpuKind:
    """The kind of a CPU with these capabilities, which torch names; by default of the CPU that this process sees."""
    has = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return CpuKind(sum(1 for _ in itertools.takewhile(has.get, FLAGS)))


def needs(kind: CpuKind) -> pytest.MarkDecorator:
    """Skips the test on a CPU of a lesser kind."""
    return pytest.mark.skipif(cpu_kind() < kind, reason=f"it needs a CPU with {kind.name}")


bf16_only = needs(CpuKind.AVX512_BF16)  # packed kernels of bf16
