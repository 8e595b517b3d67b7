"""Draws docs/swap.svg from the figures the swap benchmarks left in docs/benchmarks/. Run it after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "docs"
NONE, OURS, THEIRS = "#8a8f98", "#2f6fdd", "#d1603d"


def draw(stall: dict[str, Any], fleet: dict[str, Any], target: Path) -> None:
    """Left: the longest token gap of each window, one point a window. Right: gaps of a fleet with and without swaps."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "hotswap", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 1.5), layout="constrained")
    _stall(left, stall)
    _fleet(right, fleet)
    figure.savefig(target, metadata={"Date": None})


def _stall(axes: Any, stall: dict[str, Any]) -> None:
    rows = [("no swap", "none", NONE), ("hotswap", "hotswap", OURS), ("vLLM pause,\nreload, resume", "vllm", THEIRS)]
    for place, (_, key, color) in enumerate(rows):
        values = stall["longest_per_swap_ms"][key]
        axes.scatter([place] * len(values), values, color=color, s=28, alpha=0.8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylabel("longest gap between tokens, ms")
    size = stall["model"]["parameters"] / 1e9
    axes.set_title(f"one swap, {size:.2f} B parameters, {stall['streams']} streams", fontsize=9)


def _fleet(axes: Any, fleet: dict[str, Any]) -> None:
    cases = fleet["cases"]
    for place, case in enumerate(cases.values()):
        for shift, key, color in ((-0.18, "none", NONE), (0.18, "swap", OURS)):
            gap = case["gap_ms"][key]
            axes.bar(place + shift, gap["p99"], 0.32, color=color, label=None)
            axes.plot([place + shift - 0.16, place + shift + 0.16], [gap["max"]] * 2, color=color, linewidth=1.5)
        axes.annotate(f"{case['goodput_kept']:.0%}", (place, 0), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(cases)), [name.replace(", ", "\n") for name in cases])
    axes.set_ylabel("gap between tokens, ms")
    axes.set_title(
        "p99 (bar) and longest (line), no swap and with swaps; % of tokens/s kept with a swap a second", fontsize=9
    )


if __name__ == "__main__":
    found = [json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()) for name in ("swap_stall", "swap_fleet")]
    draw(found[0], found[1], ROOT / "swap.svg")
