"""Data sets in files, tokenised into the cache and read from there record by record."""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, overload

from trainer.config import FileData
from trainer.data.cache import prepare
from trainer.data.records import Record
from trainer.data.segment import Segment
from trainer.data.storage import find_files
from trainer.data.tokenizer import Tokenizer
from trainer.data.workers import segment_name
from trainer.errors import DataError

log = logging.getLogger(__name__)


class CachedRecords(Sequence[Record]):
    """The usable records of some files, in order. Holds open files, no records."""

    def __init__(self, path: str, config: FileData, tokenizer: Tokenizer) -> None:
        began = time.monotonic()
        directory, self.manifest = prepare(find_files(path), config, tokenizer)
        self.seconds = time.monotonic() - began
        counts = [count for count, _ in self.manifest.segments]
        self._segments = [Segment(directory, segment_name(i), count) for i, count in enumerate(counts)]
        self._ends = list(itertools.accumulate(counts))
        for problem in self.manifest.bad:
            log.warning("Left out: %s", problem)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Raises DataError for a record whose bytes in the cache have changed."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._segments[number].read(index - before).record(index)


class FileDataset:
    """The records of `config.path`, and those of `config.eval_path` held out. Raises DataError for files that cannot
    be read, for too many bad records, and when there are none."""

    def __init__(self, config: FileData, tokenizer: Tokenizer) -> None:
        self._records = CachedRecords(config.path, config, tokenizer)
        held_out = CachedRecords(config.eval_path, config, tokenizer) if config.eval_path else None
        self.held_out: Sequence[Record] = [] if held_out is None else held_out
        self._evaluated = held_out
        if not self._records:
            raise DataError(f"{config.path} has no records. Add at least one.")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    @property
    def digest(self) -> str:
        """Of all training records, in order."""
        return self._records.manifest.digest

    def summary(self) -> dict[str, Any]:
        """What was read and what was left out, for the metrics: counts, and the first bad records by name."""
        parts = [part.manifest for part in (self._records, self._evaluated) if part is not None]
        return {
            "tokens": self._records.manifest.tokens,
            "bad_records": sum(part.bad_records for part in parts),
            "too_long": sum(part.too_long for part in parts),
            "bad": [name for part in parts for name in part.bad],
            "seconds": round(self._records.seconds + (self._evaluated.seconds if self._evaluated else 0.0), 3),
        }
