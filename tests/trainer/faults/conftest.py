"""Runs to be killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.faults.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running


@pytest.fixture
def config(small_models: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """Fine-tuning of the smallest model, with a learning rate that depends on where the run is."""
    return {
        "model": {"path": small_models["qwen2"]},
        "data": {"kind": "arithmetic", "noise": 0.3},
        "algorithm": {"name": "sft"},
        "steps": 12,
        "batch": 6,
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "decay": "cosine"},
        "checkpoint": {"path": str(tmp_path / "checkpoints"), "every": 3},
        "metrics": str(tmp_path / "metrics.jsonl"),
    }
