"""Records and data sets: an indexable collection of training records and a fixed list of held-out ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Record:
    """One problem. `target` is what SFT learns to say, `answer` what rewards compare with (a noisy target is not it).
    `target_ids` end with the end-of-sequence token; they are empty when the record has no target."""

    index: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


class Dataset(Protocol):
    """Records by index, and the held-out ones that are never trained on."""

    held_out: list[Record]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...
