"""How fast a staging may read: at full speed while nothing decodes, in small bites while something does."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from weightsync.errors import StagingCancelled

# Decoding goes first. The stager gives the memory bus and the interpreter back for a moment with every piece (1 MB).
# The work takes 0.16 s of a core for 0.8 GB, the pauses about 0.5 s: staging goes at 1 GB/s beside 16 streams
# (loadtest/swap_stall.py, 0.4 B), and at 4 to 5 GB/s with none (loadtest/staging.py).
YIELD_BYTES = 64 << 10
YIELD_RATE = 2e9  # bytes per second of pause
LONGEST_YIELD_S = 0.002
IDLE_AFTER_S = 0.05  # without a step: sampling, scheduling and a slow client's next request fit in between


def go_on(stop: threading.Event) -> None:
    """Raises StagingCancelled when the staging is to end."""
    if stop.is_set():
        raise StagingCancelled()


class Pacer:
    """Called with the bytes that are about to be read; sleeps for as long as decoding is to be left alone."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._owed = 0
        self._running = False
        self._stepped_at = float("-inf")
        # Where graphs are replayed nobody calls `forward`: there decoding is always taken to be under way.
        self._sees_steps = device.type == "cpu"
        if self._sees_steps:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end, always_call=True)

    @property
    def decoding(self) -> bool:
        """Whether a step runs, or one ended a moment ago."""
        if not self._sees_steps:
            return True
        return self._running or time.monotonic() - self._stepped_at < IDLE_AFTER_S

    def __call__(self, nbytes: int) -> None:
        self._owed += nbytes
        if self._owed < YIELD_BYTES:
            return
        if self.decoding:
            time.sleep(min(LONGEST_YIELD_S, self._owed / YIELD_RATE))
        self._owed = 0

    def _begin(self, *_: Any) -> None:
        self._running = True

    def _end(self, *_: Any) -> None:
        self._running = False
        self._stepped_at = time.monotonic()
