"""The learning benchmark's table and chart, made from its figures.

python -m loadtest.training.learning.pages docs/benchmarks/learning.json docs/learning.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from loadtest.measure.chart import BLUE, GREEN, GREY, RED, VIOLET, panels

BEGIN, END = "<!-- figures: made by loadtest/training/learning/bench.py -->", "<!-- end of figures -->"
COLORS = {"sft": GREY, "dpo": GREEN, "grpo": BLUE, "ppo": RED, "grpo-async": VIOLET}


def table(figures: dict[str, Any]) -> str:
    """One row a run."""
    rows = ["| task | learned by | first | best | last | steps | seconds | |", "|" + "---|" * 8]
    for name, task in figures["tasks"].items():
        rows += [_row(f"{name} ({task['held_out']} held out)", way, run) for way, run in task["runs"].items()]
    return "\n".join(rows)


def _row(task: str, way: str, run: dict[str, Any]) -> str:
    if "failed" in run:
        return f"| {task} | {way} | | | | | | **failed**: {run['failed'].splitlines()[-1]} |"
    shares = " | ".join(f"{run[key]:.1%}" for key in ("first", "best", "last"))
    verdict = "learned" if run["learned"] else "**did not learn**"
    return f"| {task} | {way} | {shares} | {run['steps']} | {run['seconds']:.0f} | {verdict} |"


def update_page(page: Path, figures: dict[str, Any]) -> None:
    """Put the table between the page's markers."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(figures)}\n{END}{rest.split(END)[1]}")


def chart(figures: dict[str, Any], target: Path) -> None:
    """Held-out accuracy by step, a panel a task."""
    tasks = figures["tasks"]
    with panels(target, *[5.5] * len(tasks)) as drawn:
        for axes, (name, task) in zip(drawn, tasks.items(), strict=True):
            for way, run in task["runs"].items():
                if "curve" in run:
                    steps, accuracy = zip(*run["curve"], strict=True)
                    axes.plot(steps, accuracy, marker="o", markersize=3, label=way, color=COLORS.get(way))
            axes.set_title(f"{name}: {task['held_out']} held-out problems", fontsize=9)
            axes.set_xlabel("step")
            axes.set_ylabel("right, greedy")
            axes.set_ylim(-0.03, 1.03)
            axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    update_page(Path(sys.argv[2]), found)
    chart(found, Path(sys.argv[2]).with_suffix(".svg"))
