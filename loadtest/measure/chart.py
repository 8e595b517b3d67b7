"""Charts of figures, as SVG: the same figures give the same bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GREY, BLUE, RED, GREEN, VIOLET = "#8a8f98", "#2f6fdd", "#d1603d", "#3a9d5d", "#7b4fc4"


@contextlib.contextmanager
def panels(target: Path, *widths: float, height: float = 3.4) -> Iterator[Sequence[Any]]:
    """Axes side by side, of these widths in inches; what is drawn on them is written to `target`."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "hotswap", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(widths), figsize=(sum(widths), height), width_ratios=widths, layout="constrained", squeeze=False
    )
    yield axes[0]
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
