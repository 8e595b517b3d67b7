"""Tokenised records on disk: one file of records, one of their places, made from one unit of the source.

    NAME.records    the records end to end, msgpack
    NAME.index      int64 [n, 2], little-endian: where record i ends, and its 64-bit digest

Nothing but the index of the segments in use is mapped; a record is read and checked when it is asked for.
"""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import xxhash

from trainer.data.parse import Tokenised
from trainer.errors import DataError

_INT64_MAX = (1 << 63) - 1


class SegmentWriter:
    """Appends records. Use as a context; the index is written when it ends well."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.records"
        with writing(self.path):
            self._records = self.path.open("wb")
        self._index_path = directory / f"{name}.index"
        self._index = array.array("q")
        self._end = 0
        self.tokens = 0

    @property
    def count(self) -> int:
        return len(self._index) // 2

    @property
    def size(self) -> int:
        return self._end

    def append(self, record: Tokenised) -> None:
        encoded = msgspec.msgpack.encode(record)
        with writing(self.path):
            self._records.write(encoded)
        self._end += len(encoded)
        self.tokens += record.tokens
        self._index.extend((self._end, _digest(encoded)))

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        with writing(self.path):
            self._records.close()
            if kind is None:
                np.frombuffer(self._index, dtype="<i8").tofile(self._index_path)


def digests(directory: Path, name: str) -> bytes:
    """Those of all records of a written segment, in order."""
    return np.fromfile(directory / f"{name}.index", "<i8").reshape(-1, 2)[:, 1].tobytes()


class Segment:
    """Random access to a written segment."""

    def __init__(self, directory: Path, name: str, count: int) -> None:
        self.path = directory / f"{name}.records"
        self._fd = os.open(self.path, os.O_RDONLY)
        shape = (count, 2)
        self._index = np.memmap(directory / f"{name}.index", "<i8", "r", shape=shape) if count else np.empty(shape)

    def read(self, index: int) -> Tokenised:
        """Raises DataError when the bytes are not those that were written."""
        start = int(self._index[index - 1, 0]) if index else 0
        end, digest = (int(number) for number in self._index[index])
        encoded = os.pread(self._fd, end - start, start)
        if len(encoded) != end - start or _digest(encoded) != digest:
            raise DataError(f"{self.path} is damaged at byte {start}. Remove {self.path.parent}; it is made anew.")
        return msgspec.msgpack.decode(encoded, type=Tokenised)

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """The operating system's refusals become DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path} ({error}). Free space, or set data.cache_dir elsewhere.") from error


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & _INT64_MAX
