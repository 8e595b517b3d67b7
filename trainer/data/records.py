"""Records and data sets: an indexable collection of training records and a fixed list of held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Record:
    """One problem. `target` is what SFT learns to say, `answer` what rewards compare with (a noisy target is not it).

    `target_ids` end with the end-of-sequence token; they are empty when the record has no target. So do `chosen_ids`
    and `rejected_ids`, the two answers of a preference; both are empty when the record is none. `extra` is what else
    the data set says about it, as JSON values: the tests of a code task, say. Rewards get it.
    """

    index: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...] = ()
    rejected_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


class Dataset(Protocol):
    """Records by index, and the held-out ones that are never trained on. One that leaves records out says so in a
    method `summary() -> dict` (JSON values); one whose content can change has a `digest` of it."""

    @property
    def held_out(self) -> Sequence[Record]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


def summary(dataset: Dataset) -> dict[str, Any]:
    """What the metrics say about a data set: how many records and held-out ones, and what it says itself."""
    said = dataset.summary() if hasattr(dataset, "summary") else {}
    return {"records": len(dataset), "held_out": len(dataset.held_out), **said}
