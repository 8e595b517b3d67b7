"""The order of the records: a pure function of the seed and of how many were used, not of ranks or processes."""

from __future__ import annotations

import numpy as np


def take(size: int, seed: int, start: int, count: int) -> list[int]:
    """Indices of records number `start` to `start + count` in an endless sequence of shuffled epochs over `size`.

    The whole state of the sampler is `start`, so a run resumes exactly, and on any number of ranks.
    """
    indices: list[int] = []
    while count > 0:
        epoch, offset = divmod(start, size)
        chunk = np.random.default_rng([seed, epoch]).permutation(size)[offset : offset + count]
        indices += chunk.tolist()
        start, count = start + len(chunk), count - len(chunk)
    return indices
