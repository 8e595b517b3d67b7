"""What `hotswap weights verify` and `diff` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from weightsync.digests.diff import VersionDiff
    from weightsync.digests.verify import VerifyReport

VERDICTS = {"same": "runs these weights", "differs": "runs other weights", "not told": "does not say what it runs"}


def show_report(report: VerifyReport, *, as_json: bool) -> None:
    """One line when all is well; otherwise every problem, with the tensor or instance to blame."""
    if as_json:
        print(orjson.dumps({**asdict(report), "ok": report.ok}).decode())
        return
    out = Console(soft_wrap=True, highlight=False)
    for problem in report.problems:
        out.print(f"{problem.code}: {problem.message}", style="red")
    for name, verdict in report.instances.items():
        out.print(f"instance {name}: {VERDICTS[verdict]}")
    rate = report.nbytes / report.seconds / 1e9 if report.seconds else 0.0
    state = "is as published" if report.ok else f"has {len(report.problems)} problem(s)"
    out.print(
        f"version {report.version} {state}: {report.tensors} tensors, {report.nbytes:,} bytes read in "
        f"{report.seconds:.2f} s ({rate:.1f} GB/s)"
    )


def show_diff(found: VersionDiff, *, as_json: bool) -> None:
    """A row per tensor that differs, the largest change first."""
    if as_json:
        totals = {"elements": found.elements, "changed": found.changed}
        print(orjson.dumps({**asdict(found), **totals}).decode())
        return
    table = Table("tensor", "dtype", "elements", "changed", "share", "max abs", "max rel", "mean abs", "not finite")
    differing = [t for t in found.tensors if t.state != "same"]
    for t in differing:
        sizes = [f"{t.changed:,}", f"{t.changed / max(1, t.elements):.3%}"]
        sizes += [f"{value:.3g}" for value in (t.max_abs, t.max_rel, t.mean_abs)]
        cells = [*sizes, str(t.not_finite or "")] if t.state == "changed" else [t.state]
        table.add_row(t.name, t.dtype, f"{t.elements:,}", *cells)
    out = Console()
    if differing:
        out.print(table)
    share = found.changed / max(1, found.elements)
    out.print(
        f"versions {found.a} and {found.b}: {len(differing)} of {len(found.tensors)} tensors differ, "
        f"{found.changed:,} of {found.elements:,} elements ({share:.3%})"
    )
