"""Time by phase."""

from __future__ import annotations

import time

from trainer.faults.heartbeat import progress


class Stopwatch:
    """Milliseconds by phase: `with watch("train"): ...` adds to `watch.ms["train_ms"]`. `elapsed_ms` runs from the
    watch's making: with phases that overlap it is less than their sum."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._made = time.perf_counter()

    def __call__(self, phase: str) -> _Phase:
        return _Phase(self, f"{phase}_ms")

    @property
    def elapsed_ms(self) -> float:
        return round((time.perf_counter() - self._made) * 1e3, 3)


class _Phase:
    def __init__(self, watch: Stopwatch, key: str) -> None:
        self._watch, self._key = watch, key

    def __enter__(self) -> None:
        progress(self._key.removesuffix("_ms"))
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = (time.perf_counter() - self._start) * 1e3
        self._watch.ms[self._key] = round(self._watch.ms.get(self._key, 0.0) + spent, 3)
