"""Peak memory of a process and everything it has started, shared pages counted once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

import psutil

from loadtest.measure.processes import tree

INTERVAL_S = 0.5


class PeakMemory:
    """Samples the proportional set size (PSS) of process trees from a thread, for the body's duration."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.peak = max(self.peak, sum(tree_bytes(pid) for pid in self._pids))


def tree_bytes(pid: int) -> int:
    """PSS of a process and its descendants; 0 for one that is gone."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in tree(pid):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total
