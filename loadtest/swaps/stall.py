"""Gaps that a client of 16 streams sees: with no weight swap, with hotswap's, and with vLLM's own pause and reload.

All in one run on one machine: windows without and with swaps alternate on one server, so that its drift touches both
alike; then the same streams run against a server that stages in the other way, fast or smooth, and against stock vLLM.
A swap window lasts from the start of publishing (the weights are copied into shared memory by another process) to a
second after the commit, and the quiet window after it as long: a longer one has a longer longest gap. Each swap window
is compared with the quiet ones before and after it: steps grow with the answers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.measure.gaps import Gaps, Window, summary
from loadtest.measure.machine import memcpy_gbps
from loadtest.measure.processes import private_mb, tree
from loadtest.measure.run import up, with_machine
from loadtest.models.kinds import bench_checkpoints
from loadtest.workload.children import last_line, publishing, streaming
from loadtest.workload.stock_vllm import StockVllm
from server.cli.admin import AdminClient
from server.up.server import Server
from weightsync.vllm_engine.device.pacing import Staging

MODEL = "bench"
STAGINGS: tuple[Staging, ...] = ("smooth", "fast")  # the default first
SETTLE_S = 1.0
WARM_UP = 4
QUIET_S, EACH_S = 3.0, 9.0
SMOOTH_EACH_S = 60.0
VLLM_ARGS = ("--max-model-len", "2048", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(3 << 30))


@dataclass
class Windows:
    """Measurements of one server's swaps: windows on the monotonic clock, and times in ms unless their names say
    otherwise."""

    quiet: list[Window] = field(default_factory=list)
    swapping: list[Window] = field(default_factory=list)
    commit_ms: list[float] = field(default_factory=list)
    staging_gbps: list[float] = field(default_factory=list)
    publishing: list[Window] = field(default_factory=list)
    staging: list[Window] = field(default_factory=list)  # and the commit
    stage_ms: list[float] = field(default_factory=list)
    step_loss: list[float | None] = field(default_factory=list)
    publish_ms: list[float] = field(default_factory=list)
    private_mb: list[float] = field(default_factory=list)
    engine_cpu_s: list[float] = field(default_factory=list)  # of quiet windows: the processes that run the model alone
    kernels: str = ""


Measured = tuple[Gaps, Windows, dict[str, int]]


def run(
    json: Path | None,
    *,
    streams: int = 16,
    swaps: int = 6,
    small: bool = False,
    kind: str = "dense",
) -> dict[str, Any]:
    """Measure a model of `kind` (`model_kinds.BENCHED`), print the tables, and write the figures to `json`.

    They are those of the first of STAGINGS, and under "staging" those of each.
    """
    work = Path("runs") / ("bench-small" if small else "bench")
    models = bench_checkpoints(work, kind, small=small)
    memcpy = memcpy_gbps()
    ours = {}
    for way in STAGINGS:
        with up(models[0], MODEL, work / "state", (*VLLM_ARGS, "--staging", way)) as server:
            each_s = SMOOTH_EACH_S if way == "smooth" else EACH_S
            ours[way] = on_hotswap(server, models, streams, swaps, each_s=each_s)
    stock = on_stock(models, work, streams, swaps)  # as many: attention costs more as the answers grow
    found = {way: figures_of(measured, stock) for way, measured in ours.items()}
    figures = found[STAGINGS[0]] | {"staging": found, "memcpy_gbps": memcpy, "streams": streams, "swaps": swaps}
    figures["model"] = {"kind": kind, "parameters": _parameters(models[0]), "bytes": _nbytes(models[0])}
    for way in STAGINGS:
        _print(way, found[way])
    return with_machine(figures, json)


def on_hotswap(
    server: Server, models: list[Path], streams: int, swaps: int, *, warm_up: int = WARM_UP, each_s: float = EACH_S
) -> Measured:
    """Of a server of MODEL that is ready. `each_s`: what one swap and the quiet time before it take at most."""
    windows = Windows()
    admin = AdminClient(server.state_dir)
    with publishing(server.store, MODEL, models) as publish:
        for number in range(warm_up):  # every slot is faulted in once; a trainer's first versions do that
            swap_once(admin, publish, number % len(models), Windows())
        instance = server.children["instance-0"].process.pid
        windows.private_mb.append(private_mb(instance))

        def swap(number: int) -> None:
            swap_once(admin, publish, number % len(models), windows)

        gaps, lost = drive(server.url, instance, streams, swaps, swap, windows, each_s)
        windows.private_mb.append(private_mb(instance))
    return gaps, windows, lost


def swap_once(admin: AdminClient, publish: Callable[[int], dict[str, Any]], number: int, windows: Windows) -> None:
    """Publishes checkpoint `number`, swaps it in, and notes what both took."""
    begun = time.monotonic()
    published = publish(number)
    windows.publishing.append((begun, time.monotonic()))
    admin.call("POST", "/admin/weights/activate", {"version": published["version"]})
    windows.staging.append((windows.publishing[-1][1], time.monotonic()))
    (record,) = admin.call("GET", "/admin/instances")["instances"]
    windows.publish_ms.append(published["publish_ms"])
    windows.commit_ms.append(record["commit_ms"])
    windows.staging_gbps.append(record["staging_gbps"])
    windows.stage_ms.append(record["stage_ms"])
    windows.step_loss.append(record.get("step_loss"))  # a checkout that is compared may not say it
    windows.kernels = record["path"]


def engine_cpu_s(pid: int) -> float:
    """The CPU time so far of the processes that vLLM started from `pid` to run the model, in seconds."""
    found = [p.cpu_times() for p in tree(pid)[1:] if p.name().startswith("VLLM::")]
    return sum(times.user + times.system for times in found)


def on_stock(
    models: list[Path],
    work: Path,
    streams: int,
    swaps: int,
    *,
    arguments: tuple[str, ...] = (*VLLM_ARGS, "--enforce-eager"),
    each_s: float = EACH_S,
) -> Measured:
    """Of vLLM's own server, which is started here."""
    server = StockVllm(models[0], MODEL, work / "stock.log", arguments)
    with server.running():
        return of_stock(server, models, streams, swaps, each_s=each_s)


def of_stock(server: StockVllm, models: list[Path], streams: int, swaps: int, *, each_s: float = EACH_S) -> Measured:
    """Of vLLM's own server, which is ready."""
    windows = Windows()
    server.swap(models[1].resolve())
    windows.private_mb.append(private_mb(server.pid))

    def swap(number: int) -> None:
        server.swap(models[number % 2].resolve())

    gaps, lost = drive(server.url, server.pid, streams, swaps, swap, windows, each_s)
    windows.private_mb.append(private_mb(server.pid))
    return gaps, windows, lost


def drive(
    url: str, pid: int, streams: int, swaps: int, swap: Callable[[int], None], windows: Windows, each_s: float
) -> tuple[Gaps, dict[str, int]]:
    """Run the streams; alternate quiet and swap windows, as long as each other where `each_s` has room for that. `pid`
    started the engine."""
    seconds, quiet = QUIET_S + swaps * each_s, QUIET_S
    with streaming(url, MODEL, streams, 2 * seconds + 60.0) as client:  # they are ended before
        ends = time.monotonic() + seconds
        for number in range(swaps + 1):
            start, used = time.monotonic(), engine_cpu_s(pid)
            time.sleep(quiet)
            windows.engine_cpu_s.append(engine_cpu_s(pid) - used)
            windows.quiet.append((start, time.monotonic()))
            if number == swaps or time.monotonic() > ends:
                break
            start = time.monotonic()
            swap(number)
            time.sleep(SETTLE_S)
            windows.swapping.append((start, time.monotonic()))
            took = time.monotonic() - start
            quiet = max(QUIET_S, min(took, each_s - took))
        client.terminate()
        result = last_line(client, 120.0)
    return Gaps.of(result["arrivals"]), {k: result[k] for k in ("failed", "truncated")}


def figures_of(ours: Measured, stock: Measured) -> dict[str, Any]:
    """Figures of both, as the streams saw them."""
    (gaps, windows, lost), (stock_gaps, stock_windows, stock_lost) = ours, stock
    stall = stall_ms(gaps, windows)
    stock_stall = stall_ms(stock_gaps, stock_windows)
    losses = [loss for loss in windows.step_loss if loss is not None]
    return {
        "gap_ms": {
            "none": summary(gaps.within(windows.quiet)),
            "hotswap": summary(gaps.within(windows.swapping)),
            "none_stock": summary(stock_gaps.within(stock_windows.quiet)),
            "vllm": summary(stock_gaps.within(stock_windows.swapping)),
        },
        "longest_per_swap_ms": {
            "none": _ms(gaps.longest(windows.quiet)),
            "hotswap": _ms(gaps.longest(windows.swapping)),
            "vllm": _ms(stock_gaps.longest(stock_windows.swapping)),
        },
        "stall_ms": {"hotswap": stall, "vllm": stock_stall},
        "stall_ratio": stock_stall / max(stall, 1.0),
        "commit_ms": statistics.median(windows.commit_ms),
        "commit_ms_max": max(windows.commit_ms),
        "staging_gbps": statistics.median(windows.staging_gbps),
        "stage_ms": statistics.median(windows.stage_ms),
        "step_loss": statistics.median(losses) if losses else None,
        "longest_by_phase_ms": {
            "publishing": _ms(gaps.longest(windows.publishing)),
            "staging": _ms(gaps.longest(windows.staging)),
        },
        "publish_ms": statistics.median(windows.publish_ms),
        "goodput_kept": gaps.tokens_per_s(windows.swapping) / gaps.tokens_per_s(windows.quiet),
        "goodput_kept_vllm": stock_gaps.tokens_per_s(stock_windows.swapping)
        / stock_gaps.tokens_per_s(stock_windows.quiet),
        "tokens_per_s": {
            "none": gaps.tokens_per_s(windows.quiet),
            "none_stock": stock_gaps.tokens_per_s(stock_windows.quiet),
        },
        "engine_cpu_ms_per_token": {
            "hotswap": cpu_ms_per_token(gaps, windows),
            "vllm": cpu_ms_per_token(stock_gaps, stock_windows),
        },
        "first_window": {  # of answers that are as long on both sides
            "tokens_per_s": gaps.tokens_per_s(windows.quiet[:1]),
            "tokens_per_s_vllm": stock_gaps.tokens_per_s(stock_windows.quiet[:1]),
            "engine_cpu_ms_per_token": cpu_ms_per_token(gaps, windows, 1),
            "engine_cpu_ms_per_token_vllm": cpu_ms_per_token(stock_gaps, stock_windows, 1),
        },
        "private_mb": {"hotswap": windows.private_mb, "vllm": stock_windows.private_mb},
        "kernels": windows.kernels,
        "lost": {"hotswap": lost, "vllm": stock_lost},
    }


def stall_ms(gaps: Gaps, windows: Windows) -> float:
    """The stall of a swap: its longest gap, less the mean of the longest before and after it; the median over swaps.

    A quiet window in which each stream waits for a first token has no gap; the window on the other side counts alone.
    """
    added = [
        during[0] - statistics.fmean(usual)
        for swap, beside in zip(windows.swapping, itertools.pairwise(windows.quiet), strict=True)
        if (during := gaps.longest([swap])) and (usual := gaps.longest(beside))
    ]
    return 1e3 * statistics.median(added)


def cpu_ms_per_token(gaps: Gaps, windows: Windows, first: int | None = None) -> float:
    """Without a swap, in all quiet windows or the `first` ones. Other work on the machine hardly changes it, while it
    changes the tokens per second."""
    quiet = windows.quiet[:first]
    seconds = sum(end - start for start, end in quiet)
    return sum(windows.engine_cpu_s[:first]) * 1e3 / (gaps.tokens_per_s(quiet) * seconds)


def _ms(values: list[float]) -> list[float]:
    return [round(v * 1e3, 1) for v in values]


def _parameters(path: Path) -> int:
    from weightsync.publish.checkpoint import Checkpoint

    return sum(int(np.prod(s.shape)) for s in Checkpoint(path).schema.tensors.values())


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _print(staging: str, figures: dict[str, Any]) -> None:
    columns = ("p50", "p99", "max", "longest per swap")
    table = Table("inter-token gap, ms", *columns, title=f"what streams see of a swap, staging {staging}")
    names = {"none": "no swap", "hotswap": "hotswap", "none_stock": "no swap (stock vLLM)", "vllm": "vLLM pause/reload"}
    for key, name in names.items():
        gap = figures["gap_ms"][key]
        longest = figures["longest_per_swap_ms"].get(key, [])
        table.add_row(name, *(f"{gap[p]:.1f}" for p in ("p50", "p99", "max")), " ".join(f"{v:.0f}" for v in longest))
    console = Console()
    console.print(table)
    for key in ("stall_ms", "stall_ratio", "commit_ms", "commit_ms_max", "stage_ms", "staging_gbps", "step_loss",
                "longest_by_phase_ms", "publish_ms", "goodput_kept", "goodput_kept_vllm", "tokens_per_s",
                "engine_cpu_ms_per_token", "first_window", "private_mb", "kernels",
                "lost"):  # fmt: skip
        console.print(f"{key}: {figures[key]}")
