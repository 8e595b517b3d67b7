"""Weights that change in the middle of an upgrade: version v answers token FIRST + v % CHECKPOINTS to everything."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.gaps import Window
from loadtest.upgrade.clients import MODEL
from weightsync import Publisher
from weightsync.control.records import SwapMode
from weightsync.errors import WeightSyncError

FIRST, CHECKPOINTS = 100, 4
TIMEOUT_S = 90.0
DRAIN_S = 3.0  # what a rolling swap waits for streams


@dataclass(frozen=True)
class Swap:
    """One that was asked for; `outcome` is empty if it was committed."""

    kind: str
    during: str
    window: Window
    outcome: str


class Swaps:
    """Publishes versions from the process that benchmarks. Use as a context."""

    def __init__(self, store: str, models: list[Path]) -> None:
        from safetensors.torch import load_file

        self._weights = [load_file(model / "model.safetensors") for model in models]
        self._publisher = Publisher(store, model=MODEL)
        self.done: list[Swap] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Swaps]:
        """The first version is published, and becomes active with the first instance."""
        with self._publisher:
            self._publisher.activate(self._publish(), wait=False, timeout_s=600.0)
            yield self

    def swap(self, kind: str, during: str) -> None:
        """ "together" and "rolling" bring a new version, "rollback" the one before; returns when it has ended."""
        started, outcome = time.monotonic(), ""
        try:
            if kind == "rollback":
                self._publisher.rollback(timeout_s=TIMEOUT_S)
            else:
                mode: SwapMode = "rolling" if kind == "rolling" else "together"
                self._publisher.activate(self._publish(), mode=mode, drain_s=DRAIN_S, timeout_s=TIMEOUT_S)
        except WeightSyncError as error:
            outcome = str(error)
        self.done.append(Swap(kind, during, (started, time.monotonic()), outcome))

    def _publish(self) -> int:
        schema: Any = [(name, t.dtype, t.shape) for name, t in self._weights[0].items()]
        with self._publisher.begin(schema) as draft:
            for name, tensor in self._weights[draft.version % CHECKPOINTS].items():
                draft.write(name, tensor)
            return draft.commit(activate=False)
