"""Where this process is: what its heartbeat tells the other ranks. No torch here; any part of the trainer may say."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A phase of a step, entered at `since` (monotonic seconds)."""

    phase: str
    step: int
    since: float

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}"


_here = Place("start", 0, time.monotonic())


def progress(phase: str, step: int | None = None) -> None:
    """The run gets on: call it when a phase begins and whenever a long one has got further."""
    global _here
    _here = Place(phase, _here.step if step is None else step, time.monotonic())


def here() -> Place:
    return _here
