"""A shuffle of any size of which single places can be asked, in constant memory.

Up to `LARGEST_TABLE` it is numpy's. Above, a table of every index would cost gigabytes at each epoch, so the place goes
through a Feistel network over the next power of four (Luby and Rackoff 1988), again while the result is out of range
(cycle walking, Black and Rogaway 2002): a permutation for every key.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

LARGEST_TABLE = 1 << 20
ROUNDS = 6

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def shuffled(size: int, seed: int, epoch: int, start: int, count: int) -> list[int]:
    """The indices at places `start` to `start + count` (cut off at `size`) of the epoch's shuffle of range(size)."""
    if size <= LARGEST_TABLE:
        return _table(size, seed, epoch)[start : start + count].tolist()
    places = np.arange(start, min(start + count, size), dtype=np.uint64)
    return permute(places, size, np.random.default_rng([seed, epoch])).tolist()


def permute(places: _Words, size: int, rng: np.random.Generator) -> Indices:
    """Where a permutation of range(size), chosen by `rng`, sends each place."""
    half = -(-max(size - 1, 1).bit_length() // 2)
    keys = rng.integers(0, 1 << 64, ROUNDS, dtype=np.uint64)
    result = _feistel(places, half, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(values: _Words, half: int, keys: _Words) -> _Words:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: _Words) -> _Words:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=4)
def _table(size: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(size)
