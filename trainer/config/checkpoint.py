"""When checkpoints are written, how, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range, positive


@dataclass(frozen=True)
class CheckpointConfig:
    """`resume`: `auto` goes on from the newest whole checkpoint if there is one, `must` insists, `never` starts new.

    Kept are the newest `keep`, every one whose step is a multiple of `keep_every`, and the `keep_best` with the highest
    accuracy of an evaluation at their very step (0: none for that). With `asynchronous` a thread writes a copy in host
    memory while training goes on. `max_failures` is how many in a row may fail to be written before the run stops.
    """

    path: str
    every: int = 100
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    asynchronous: bool = True
    max_failures: int = 0
    resume: Literal["auto", "must", "never"] = "auto"

    def __post_init__(self) -> None:
        positive(self, "every", "keep")
        for name in ("keep_every", "keep_best", "max_failures"):
            in_range(self, name, 0, 10**9)
