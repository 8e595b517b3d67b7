"""The order of the records: a pure function of the seed and of how many were used, not of ranks or processes."""

from __future__ import annotations

from typing import Any

from trainer.data.records import Dataset
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


class Contents:
    """What a cursor points into: the number of records, and their digest where the data set has one (generated records
    are a function of the configuration). Kept with the cursor."""

    def __init__(self, dataset: Dataset) -> None:
        self._mine = {"records": len(dataset), "digest": getattr(dataset, "digest", "")}

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return dict(self._mine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ResumeError when the records are no longer those the checkpoint's run used: the order would be another
        one, and some would be used twice."""
        if any(state.get(key) != value for key, value in self._mine.items()):
            used, found = (f"{c.get('records')} records (digest {c.get('digest')})" for c in (state, self._mine))
            raise ResumeError(
                f"the checkpoint's run used {used}, the data set now has {found}. Restore its files, or set "
                "checkpoint.resume to never."
            )
