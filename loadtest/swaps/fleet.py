"""Swaps of a fleet: 1, 2 and 4 instances and two tensor-parallel ranks, together and rolling, on one machine.

For each case one server and one set of streams: quiet windows and windows with one swap alternate, then blocks of time
with a swap every second alternate with blocks without. All ratios are within a case; the memcpy that staging is
compared with copies as many bytes as the model has, while the streams run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from loadtest.measure import run as shared
from loadtest.measure.gaps import Gaps, Window, summary
from loadtest.measure.machine import memcpy_gbps
from loadtest.models.checkpoints import TINY_SHAPE, make_checkpoint
from loadtest.workload.children import last_line, publishing, streaming
from server.cli.admin import AdminClient
from server.errors import RequestFailed
from server.up.processes import BIND_ENV
from server.up.server import Server

FLEET_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 16000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""About 42 M parameters, 84 MB in bf16: four instances of it fit two cores."""

WARM_UP = 4
QUIET_S, SETTLE_S = 1.5, 0.7
BLOCK_S, BLOCKS = 5.0, 2


@dataclass(frozen=True)
class Case:
    """One server to measure, in each of `modes`."""

    instances: int
    tensor_parallel: int
    modes: tuple[str, ...] = ("together", "rolling")

    def name(self, mode: str) -> str:
        return f"{self.instances} x TP {self.tensor_parallel}, {mode}"


CASES = (Case(1, 1, ("together",)), Case(2, 1), Case(4, 1), Case(1, 2, ("together",)))


@dataclass
class Seen:
    """Measurements of one case; windows on the monotonic clock, `asked_at` by version, times in ms, rates in GB/s."""

    quiet: list[Window] = field(default_factory=list)
    swapping: list[Window] = field(default_factory=list)
    commit_ms: list[float] = field(default_factory=list)
    staging_gbps: list[float] = field(default_factory=list)
    blocks_without: list[Window] = field(default_factory=list)
    blocks_with: list[Window] = field(default_factory=list)
    asked_at: dict[int, float] = field(default_factory=dict)
    rollback_commit_ms: list[float] = field(default_factory=list)
    rollback_ms: list[float] = field(default_factory=list)
    swap_ms: list[float] = field(default_factory=list)
    memcpy_gbps: float = 0.0
    arena: dict[str, int] = field(default_factory=dict)
    aborted: int = 0  # swaps that left the old version serving: an instance was too slow, or out of its lease


def run(json: Path | None, *, streams: int = 8, swaps: int = 6, small: bool = False) -> dict[str, Any]:
    """Measure every case, print the table, write the figures to `json`; returns them."""
    work = Path("runs") / ("fleet-small" if small else "fleet")
    models = _checkpoints(work, TINY_SHAPE if small else FLEET_SHAPE)
    figures: dict[str, Any] = {"streams": streams, "swaps": swaps, "cases": {}}
    for case in CASES:
        with _server(case, models[0], work) as server, publishing(server.store, "fleet", models) as publish:
            for mode in case.modes:
                figures["cases"][case.name(mode)] = _measure(server, publish, mode, models, streams, swaps)
                _print(figures["cases"])
                found = shared.with_machine(figures, json)  # a later case may fail
    return found


def _checkpoints(work: Path, shape: dict[str, Any]) -> list[Path]:
    paths = [work / f"model-{i}" for i in range(2)]
    for seed, path in enumerate(paths):
        if not (path / "config.json").exists():
            make_checkpoint(path, seed=seed, **shape)
    return paths


def _measure(
    server: Server, publish: Callable[[int], dict[str, Any]], mode: str, models: list[Path], streams: int, swaps: int
) -> dict[str, Any]:
    seen = Seen()
    admin = AdminClient(server.state_dir)

    def swap(number: int) -> bool:
        asked = time.monotonic()
        version = int(publish(number % 2)["version"])
        seen.asked_at[version] = asked
        wish = {"version": version, "mode": mode, "drain_s": 0.0}  # the streams never end
        try:
            admin.call("POST", "/admin/weights/activate", wish)
        except RequestFailed as error:
            Console(stderr=True).print(f"swap to version {version} aborted: {error}")
            del seen.asked_at[version]
            seen.aborted += 1
            return False
        seen.swap_ms.append((time.monotonic() - asked) * 1e3)
        return True

    for number in range(WARM_UP):
        swap(number)
    seen.swap_ms.clear()
    slow = 2.0 if len(server.children) > 4 or "--tensor-parallel-size" in server.config.vllm_args else 1.0
    seconds = slow * (swaps * (QUIET_S + SETTLE_S + 1.5) + 2 * BLOCKS * (BLOCK_S + 0.5) + 6.0)
    with streaming(server.url, "fleet", streams, seconds) as client:
        _single_swaps(swaps, swap, admin, seen)
        _swap_every_second(swap, seen)
        seen.memcpy_gbps = memcpy_gbps(_nbytes(models[0]))
        seen.arena = _arena_memory(server)
        report = last_line(client, seconds + 120)
    return _figures(report, seen)


@contextmanager
def _server(case: Case, model: Path, work: Path) -> Iterator[Server]:
    args = ["--max-model-len", "2048", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20)]
    if case.tensor_parallel > 1:
        args += ["--tensor-parallel-size", str(case.tensor_parallel)]
    state = work / f"state-{case.instances}-{case.tensor_parallel}"
    if case.tensor_parallel > 1:  # a core for each rank
        os.environ[BIND_ENV] = "|".join(str(rank) for rank in range(case.tensor_parallel))
    try:
        with shared.up(model, "fleet", state, tuple(args), instances=case.instances) as server:
            yield server
    finally:
        if case.tensor_parallel > 1:
            del os.environ[BIND_ENV]


def _single_swaps(swaps: int, swap: Callable[[int], bool], admin: AdminClient, seen: Seen) -> None:
    for number in range(swaps):
        start = time.monotonic()
        time.sleep(QUIET_S)
        seen.quiet.append((start, time.monotonic()))
        start = time.monotonic()
        done = swap(number)
        time.sleep(SETTLE_S)
        seen.swapping.append((start, time.monotonic()))
        if not done:
            continue
        records = admin.call("GET", "/admin/instances")["instances"]
        seen.commit_ms += [record["commit_ms"] for record in records]
        seen.staging_gbps += [record["staging_gbps"] for record in records]
        started = time.monotonic()
        admin.call("POST", "/admin/weights/rollback", {})
        seen.rollback_ms.append((time.monotonic() - started) * 1e3)
        records = admin.call("GET", "/admin/instances")["instances"]
        seen.rollback_commit_ms += [record["commit_ms"] for record in records]


def _swap_every_second(swap: Callable[[int], bool], seen: Seen) -> None:
    for _ in range(BLOCKS):
        start = time.monotonic()
        time.sleep(BLOCK_S)
        seen.blocks_without.append((start, time.monotonic()))
        start = time.monotonic()
        for number in range(int(BLOCK_S)):
            swap(number)
            time.sleep(max(0.0, start + number + 1 - time.monotonic()))
        seen.blocks_with.append((start, time.monotonic()))


def _nbytes(model: Path) -> int:
    from weightsync.publish.checkpoint import Checkpoint

    return sum(spec.nbytes for spec in Checkpoint(model).schema.tensors.values())


def _arena_memory(server: Server) -> dict[str, int]:
    """Bytes of layout slots that exist, and what the instances' processes are charged for them (PSS) and map (RSS)."""
    files = [f for f in server.arena.iterdir() if f.name.startswith("layout-")]
    total = {"files": sum(f.stat().st_blocks * 512 for f in files), "pss": 0, "rss": 0}
    for child in server.children.values():
        if not child.name.startswith("instance"):
            continue
        parent = psutil.Process(child.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            for mapping in process.memory_maps():
                if mapping.path.startswith(str(server.arena)) and "/layout-" in mapping.path:
                    total["pss"] += mapping.pss
                    total["rss"] += mapping.rss
    return total


def _figures(result: dict[str, Any], seen: Seen) -> dict[str, Any]:
    gaps = Gaps.of(result["arrivals"])
    first = {int(version): at for version, at in result["first_seen"].items()}
    to_token = [(first[v] - at) * 1e3 for v, at in seen.asked_at.items() if v in first]
    staging = statistics.median(seen.staging_gbps)
    return {
        "gap_ms": {"none": summary(gaps.within(seen.quiet)), "swap": summary(gaps.within(seen.swapping))},
        "commit_ms": {"median": statistics.median(seen.commit_ms), "max": max(seen.commit_ms)},
        "rollback_commit_ms": {
            "median": statistics.median(seen.rollback_commit_ms),
            "max": max(seen.rollback_commit_ms),
        },
        "rollback_ms": {"median": statistics.median(seen.rollback_ms), "max": max(seen.rollback_ms)},
        "publish_to_token_ms": {"median": statistics.median(to_token), "max": max(to_token)},
        "swap_ms": {"median": statistics.median(seen.swap_ms), "max": max(seen.swap_ms)},
        "staging_gbps": staging,
        "memcpy_gbps": seen.memcpy_gbps,
        "staging_share_of_memcpy": staging / seen.memcpy_gbps,
        "goodput_kept": gaps.tokens_per_s(seen.blocks_with) / gaps.tokens_per_s(seen.blocks_without),
        "tokens_per_s": gaps.tokens_per_s(seen.blocks_without),
        "arena": seen.arena,
        "lost": {key: result[key] for key in ("failed", "truncated")},
        "aborted": seen.aborted,
    }


def _print(cases: dict[str, Any]) -> None:
    table = Table(
        "fleet", "gap p50 / p99 / max, ms", "the same, no swap", "commit ms, median / max", "of a rollback",
        "publish to token, ms", "staging GB/s (of memcpy)", "goodput kept", "PSS / one copy", "lost", "aborted",
        title="swaps of a fleet",
    )  # fmt: skip
    for name, case in cases.items():
        swap, none = ([f"{case['gap_ms'][k][p]:.1f}" for p in ("p50", "p99", "max")] for k in ("swap", "none"))
        table.add_row(
            name,
            " / ".join(swap),
            " / ".join(none),
            f"{case['commit_ms']['median']:.2f} / {case['commit_ms']['max']:.2f}",
            f"{case['rollback_commit_ms']['median']:.2f} / {case['rollback_commit_ms']['max']:.2f}",
            f"{case['publish_to_token_ms']['median']:.0f}",
            f"{case['staging_gbps']:.2f} ({case['staging_share_of_memcpy']:.0%})",
            f"{case['goodput_kept']:.1%}",
            f"{case['arena']['pss'] / 1e6:.0f} / {case['arena']['files'] / 1e6:.0f} MB",
            str(sum(case["lost"].values())),
            str(case["aborted"]),
        )
    Console(width=180).print(table)
