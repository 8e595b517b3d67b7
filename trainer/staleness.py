"""How old a token is: counted in optimizer steps, whatever number of versions they made.

The trainer knows which of its steps each published version stands for. Versions that were never published, because only
every n-th is or because publishing failed, make what is sampled older; counted in versions, that would not show.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

KEPT = 4096  # versions; what an older one wrote counts as the oldest of these


class StepsOfVersions:
    """The optimizer steps behind each published version. On rank 0; a part of the schedule's state."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._steps: list[int] = []

    def published(self, version: int, step: int) -> None:
        """`version` has the weights after `step` optimizer steps. Versions come in rising order."""
        self._versions, self._steps = [*self._versions, version][-KEPT:], [*self._steps, step][-KEPT:]

    def __getitem__(self, version: int) -> int:
        """Steps in a version. One that this trainer did not publish, or went back from, counts as its last before: the
        initial weights, if there is none."""
        place = bisect.bisect_right(self._versions, version)
        return self._steps[place - 1] if place else (self._steps[0] if self._steps else 0)

    @property
    def served(self) -> int:
        """Steps in the version that was published last."""
        return self._steps[-1] if self._steps else 0

    def state_dict(self) -> list[list[int]]:
        return [list(pair) for pair in zip(self._versions, self._steps, strict=True)]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        self._versions, self._steps = [version for version, _ in state], [step for _, step in state]
