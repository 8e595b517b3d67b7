"""The second of two devices: all that a worker takes lies there, and its swaps are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_emulated import standin
from tests.gpu_emulated.forks import forked
from tests.gpu_emulated.swaps import swap


@pytest.mark.parametrize("way", ["copy", "remap"])
def test_a_worker_on_the_second_device(checkpoint: Callable[[str], Path], way: str) -> None:
    path = checkpoint("dense")

    def work() -> list[object]:
        return [swap(path, way=way, device=1), standin.ask("used0"), standin.ask("used1") > 0]

    assert forked(work, devices=2, late=1, poison=1, mib=8 << 10) == [[], 0, True]
