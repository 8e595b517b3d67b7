"""Records, data sets, and the order in which a run uses the records.

The order is a pure function of the seed and of how many records were used, not of ranks or processes. A shuffle of any
size can be asked for single places in constant memory: up to `LARGEST_TABLE` it is numpy's. Above, a table of every
index would cost gigabytes at each epoch, so the place goes through a Feistel network over the next power of four (Luby
and Rackoff 1988), again while the result is out of range (cycle walking, Black and Rogaway 2002): a permutation for
every key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainer.errors import ResumeError

LARGEST_TABLE = 1 << 20
ROUNDS = 6
Learns = Literal["target", "preference", "samples"]  # what a run needs of a record; a prompt is enough for samples


@dataclass(frozen=True)
class Record:
    """One problem. `target` is what SFT learns to say, `answer` what rewards compare with (a noisy target is not it).

    `target_ids` end with the end-of-sequence token; they are empty when the record has no target. So do `chosen_ids`
    and `rejected_ids`, the two answers of a preference; both are empty when the record is none. `extra` is what else
    the data set says about it, as JSON values: the tests of a code task, say. Rewards get it. `messages` are the
    prompt's chat messages, if it was given as such. `mask` says which of the `target_ids` are learned (1) and which are
    only read (0), the user's between two answers; left out, all are learned. `chosen_mask` and `rejected_mask` say so
    of the two answers. `alternatives` are answers that are as right as `answer`.
    """

    index: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...] = ()
    rejected_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    messages: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    mask: tuple[int, ...] = ()
    alternatives: tuple[str, ...] = ()
    chosen_mask: tuple[int, ...] = ()
    rejected_mask: tuple[int, ...] = ()


class Dataset(Protocol):
    """Records by index, and the held-out ones that are never trained on. One that leaves records out says so in a
    method `summary() -> dict` (JSON values); one whose content can change has a `digest` of it; one that reads files
    says in `place(index) -> str` where a record is."""

    @property
    def held_out(self) -> Sequence[Record]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


def summary(dataset: Dataset) -> dict[str, Any]:
    """The facts of a data set for the metrics: how many records and held-out ones, and the data set's own summary."""
    said = dataset.summary() if hasattr(dataset, "summary") else {}
    return {"records": len(dataset), "held_out": len(dataset.held_out), **said}


def place(dataset: Dataset, index: int) -> str:
    """Where a record is, in brackets behind a space: its file, and the line or row; nothing of a generated one."""
    return f" ({dataset.place(index)})" if hasattr(dataset, "place") else ""


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
    """The contents that a cursor points into: the number of records, and their digest where the data set has one
    (generated records are a function of the configuration). Kept with the cursor."""

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
