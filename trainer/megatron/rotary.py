"""Rotary positions of packed rows: counted from the start of each segment, not of the row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_positions: ContextVar[Tensor | None] = ContextVar("rotary_positions", default=None)


@contextmanager
def rotary_positions(positions_BT: Tensor | None) -> Iterator[None]:
    """Within the body, models that `follow_positions` rotate by `positions_BT` (int64; None: by the place in the row).
    Activation recompute is safe outside it: the rotation's angles are among what is kept."""
    token = _positions.set(positions_BT)
    try:
        yield
    finally:
        _positions.reset(token)


def follow_positions(model: Any) -> None:
    """Megatron-Core's GPTModel does not read its position ids when it rotates; afterwards it does."""
    model.rotary_pos_emb.register_forward_hook(_follow)


def _follow(rotary: Any, inputs: tuple[Any, ...], angles_T11D: Tensor) -> Tensor:
    positions_BT = _positions.get()
    if positions_BT is None:
        return angles_T11D
    # Not from `angles`: under context parallelism they are this rank's part of the row already.
    whole: Tensor = rotary.get_emb(inputs[0])
    return whole[positions_BT.t(), 0]  # [T, B, 1, D]
