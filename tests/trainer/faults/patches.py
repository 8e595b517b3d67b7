"""Faults that cannot be had from outside: applied in a run's process before it starts, as the environment says.

HOTSWAP_TEST_POISON=8x2   the weights become NaN before step 8, the first two times that it is reached
"""

from __future__ import annotations

import os
from typing import Any


def apply() -> None:
    """The engine computes from broken weights, as if memory were, and finds out by itself."""
    if not (poison := os.environ.get("HOTSWAP_TEST_POISON")):
        return
    import torch

    from trainer.faults.heartbeat import here
    from trainer.megatron.engine import Engine

    step, left = map(int, poison.split("x"))
    original = Engine.step

    def poisoned(self: Engine, fields: Any) -> Any:
        nonlocal left
        if here().step == step and left:
            left -= 1
            with torch.no_grad():
                next(self.model[0].parameters()).fill_(float("nan"))
        return original(self, fields)

    Engine.step = poisoned  # type: ignore[method-assign]
