"""`env`, `copy`, `remap`: what the machine has, and what its copies and mappings cost."""

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
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtest.gpu_day import engine
from loadtest.gpu_day.device import Device
from loadtest.gpu_day.report import Report, Skipped
from loadtest.gpu_day.stack import LLAMA_8B, SMALL, Stack
from loadtest.measure.machine import machine, memcpy_gbps
from weightsync.errors import EngineError
from weightsync.format.manifest import digest_of
from weightsync.memory.pinned import forget_error
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
READ_ONLY, HOST_TO_DEVICE = 0x08, 1  # cudaHostRegisterReadOnly, cudaMemcpyHostToDevice
PIECES_MIB = (16, 32, 64)
COPIED = 4 << 30
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


# copies --------------------------------------------------------------------------------------------------------------


def copy(report: Report, device: Device, small: bool) -> None:
    """From the host by each kind of memory, in pieces, by rows; and on the device, as a flip does it."""
    nbytes = 1 << 20 if small else COPIED
    target = torch.empty(nbytes, dtype=torch.uint8, device=device.torch)
    pageable = _filled(torch.empty(nbytes, dtype=torch.uint8))
    _copied(report, device, "h2d_pageable", target, pageable)
    pinned = pageable.pin_memory() if device.cuda else pageable
    _copied(report, device, "h2d_pinned", target, pinned)
    for mib in PIECES_MIB:
        _pieces(report, device, target, pinned, mib << (10 if small else 20))
    for mib in PIECES_MIB:
        _two_dimensional(report, device, target, pinned, mib << (10 if small else 20))
    del pageable, pinned
    with _slot(nbytes) as (path, written):
        _registered(report, device, "h2d_mapped_slot", target, path, written, flags=None)
        _registered(report, device, "h2d_registered_slot", target, path, written, flags=0)
        _registered(report, device, "h2d_registered_slot_read_only", target, path, written, flags=READ_ONLY)
    del target
    _on_device(report, device, small)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.view(torch.int64)
    torch.arange(len(words), out=words)
    return tensor


def _copied(report: Report, device: Device, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    target.zero_()
    times = device.timed(lambda: target.copy_(source, non_blocking=True))
    device.wait()
    right = torch.equal(target.cpu(), source)
    report.say(name, right, gb=source.nbytes / 1e9, gbps=times.gbps(source.nbytes), host_ms=times.host_ms)


def _pieces(report: Report, device: Device, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
    pairs = list(zip(target.split(nbytes), source.split(nbytes), strict=True))
    target.zero_()

    def work() -> None:
        for to, of in pairs:
            to.copy_(of, non_blocking=True)

    times = device.timed(work)
    right = torch.equal(target.cpu(), source)
    report.say(f"h2d_pinned_in_pieces_of_{_size(nbytes)}", right, pieces=len(pairs), gbps=times.gbps(source.nbytes),
               host_ms=times.host_ms)  # fmt: skip


def _two_dimensional(report: Report, device: Device, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
    """The left half of the rows of a matrix of twice the size: what a rank takes of a matrix cut by columns."""
    rows = 1 << 10
    width = nbytes // rows
    matrix = source[: 2 * nbytes].view(rows, 2 * width)
    half, to = matrix[:, :width], target[:nbytes].view(rows, width)
    name = f"h2d_2d_of_{_size(nbytes)}"
    to.zero_()
    times = device.timed(lambda: to.copy_(half, non_blocking=True))
    device.wait()
    report.say(f"{name}_by_torch", torch.equal(to.cpu(), half), gbps=times.gbps(nbytes), host_ms=times.host_ms)
    runtime = _bindings("runtime") if device.cuda else None
    if runtime is None:
        report.say(f"{name}_by_cudaMemcpy2DAsync", reason="no CUDA, or cuda.bindings is missing")
        return
    kind, problems = runtime.cudaMemcpyKind(HOST_TO_DEVICE), set[str]()
    stream = torch.cuda.current_stream(device.torch).cuda_stream
    to.zero_()

    def work() -> None:
        answer = runtime.cudaMemcpy2DAsync(to.data_ptr(), width, half.data_ptr(), 2 * width, width, rows, kind, stream)
        if int(answer[0]):
            problems.add(str(answer[0]))

    times = device.timed(work)
    device.wait()
    right = not problems and torch.equal(to.cpu(), half)
    report.say(f"{name}_by_cudaMemcpy2DAsync", right, gbps=times.gbps(nbytes), host_ms=times.host_ms,
               problems=sorted(problems))  # fmt: skip


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20}_mib" if nbytes >> 20 else f"{nbytes >> 10}_kib"


@contextlib.contextmanager
def _slot(nbytes: int) -> Iterator[tuple[Path, torch.Tensor]]:
    """A file as slots are, in the arena, and its contents."""
    with engine.arena(nbytes) as directory:
        path, written = directory / "slot", _filled(torch.empty(nbytes, dtype=torch.uint8))
        with path.open("wb") as file:
            file.write(memoryview(written.numpy()))
        yield path, written


def _registered(
    report: Report,
    device: Device,
    name: str,
    target: torch.Tensor,
    path: Path,
    written: torch.Tensor,
    *,
    flags: int | None,
) -> None:
    """A copy out of a mapping of the slot, which is registered with `flags` before, or not at all.

    An instance maps slots for reading; whether the driver takes such a mapping is what the last of them shows.
    """
    writable = flags != READ_ONLY
    with path.open("r+b" if writable else "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one of them is read-only
        source = torch.frombuffer(mapping, dtype=torch.uint8)
    figures: dict[str, Any] = {}
    if flags is not None and device.cuda:
        runtime = torch.cuda.cudart()
        begun = time.perf_counter()
        status = int(runtime.cudaHostRegister(source.data_ptr(), source.nbytes, flags))
        seconds = time.perf_counter() - begun
        figures = {"register_status": status, "register_s": seconds, "register_gbps": source.nbytes / 1e9 / seconds}
        if status:
            forget_error()
            report.say(name, **figures, reason="the driver did not register this mapping")
            return
    target.zero_()
    times = device.timed(lambda: target.copy_(source, non_blocking=True))
    device.wait()
    right = torch.equal(target.cpu(), written)
    if figures:
        begun = time.perf_counter()
        figures["unregister_status"] = int(torch.cuda.cudart().cudaHostUnregister(source.data_ptr()))
        figures["unregister_s"] = time.perf_counter() - begun
    report.say(name, right, gbps=times.gbps(source.nbytes), host_ms=times.host_ms, **figures)


def _on_device(report: Report, device: Device, small: bool) -> None:
    """All tensors of a model from one buffer, at once: the copies of a flip without anything else of it."""
    shape = SMALL if small else LLAMA_8B.fitted(device.free_nbytes(), 2.5)
    live = list(Stack(shape, device.torch).tensors().values())
    nbytes = sum(tensor.nbytes for tensor in live)
    staged = [torch.full_like(tensor, 3) for tensor in live]
    times = device.timed(lambda: torch._foreach_copy_(live, staged))
    device.wait()
    right = all(bool((tensor == 3).all()) for tensor in live)
    report.say("d2d_foreach", right, tensors=len(live), gb=nbytes / 1e9, device_ms=times.device_ms,
               host_ms=times.host_ms, copied_gbps=times.gbps(nbytes), moved_gbps=times.gbps(2 * nbytes))  # fmt: skip

    def one_by_one() -> None:
        for to, of in zip(live, staged, strict=True):
            to.copy_(of, non_blocking=True)

    times = device.timed(one_by_one)
    report.say("d2d_one_by_one", device_ms=times.device_ms, host_ms=times.host_ms, copied_gbps=times.gbps(nbytes))


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


def _bindings(name: str) -> Any:
    """A module of cuda.bindings, or None."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError:
        return None
