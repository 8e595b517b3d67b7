"""A run's figures as JSON, and the chart of them.

python -m loadtest.demo.figures docs/benchmarks/demo_real.json docs/demo-real.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from loadtest.demo.recipe import Course
from loadtest.demo.scene import Scene
from loadtest.measure.chart import BLUE, GREEN, GREY, RED, panels

COLORS = (BLUE, RED, GREEN)
NUMBERS = ("accuracy", "pass_at_")


def figures(course: Course, scene: Scene) -> dict[str, Any]:
    """The figures of a run. Every number was measured in it."""
    client, swaps = scene.client, scene.swaps
    longest_ms, _ = client.longest
    return {
        "demo": course.name,
        "seconds": round(scene.seconds, 1),
        "seconds_at": {phase: round(began - scene.began, 1) for phase, began in scene.phase_began.items()},
        "steps": scene.step,
        "accuracy": scene.accuracy,
        "evals": [_shown(event) for event in scene.evals],
        "reward": [round(reward, 4) for reward in scene.rewards],
        "versions": len(swaps.done),
        "aborted": len(swaps.aborted),
        "stage_ms": {"median": swaps.median("stage_ms"), "longest": swaps.longest("stage_ms")},
        "commit_ms": {"median": swaps.median("commit_ms"), "longest": swaps.longest("commit_ms")},
        "gap_ms": {"median": client.gap_ms(0.5), "p99": client.gap_ms(0.99), "longest": longest_ms},
        "client": {"answers": client.answers, "tokens": client.tokens, "lost": client.lost},
        "streams_across_a_swap": {"streams": client.crossed, "most_versions": client.most_versions},
    }


def _shown(event: dict[str, Any]) -> dict[str, Any]:
    kept = {key: event[key] for key in ("phase", "set", "step", "version", "prompts", "seconds")}
    return kept | {key: round(value, 4) for key, value in event.items() if key.startswith(NUMBERS)}


def draw(found: dict[str, Any], target: Path) -> None:
    """Left: the accuracies of each evaluation set by version. Right: the reward of the rollouts by step."""
    last = found["evals"][-1]["phase"]
    evals = [event for event in found["evals"] if event["phase"] == last]
    lines = {(e["set"], key): None for e in evals for key in e if key.startswith(NUMBERS)}
    with panels(target, 6.4, 4.6) as (left, right):
        for (name, key), color in zip(lines, COLORS, strict=False):
            points = [(e["step"], e[key]) for e in evals if e["set"] == name and key in e]
            label = f"{name}, {key.replace('_at_', '@')}"
            left.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=label)
        for event in (e for e in evals if e["set"] == evals[0]["set"]):
            where = (event["step"], -0.02)
            left.annotate(f"v{event['version']}", where, ha="center", va="top", fontsize=7, color=GREY)
        left.set_ylim(-0.1, 1.03)
        left.set_xlabel("step, and the version that answered")
        left.set_ylabel("share of held-out prompts")
        left.legend(frameon=False, fontsize=8)
        right.plot(range(1, len(found["reward"]) + 1), found["reward"], color=BLUE, linewidth=1.2)
        right.set_ylim(-0.03, 1.03)
        right.set_xlabel("step")
        right.set_ylabel("mean reward of the rollouts")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
