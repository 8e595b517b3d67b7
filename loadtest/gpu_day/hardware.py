"""`env`, `remap`: what the machine has, and what its mappings cost."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtest.gpu_day import engine
from loadtest.gpu_day.device import Device
from loadtest.gpu_day.report import Report, Skipped
from loadtest.measure.machine import machine, memcpy_gbps
from weightsync.errors import EngineError
from weightsync.format.manifest import digest_of
from weightsync.vllm_engine.device.mapping import CudaDriver, Memory, Range

NEEDED = ("numpy", "torch", "xxhash", "orjson")  # by the phases without vLLM
WANTED = (
    "numba",
    "msgspec",
    "psutil",
    "cuda.bindings",
    "safetensors",
    "transformers",
    "tokenizers",
    "httpx",
    "openai",
    "vllm",
)
OURS = (
    "weightsync",
    "weightsync.vllm_engine.staging.stager",
    "weightsync.vllm_engine.staging.bundle",
    "loadtest.gpu_day.engine",
)
ASKED = "driver_version,name,memory.total,pcie.link.gen.current,pcie.link.width.current,compute_cap"
DIGESTING = (1, 8)  # threads
GIB, HANDLES, REMAPS = 1 << 30, 16, 10


def env(report: Report, device: Device, small: bool) -> None:
    """Report the things that the other phases need, and the hardware and versions that their figures belong to."""
    about: dict[str, Any] = {"device": "cpu"}
    if device.cuda:
        found = torch.cuda.get_device_properties(device.torch)
        about = {
            "device": found.name,
            "memory_gb": found.total_memory / 1e9,
            "free_gb": device.free_nbytes() / 1e9,
            "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
        }
    report.say("device", **about, nvidia_smi=nvidia_smi())
    report.say("versions", **machine(), cuda=torch.version.cuda, platform=sys.platform)
    free, rate = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE / 1e9, memcpy_gbps((4 if small else 256) << 20)
    digests: dict[str, Any] = {f"digest_{n}_gbps": _digest_gbps((4 if small else 256) << 20, n) for n in DIGESTING}
    report.say("host", cores=len(os.sched_getaffinity(0)), memory_free_gb=free, memcpy_gbps=rate, **digests)
    for name, path in (("shm", engine.SHM), ("temporary", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(path)
        report.say(f"{name}_directory", path=str(path), total_gb=usage.total / 1e9, free_gb=usage.free / 1e9)
    for name in (*NEEDED, *OURS):
        problem = _import(name)
        report.say(f"import_{name}", not problem, version=_version(name), **({"error": problem} if problem else {}))
    for name in WANTED:
        found = there(name)
        report.say(f"found_{name}", found=found, version=_version(name))


def _digest_gbps(nbytes: int, threads: int) -> float:
    """As that many threads digest what is published, each something else; the best of three."""
    pieces, times = [np.ones(nbytes // threads, np.uint8) for _ in range(threads)], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            begun = time.perf_counter()
            list(pool.map(digest_of, pieces))
            times.append(time.perf_counter() - begun)
    return sum(piece.nbytes for piece in pieces) / 1e9 / min(times)


def _import(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # of whatever kind: it is told
        return f"{type(error).__name__}: {error}"
    return ""


def there(name: str) -> bool:
    """Without importing more than its parents."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str | None:
    for package in (name, name.replace(".", "-"), f"{name}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def nvidia_smi() -> dict[str, str]:
    """The first card as nvidia-smi tells it; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = answer.stdout.splitlines()
    if answer.returncode != 0 or not lines:
        return {}
    return dict(zip(ASKED.split(","), (value.strip() for value in lines[0].split(",")), strict=False))


# mappings ------------------------------------------------------------------------------------------------------------


def remap(report: Report, device: Device, small: bool) -> None:
    """Map other memory at addresses that a graph reads, as a flip does, in handles of 1 GiB and in a single one.

    Reports the driver's time for that, and whether the graph sees the new memory.
    """
    if not device.cuda:
        raise Skipped("addresses are remapped on CUDA alone")
    try:
        driver = CudaDriver(device.torch)
    except EngineError as error:
        raise Skipped(str(error)) from None
    gib = min(HANDLES, int(device.free_nbytes() * 0.4) // GIB)
    for handles in (gib, 1):
        _remap(report, device, driver, gib, handles)


def _remap(report: Report, device: Device, driver: CudaDriver, gib: int, handles: int) -> None:
    ours, theirs = (Memory(driver, [gib // handles * GIB] * handles) for _ in range(2))
    place = Range(driver, ours)
    words = place.data.view(torch.int64)
    total = torch.empty((), dtype=torch.int64, device=device.torch)
    graph = torch.cuda.CUDAGraph()
    first = words[:: GIB // words.element_size()]  # one of each GiB
    torch.sum(first, dim=0, out=total)
    device.wait()
    with torch.cuda.graph(graph):
        torch.sum(first, dim=0, out=total)
    for value, memory, other in ((1, ours, theirs), (2, theirs, ours)):
        place.show(memory, other)
        words.fill_(value)
        device.wait()
    seen, milliseconds = [], []
    for turn in range(REMAPS):
        memory, other, expected = ((ours, theirs, 1), (theirs, ours, 2))[turn % 2]
        device.wait()  # nothing may run on addresses that are taken away
        begun = time.perf_counter()
        place.show(memory, other)
        milliseconds.append((time.perf_counter() - begun) * 1e3)
        graph.replay()
        device.wait()
        seen.append(int(total) == expected * gib)
    report.say("graph_sees_remapped_memory", all(seen), turns=len(seen), gib=gib, handles=handles)
    aliases = [
        bool((memory.data.view(torch.int64)[:: GIB // 8] == value).all()) for memory, value in ((ours, 1), (theirs, 2))
    ]
    report.say("its_own_addresses_show_the_same", all(aliases))
    median, longest = statistics.median(milliseconds), max(milliseconds)
    report.say("remap", gib=gib, handles=handles, median_ms=median, max_ms=longest)
