"""Functions of the tests for a run: write its configuration, read its metrics, wait until it has got somewhere."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil
import yaml

import trainer
from trainer.tiny_model import tiny_run

PATIENCE_S = 240.0  # a process that imports Megatron first takes over a minute on a slow machine
SUMS = {"kind": "arithmetic", "operands": 2, "largest": 4, "held_out": 10}
CONFIGS = Path(trainer.__file__).parent / "configs"


def example(name: str) -> dict[str, Any]:
    """A recipe of trainer/configs."""
    found: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())
    return found


def fine_tuning(model: str, steps: int = 1, **more: Any) -> dict[str, Any]:
    """The configuration of a run that learns sums."""
    config = {"model": {"path": model}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": steps}
    return config | more


def arguments(config: dict[str, Any], root: Path, name: str = "config.yaml") -> list[str]:
    (root / name).write_text(yaml.safe_dump(tiny_run(config)))
    return ["--config", str(root / name)]


def events(path: str | Path, name: str) -> list[dict[str, Any]]:
    """All events of that name; a line that is being written is left out."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == name]


def curve(path: str | Path, *keys: str) -> dict[int, list[float]]:
    """The last word about each step: loss, gradient norm and what else is asked for."""
    return {e["step"]: [e[key] for key in ("loss", "grad_norm", *keys)] for e in events(path, "step")}


def is_gone(pid: int) -> bool:
    """Or dead and not yet taken away by whoever has it now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True
