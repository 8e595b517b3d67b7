"""Restarts beside stock vLLM's start: what the figures are of, and one real restart of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.serving.restarts import PHASES, TARGET_S, Found, figures_of, run

STARTS = ("server.gateway", "server.cli instance", "vllm.entrypoints")


def test_the_target_is_stock_without_its_imports() -> None:
    first, second = (dict(zip(PHASES, ends, strict=True)) for ends in ((0.1, 2, 4, 4, 5), (0.3, 3, 4, 5, 7)))
    found = figures_of(Found([first, second], [20.0, 22.0], [6.0, 8.0]))
    assert (found["restart_s"], found["target_s"], found["within_target"]) == (6.0, 21.0 - 7.0 + TARGET_S, True)
    assert found["phases_s"] == pytest.approx(
        {"process": 0.2, "engine": 2.3, "weights": 1.5, "warm-up": 0.5, "first token": 1.5}
    )
    late = figures_of(Found([first, second], [9.0], [6.0]))
    assert (late["target_s"], late["within_target"]) == (3.0 + TARGET_S, False)


@pytest.mark.broad
@pytest.mark.engine
def test_an_instance_that_is_killed_answers_again(tmp_path: Path) -> None:
    run(tmp_path / "found.json", kills=1, small=True, runs=tmp_path)
    (ends,) = json.loads((tmp_path / "found.json").read_text())["turns"]["restarts"]
    assert list(ends) == [*PHASES]
    assert list(ends.values()) == sorted(ends.values())
