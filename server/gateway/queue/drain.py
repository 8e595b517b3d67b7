"""How fast the line moves, as measured: what waiting times and Retry-After are computed from."""

from __future__ import annotations

import math
from typing import Final

MEMORY: Final = 64  # departures over which the rate is averaged, exponentially
LONGEST_RETRY_S: Final = 60


class DrainRate:
    """Departures per second of the time in which somebody waits. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._departures = 0.0
        self._since = 0.0

    def began(self, now: float) -> None:
        """The line is no longer empty."""
        self._since = now

    def departed(self, now: float) -> None:
        """One was let through."""
        keep = 1.0 - 1.0 / MEMORY
        self._seconds = self._seconds * keep + (now - self._since)
        self._departures = self._departures * keep + 1.0
        self._since = now

    def wait_s(self, ahead: int, now: float) -> float:
        """Seconds until one with `ahead` before it goes; 0.0 while nothing has been measured.

        A line that has stood still for longer than its usual pace is believed to go on doing so.
        """
        if not self._departures:
            return 0.0
        return (ahead + 1) * max(self._seconds / self._departures, (now - self._since) / MEMORY)


def retry_after(seconds: float) -> int:
    """Whole seconds for a Retry-After header."""
    return min(max(1, math.ceil(seconds)), LONGEST_RETRY_S)
