"""Records in the run's order, each with its number in it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data import take
from trainer.data.records import Dataset, Record


@dataclass(frozen=True)
class Draw:
    """Record number `number` of a run."""

    number: int
    record: Record


class Feed:
    """Hands the records out. `drawn` is its whole state."""

    def __init__(self, dataset: Dataset, seed: int, drawn: int = 0) -> None:
        self._dataset, self._seed, self.drawn = dataset, seed, drawn

    def draw(self, count: int) -> list[Draw]:
        """The next `count` records."""
        draws = [self.at(self.drawn + i) for i in range(count)]
        self.drawn += count
        return draws

    def at(self, number: int) -> Draw:
        """Any record by its number."""
        (index,) = take(len(self._dataset), self._seed, number, 1)
        return Draw(number, self._dataset[index])
