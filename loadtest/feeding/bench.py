"""Both parts on one site, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table

from loadtest.checkpoints import BENCH_SHAPE, TINY_SHAPE, make_checkpoint
from loadtest.feeding.joiner import late_joiner
from loadtest.feeding.loss import loss
from loadtest.feeding.site import Site, serving
from weightsync.vllm_engine.layout import onednn_takes

PARTS = ("joiner", "feeding")
ROUNDS, PAIRS, WINDOW_S = 3, 8, 5.0


def with_instances(parts: Sequence[str], *, small: bool) -> dict[str, Any]:
    """Those of PARTS that are asked for; nothing is started for none."""
    wanted = [part for part in PARTS if part in parts]
    if not wanted:
        return {}
    report: dict[str, Any] = {}
    with Site(_checkpoint(small)).open() as site, serving(site) as source:
        if "joiner" in wanted:
            report["late_joiner"] = late_joiner(site, 1 if small else ROUNDS)
        if "feeding" in wanted:
            report["feeding"] = loss(site, source, 2 if small else PAIRS, 1.0 if small else WINDOW_S)
        report["dtype"] = orjson.loads((site.model / "config.json").read_bytes())["dtype"]
        copy = site.copy(source.host.name)
        report["version_nbytes"] = copy.nbytes if copy is not None else 0
    return report


def _checkpoint(small: bool) -> Path:
    """In bf16 where oneDNN multiplies that here, else in float32: other kernels take seconds for a token."""
    dtype = "bfloat16" if onednn_takes(torch.bfloat16) else "float32"
    path = Path("runs") / ("feeding-small" if small else f"feeding-{dtype}") / "model"
    shape: dict[str, Any] = TINY_SHAPE if small else BENCH_SHAPE
    return path if (path / "config.json").exists() else make_checkpoint(path, dtype=dtype, **shape)


def show(report: dict[str, Any]) -> None:
    if "late_joiner" in report:
        table = Table("seconds, median", "engine up", "fetch", "load", "wait", "stage", "first token", "total")
        for name in ("peer", "disk", "disk, not cached"):
            found = report["late_joiner"][name]
            parts = ("engine_up", "fetch", "load", "waited", "staged", "first_token", "total")
            table.add_row(name, *(f"{found[part]:.2f}" if part in found else "" for part in parts))
        Console().print(table)
    if "feeding" in report:
        table = Table("while it feeds", "tokens/s without", "with", "lost", "pair by pair", "read, GB/s")
        for name, found in report["feeding"].items():
            rates = (f"{found['tokens_per_s']:.0f}", f"{found['tokens_per_s_fed']:.0f}", f"{found['lost']:.1%}")
            pairs = " ".join(f"{part:.0%}" for part in found["lost_by_pair"])
            table.add_row(name, *rates, pairs, f"{found['read_gbps']:.2f}")
        Console().print(table)
