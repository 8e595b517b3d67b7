"""Draws docs/swap.svg from the figures that the benchmark left in docs/benchmarks/. Run it afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadtest.measure.chart import BLUE, GREY, RED, panels

DOCS = Path(__file__).parents[2] / "docs"
ROWS = (("no swap", "none", GREY), ("hotswap", "hotswap", BLUE), ("vLLM pause,\nreload, resume", "vllm", RED))


def draw(stall: dict[str, Any], target: Path) -> None:
    """The longest gap between tokens of each window, one point a window."""
    with panels(target, 5.5, height=3.6) as (axes,):
        for place, (_, key, color) in enumerate(ROWS):
            values = stall["longest_per_swap_ms"][key]
            axes.scatter([place] * len(values), values, color=color, s=28, alpha=0.8)
        axes.set_yscale("log")
        axes.set_xticks(range(len(ROWS)), [name for name, _, _ in ROWS])
        axes.set_xlim(-0.5, len(ROWS) - 0.5)
        axes.set_ylabel("longest gap between tokens, ms")
        size = stall["model"]["parameters"] / 1e9
        axes.set_title(f"one swap, {size:.2f} B parameters, {stall['streams']} streams", fontsize=9)


if __name__ == "__main__":
    draw(json.loads((DOCS / "benchmarks/swap_stall.json").read_text()), DOCS / "swap.svg")
