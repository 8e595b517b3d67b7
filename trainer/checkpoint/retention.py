"""Which checkpoints are kept: the last ones, one every so many steps, and those with the best evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Keep the newest `last`, every one whose step is a multiple of `every` (0: none for that), and the `best` with
    the highest score (0: none for that; the older of two equals)."""

    last: int = 2
    every: int = 0
    best: int = 0

    def kept(self, newest_first: list[int], scores: Mapping[int, float]) -> set[int]:
        """The steps to keep, out of those that exist; `scores` has the ones that were evaluated."""
        ranked = sorted(scores, key=lambda step: (-scores[step], step))
        regular = [step for step in newest_first if self.every and step % self.every == 0]
        return {*newest_first[: self.last], *regular, *ranked[: self.best]}
