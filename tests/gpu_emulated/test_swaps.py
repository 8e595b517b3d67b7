"""Every kind of model, staged, flipped, rolled back, flipped in vain, short of memory, put to sleep and woken: each
time all parameters and buffers are, to the bit, what vLLM makes of that version, and a captured graph sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_emulated.forks import forked
from tests.gpu_emulated.kinds import KINDS
from tests.gpu_emulated.swaps import swap


@pytest.mark.parametrize("streams", ["in-order", "adversarial"])
@pytest.mark.parametrize("way", ["copy", "remap"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_swapped(checkpoint: Callable[[str], Path], kind: str, way: str, streams: str) -> None:
    path = checkpoint(kind)
    assert forked(lambda: swap(path, way=way), late=streams == "adversarial", poison=1, mib=8 << 10) == []
