"""Tests of what only some CPUs execute; a plug-in that counts them, and says what HOTSWAP_TEST_CPU does not reach."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.started.sitecustomize import KINDS, TOLD
from weightsync.vllm_engine.kernels import CpuKind, cpu_kind
from weightsync.vllm_engine.releases import for_cpus

LIBRARIES = {CpuKind.AVX2: "_C_AVX2", CpuKind.AVX512: "_C_AVX512", CpuKind.AVX512_BF16: "_C", CpuKind.AMX: "_C"}


def needs(kind: CpuKind) -> pytest.MarkDecorator:
    """Skips the test on a CPU of a lesser kind."""
    return pytest.mark.skipif(cpu_kind() < kind, reason=f"needs {kind.name}")


bf16_only = needs(CpuKind.AVX512_BF16)  # packed kernels of bf16
avx512_only = needs(CpuKind.AVX512)  # 4-bit weights (vLLM's library for AVX2 lacks `cpu_gemm_wna16`); fp8 KV caches


def of_kinds(names: Iterable[str]) -> list[Any]:
    """Cases of a test by kind of model (loadtest/models/kinds.py), without a KV cache."""
    return [pytest.param(name, marks=[avx512_only] * (name in ("awq", "gptq", "w4a16"))) for name in names]


def pytest_configure() -> None:
    if told := os.environ.get(TOLD):
        check_reached(told)


def check_reached(told: str) -> None:
    """Raises UsageError unless all that computes in this process takes the CPU for one of the kind `told`."""
    if told not in KINDS:
        raise pytest.UsageError(f"{TOLD}={told} is no kind of CPU: choose from {', '.join(KINDS)}")
    kind = CpuKind[told.upper()]
    if cpu_kind() < kind:
        raise pytest.UsageError(f"{TOLD}={told}, and this CPU is {cpu_kind().name}: name a lesser kind, or none")
    reached = {
        "torch": torch.backends.cpu.get_cpu_capability() == KINDS[told][0],
        "oneDNN": torch.ops.mkldnn._is_mkldnn_bf16_supported() is (kind >= CpuKind.AVX512),
        "vLLM": cpu_kind() is kind,
    }
    if missed := [name for name, found in reached.items() if not found]:
        raise pytest.UsageError(f"{TOLD}={told} does not reach {', '.join(missed)}: import torch after tests.conftest")


def check_engine(log: Path) -> None:
    """An engine takes the CPU for one of the kind that this process does, as its log says."""
    line = f"CPU kind {cpu_kind().name}, kernels vllm.{LIBRARIES[cpu_kind()]}"
    assert not for_cpus() or line in log.read_text(), f"{log} does not say {line!r}: {TOLD} has not reached its engine"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [str(report.longrepr[2]).split() for report in terminalreporter.stats.get("skipped", [])]
    lacking = Counter(reason[-1] for reason in reasons if "needs" in reason and reason[-1] in CpuKind.__members__)
    if lacking:
        texts = (f"{count} {'test needs' if count == 1 else 'tests need'} {name}" for name, count in lacking.items())
        terminalreporter.write_line(f"{', '.join(texts)}: this CPU is {cpu_kind().name}")
