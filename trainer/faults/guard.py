"""A guard for a step's numbers: finite, and no leap above those of the last steps."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from trainer.config import FaultsConfig

ENOUGH = 8
"""Steps that must have been seen before any is called a leap."""


class Guard:
    """Sees every step once, in order. Its state is part of a checkpoint."""

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._seen: dict[str, deque[float]] = {}
        self._in_a_row = 0

    @property
    def suspicious(self) -> bool:
        """A leap has begun: what the weights are now should not be what a run goes back to."""
        return self._in_a_row > 0

    def problem(self, **numbers: float) -> str:
        """The problem with a step's `loss`, `grad_norm`, ...; empty when there is none, or not for long enough yet."""
        for name, value in numbers.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        leaps = [text for name, value in numbers.items() if (text := self._leap(name, value))]
        if not leaps:
            self._in_a_row = 0
            for name, value in numbers.items():
                self._window(name).append(value)  # leaps stay out, or they would soon look usual
            return ""
        self._in_a_row += 1
        return "; ".join(leaps) if self._in_a_row >= self._config.spike_patience else ""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {name: list(window) for name, window in self._seen.items()}, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = int(state["in_a_row"])
        self._seen = {}
        for name, values in state["seen"].items():
            self._window(name).extend(values)

    def _leap(self, name: str, value: float) -> str:
        window = self._window(name)
        if not self._config.spike_sigma or len(window) < ENOUGH:
            return ""
        mean = sum(window) / len(window)
        deviation = (sum((v - mean) ** 2 for v in window) / len(window)) ** 0.5
        # A window of equal values has no deviation; rounding must not look like a leap.
        bound = mean + self._config.spike_sigma * max(deviation, 1e-3 * abs(mean), 1e-12)
        return f"{name} leapt to {value:.4g}, above {bound:.4g}" if value > bound else ""

    def _window(self, name: str) -> deque[float]:
        return self._seen.setdefault(name, deque(maxlen=self._config.spike_window))
