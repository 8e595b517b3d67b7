"""From metrics files to a directory with `report.md` and its plots."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import DataError
from trainer.report.events import SHARES, Event, RunEvents, at_end, findings, read_events
from trainer.report.plots import draw

SHOWN_EVALS = 20  # rows of a table; more are thinned out
PARTS_OF_PUBLISH = ("write_ms", "swap_ms")


def write_report(metrics: Sequence[str | Path], directory: str | Path | None = None) -> Path:
    """Write the report of one run, or of several compared; returns the path of its Markdown. `directory` defaults to
    the first metrics file's name with `-report`. Without matplotlib there are no plots, and the page says so.

    Raises DataError for a file that cannot be reported on, or a directory that cannot be written.
    """
    runs = _named_apart([read_events(path) for path in metrics], metrics)
    target = Path(directory) if directory is not None else default_directory(metrics[0])
    try:
        target.mkdir(parents=True, exist_ok=True)
        plots = draw(runs, target) if importlib.util.find_spec("matplotlib") else []
        (target / "report.md").write_text(page(runs, plots))
    except OSError as error:
        raise DataError(f"cannot write the report into {target} ({error.strerror}). Choose another.") from None
    return target / "report.md"


def default_directory(metrics: str | Path) -> Path:
    path = Path(metrics)
    return path.with_name(f"{path.stem}-report")


def _named_apart(runs: list[RunEvents], paths: Sequence[str | Path]) -> list[RunEvents]:
    """Runs whose files have the same name are called by their directory too."""
    if len({run.name for run in runs}) < len(runs):
        for run, path in zip(runs, paths, strict=True):
            run.name = f"{Path(path).resolve().parent.name}/{run.name}"
    return runs


def page(runs: Sequence[RunEvents], plots: Sequence[str]) -> str:
    """The whole report. `plots` are file names beside it."""
    title = f"# Run {runs[0].name}" if len(runs) == 1 else "# Runs compared"
    parts = [title, *(_run(run, len(runs) > 1) for run in runs)]
    if plots:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{name.removesuffix('.svg')}]({name})" for name in plots))
    else:
        parts.append("No plots: they need matplotlib (`pip install matplotlib`).")
    return "\n\n".join(parts) + "\n"


def _run(run: RunEvents, several: bool) -> str:
    sections = [
        ("Summary", _summary(run)),
        ("Worth a look", "\n".join(f"- {text}" for text in findings(run))),
        ("Held-out records", _evals(run)),
        ("Time", _times(run)),
        ("At the end", _ending(run)),
    ]
    head = f"## {run.name}\n\n" if several else ""
    level = "###" if several else "##"
    return head + "\n\n".join(f"{level} {name}\n\n{text}" for name, text in sections if text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _summary(run: RunEvents) -> str:
    start: Event = run.starts[-1] if run.starts else {}
    last = max(run.steps)
    state = "done" if run.done else "not done when this was written"
    rows = [
        ("algorithm", str(start.get("algorithm", "?"))),
        ("steps", f"{last} of {start.get('steps', '?')}, {state}"),
        ("parameters", f"{start.get('parameters', 0):,}"),
        ("ranks", str(start.get("world_size", "?"))),
        ("wall time", f"{run.seconds:.1f} s"),
        ("trained tokens", f"{sum(run.series('tokens')[1]):,.0f}"),
    ]
    if len(run.starts) > 1:
        rows.append(("resumed", f"{len(run.starts) - 1} times, {run.repeated} steps trained again"))
    for name in run.sets:
        if values := run.series(f"eval/{name}/accuracy")[1]:
            shown = f"{values[0]:.1%} first, {max(values):.1%} best, {values[-1]:.1%} last"
            rows.append((f"accuracy, {name}", shown))
    return table(("", ""), rows)


def _evals(run: RunEvents) -> str:
    return "\n".join(filter(None, (_evals_of(run, name) for name in run.sets)))


def _evals_of(run: RunEvents, name: str) -> str:
    evals = [event for (of, _), event in sorted(run.evals.items()) if of == name]
    every = -(-len(evals) // SHOWN_EVALS)
    shown = [e for i, e in enumerate(evals) if i % every == 0 or i == len(evals) - 1]
    keys = [k for k in evals[0] if k == "answer_tokens_mean" or k.startswith((*SHARES, "reward"))]
    rows = [[str(e["step"]), str(e["version"]), *(f"{e.get(k, float('nan')):.3f}" for k in keys)] for e in shown]
    return table((f"{name}, step", "version", *keys), rows)


def _times(run: RunEvents) -> str:
    """By phase. A phase's share is of the phases' sum; with phases that overlap that is more than the step's time."""
    phases = [k for k in run.names(suffix="_ms") if k not in PARTS_OF_PUBLISH and k != "step_ms" and "/" not in k]
    total = sum(sum(run.series(key)[1]) for key in phases) or 1.0
    parts = [k for k in run.names(suffix="_ms") if k in PARTS_OF_PUBLISH or k == "step_ms"]
    rows = []
    for key in (*phases, *parts):
        values = run.series(key)[1]
        share = f"{sum(values) / total:.0%}" if key in phases else ""
        rows.append([key.removesuffix("_ms"), *_spread(values), share])
    return table(("phase, ms a step", "mean", "median", "95 %", "most", "share"), rows) if rows else ""


def _spread(values: Sequence[float]) -> list[str]:
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return [f"{v:.1f}" for v in (statistics.fmean(values), statistics.median(values), high, ordered[-1])]


def _ending(run: RunEvents) -> str:
    """Every other number, over the last quarter of the run."""
    left_out = {"step", "time", "version"}
    keys = [key for key in run.names() if key not in left_out and not key.endswith("_ms")]
    rows = [[f"`{key}`", f"{value:.5g}"] for key in keys if (value := at_end(run, key)) is not None]
    return table(("mean over the last quarter of the run", ""), rows)
