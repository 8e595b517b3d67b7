"""From metrics files to a directory with `report.md` and its plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import ReportError
from trainer.report.events import RunEvents, read_events
from trainer.report.markdown import page
from trainer.report.plots import draw


def write_report(metrics: Sequence[str | Path], directory: str | Path | None = None) -> Path:
    """Write the report of one run, or of several compared; returns the path of its Markdown. `directory` defaults to
    the first metrics file's name with `-report`. Without matplotlib there are no plots, and the page says so.

    Raises ReportError for a file that cannot be reported on, or a directory that cannot be written.
    """
    runs = _named_apart([read_events(path) for path in metrics], metrics)
    target = Path(directory) if directory is not None else default_directory(metrics[0])
    try:
        target.mkdir(parents=True, exist_ok=True)
        plots = draw(runs, target) if importlib.util.find_spec("matplotlib") else []
        (target / "report.md").write_text(page(runs, plots))
    except OSError as error:
        raise ReportError(f"cannot write the report into {target} ({error.strerror}). Choose another.") from None
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
