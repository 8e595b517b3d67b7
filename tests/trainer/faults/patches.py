"""Faults that cannot be had from outside: applied in a run's process before it starts, as the environment says.

HOTSWAP_TEST_POISON=8x2   the weights become NaN before step 8, the first two times that it is reached
"""

from __future__ import annotations

import os
from typing import Any


def apply() -> None:
    if poison := os.environ.get("HOTSWAP_TEST_POISON"):
        step, times = map(int, poison.split("x"))
        _poison(step, times)


def _poison(step: int, times: int) -> None:
    """Whatever the engine computes from is broken, as if memory were; it finds out by itself."""
    import torch

    from trainer.faults.heartbeat import here
    from trainer.megatron.engine import Engine

    original, left = Engine.step, [times]

    def poisoned(self: Engine, fields: Any) -> Any:
        if here().step == step and left[0]:
            left[0] -= 1
            with torch.no_grad():
                next(self.model[0].parameters()).fill_(float("nan"))
        return original(self, fields)

    Engine.step = poisoned  # type: ignore[method-assign]
