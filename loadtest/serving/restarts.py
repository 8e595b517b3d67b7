"""From the death of an instance to the first token of the next: `hotswap bench restart [--json FILE]`.

By turns, in one run: an instance of `hotswap up` is killed, and up starts it again; stock `vllm serve` is started on
the same checkpoint; a Python imports what that imports, and ends. The target is stock's time less its
imports, plus TARGET_S.

Phases of an instance: `process` until up has ordered it again; `engine` until it is in the store, with imports, vLLM's
engine and its dummy weights; `weights` until it runs the active version; `warm-up` until the gateway sends requests;
`first token` until one has come through the gateway.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.measure.run import up, with_machine
from loadtest.models.kinds import bench_checkpoints
from loadtest.swaps.stall import VLLM_ARGS
from loadtest.workload.stock_vllm import StockVllm
from server.cli.admin import AdminClient
from server.errors import CliError
from server.up.server import Server

MODEL = "restart"
TARGET_S = 2.0
POLL_S = 0.02
PATIENCE_S = 300.0
IMPORTED = "vllm.entrypoints.openai.api_server"
PHASES = ("process", "engine", "weights", "warm-up", "first token")


@dataclass
class Found:
    """Seconds of each turn."""

    restarts: list[dict[str, float]] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)


def run(json: Path | None, *, kills: int = 5, small: bool = False, runs: Path = Path("runs")) -> dict[str, Any]:
    """Measure, print the table, and write the figures to `json`. Checkpoints and logs go to `runs`."""
    work = runs / ("restart-small" if small else "restart")
    (checkpoint,) = bench_checkpoints(runs / "bench", "dense", small=small, count=1)
    found = Found()
    with up(checkpoint, MODEL, work / "state", VLLM_ARGS) as server:
        for _ in range(kills):
            found.restarts.append(restarted(server))
            found.stock.append(started(checkpoint, work / "stock.log"))
            found.imports.append(imported())
    figures = figures_of(found) | {"kills": kills, "small": small}
    _print(figures)
    return with_machine(figures, json)


def restarted(server: Server) -> dict[str, float]:
    """Kill the instance; the seconds at which it had come to the end of each phase."""
    child, admin = server.children["instance-0"], AdminClient(server.state_dir)
    before, ends = child.process.pid, dict[str, float]()
    active = int(admin.call("GET", "/admin/weights/active")["version"])
    os.killpg(before, signal.SIGKILL)
    begun = time.monotonic()
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        while "first token" not in ends:
            if time.monotonic() - begun > PATIENCE_S:
                raise TimeoutError(f"no token {PATIENCE_S:g} s after the instance was killed; see {child.log}")
            server.restart_ended()
            row = _row(admin) if child.alive and child.process.pid != before else {}
            if child.alive and child.process.pid != before:
                ends.setdefault("process", time.monotonic() - begun)
            if row.get("pid") == child.process.pid:
                ends.setdefault("engine", time.monotonic() - begun)
                if row["active_version"] == active:
                    ends.setdefault("weights", time.monotonic() - begun)
                if row["eligible"]:
                    ends.setdefault("warm-up", time.monotonic() - begun)
            if "warm-up" in ends and _answers(client, "/generate", {"prompt": "a", "max_tokens": 1, "stream": False}):
                ends["first token"] = time.monotonic() - begun
            time.sleep(POLL_S)
    return ends


def _row(admin: AdminClient) -> dict[str, Any]:
    with contextlib.suppress(CliError):
        rows = admin.call("GET", "/admin/instances")["instances"]
        return dict(rows[0]) if rows else {}
    return {}


def _answers(client: httpx.Client, path: str, body: dict[str, Any]) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.post(path, json=body).status_code == 200
    return False


def started(checkpoint: Path, log: Path) -> float:
    """Seconds from the start of stock `vllm serve` to its first token."""
    arguments = (*VLLM_ARGS, "--enforce-eager")
    begun = time.monotonic()
    stock = StockVllm(checkpoint, MODEL, log, arguments, engine_apart=True)
    with stock.running(), httpx.Client(base_url=stock.url, timeout=PATIENCE_S) as client:
        while not _answers(client, "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1}):
            time.sleep(POLL_S)
        return time.monotonic() - begun


def imported() -> float:
    """Seconds of a Python that imports what stock's server does."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {IMPORTED}"], check=True, capture_output=True)
    return time.monotonic() - begun


def figures_of(found: Found) -> dict[str, Any]:
    """Medians, and the seconds of each turn."""
    totals = [ends["first token"] for ends in found.restarts]
    phases, before = {}, [0.0] * len(found.restarts)
    for phase in PHASES:
        ends = [turn[phase] for turn in found.restarts]
        phases[phase] = statistics.median(end - begin for begin, end in zip(before, ends, strict=True))
        before = ends
    stock, imports = statistics.median(found.stock), statistics.median(found.imports)
    target = stock - imports + TARGET_S
    return {
        "restart_s": statistics.median(totals), "phases_s": phases, "stock_s": stock, "imports_s": imports,
        "target_s": target, "within_target": statistics.median(totals) <= target,
        "turns": {"restarts": found.restarts, "stock": found.stock, "imports": found.imports},
    }  # fmt: skip


def _print(figures: dict[str, Any]) -> None:
    table = Table("", "seconds, median", title="from the death of an instance to the next one's first token")
    for phase, seconds in figures["phases_s"].items():
        table.add_row(f"  {phase}", f"{seconds:.2f}")
    for name, key in (("restart", "restart_s"), ("stock vllm serve", "stock_s"), ("its imports, once", "imports_s"),
                      (f"target: stock less imports, plus {TARGET_S:g} s", "target_s")):  # fmt: skip
        table.add_row(name, f"{figures[key]:.2f}")
    Console().print(table)
