"""Records in the run's order, each with its number in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.data import Contents, take
from trainer.data.records import Dataset, Record


@dataclass(frozen=True)
class Draw:
    """Record number `number` of a run."""

    number: int
    record: Record


class Feed:
    """Hands the records out. Part of a checkpoint: `drawn` is its whole state."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._contents = Contents(dataset)
        self.drawn = 0

    def draw(self, count: int) -> list[Draw]:
        """The next `count` records."""
        first, self.drawn = self.drawn, self.drawn + count
        indices = take(len(self._dataset), self._seed, first, count)
        return [Draw(first + i, self._dataset[index]) for i, index in enumerate(indices)]

    def at(self, number: int) -> Draw:
        """Any record by its number."""
        (index,) = take(len(self._dataset), self._seed, number, 1)
        return Draw(number, self._dataset[index])

    def state_dict(self) -> dict[str, Any]:
        """JSON: the cursor and what it points into."""
        return {"drawn": self.drawn, "contents": self._contents.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ResumeError when the data set has changed."""
        self._contents.load_state_dict(state["contents"])
        self.drawn = state["drawn"]
