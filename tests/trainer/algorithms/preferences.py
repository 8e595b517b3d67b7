"""Random preferences."""

from __future__ import annotations

import random

from tests.trainer.algorithms.batches import VOCAB
from trainer.data.records import Record


def preferences(count: int, seed: int) -> list[Record]:
    """Answers of 1 to 6 tokens."""
    rng = random.Random(seed)

    def ids() -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))

    return [Record(i, "", "", ids(), (), ids(), ids()) for i in range(count)]
