"""The order of the records: a pure function of the seed and of how many were used, not of ranks or processes."""

from __future__ import annotations

from typing import Any

from trainer.data.records import Dataset, Record
from trainer.data.shuffle import shuffled
from trainer.errors import ResumeError


def take(size: int, seed: int, start: int, count: int) -> list[int]:
    """Indices of records number `start` to `start + count` in an endless sequence of shuffled epochs over `size`.

    The whole state of the sampler is `start`, so a run resumes exactly, and on any number of ranks.
    """
    indices: list[int] = []
    while count > 0:
        epoch, offset = divmod(start, size)
        chunk = shuffled(size, seed, epoch, offset, count)
        indices += chunk
        start, count = start + len(chunk), count - len(chunk)
    return indices


class Sampler:
    """A data set's records in their shuffled order, and how many of them were used."""

    def __init__(self, dataset: Dataset, seed: int, consumed: int = 0) -> None:
        self._dataset, self._seed, self.consumed = dataset, seed, consumed

    def take(self, count: int) -> list[Record]:
        """The next `count` records."""
        indices = take(len(self._dataset), self._seed, self.consumed, count)
        self.consumed += count
        return [self._dataset[i] for i in indices]

    def state_dict(self) -> dict[str, Any]:
        """JSON: the cursor, and what it points into."""
        return {"consumed": self.consumed} | identity(self._dataset)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor. Raises ResumeError when the records are no longer the same: the order would be
        another one, and some would be used twice."""
        mine = identity(self._dataset)
        if any(state.get(key, value) != value for key, value in mine.items()):
            raise ResumeError(
                f"the checkpoint is of {state['records']} records with digest {state.get('digest')}, the data set "
                f"has {mine['records']} with {mine['digest']}. Restore its files, or set checkpoint.resume to never."
            )
        self.consumed = int(state["consumed"])


def identity(dataset: Dataset) -> dict[str, Any]:
    """What must stay the same for a cursor to mean anything: the number of records, and their digest where the data set
    has one (generated records are a function of the configuration)."""
    return {"records": len(dataset), "digest": getattr(dataset, "digest", "")}
