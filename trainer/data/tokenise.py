"""One unit of a source to one segment of the cache: what a worker does, its messages, and what a segment is.

A worker is `python -m trainer.data.tokenise`; after a first line (Setup) it reads JSON lines saying what to do (Task),
writes the segment and answers each with one JSON line (Done, or Failed). It ends with its input, or with its parent.

A segment is two files: tokenised records, and their places.

    NAME.records    the records end to end, msgpack
    NAME.index      int64 [n, 2], little-endian: where record i ends, and its 64-bit digest

Nothing but the index of the segments in use is mapped; a record is read and checked when it is asked for.
"""

from __future__ import annotations

import array
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from trainer.config import AnswersData, FileData, JsonlData, ParquetData, WebDatasetData, strict
from trainer.data.answers import AnswerLog
from trainer.data.formats import Bad, Format, Jsonl, Parquet, Unit, WebDataset
from trainer.data.parse import BadRecord, Needs, Parser, Tokenised, TooLong
from trainer.data.storage import explained, is_remote
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

NAMED = 20  # bad records that are named; all are counted
ATTEMPTS, DELAY_S = 3, 1.0  # for stores that are reached over a network


_KINDS: dict[str, tuple[type[FileData], Format]] = {
    "jsonl": (JsonlData, Jsonl()),
    "parquet": (ParquetData, Parquet()),
    "webdataset": (WebDatasetData, WebDataset()),
    "answers": (AnswersData, AnswerLog()),
}
_INT64_MAX = (1 << 63) - 1


class Setup(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    model: str
    template: str | None
    given: dict[str, Any]
    directory: str
    kind: Literal["jsonl", "parquet", "webdataset", "answers"]
    config: dict[str, Any]
    needs: Needs


class Task(msgspec.Struct, frozen=True, tag=True):
    """Tokenise a unit into the segment `name`."""

    name: str
    unit: Unit


class Done(msgspec.Struct, frozen=True, tag=True):
    """The result of a unit. `places` counts its lines, for naming those of the next unit; `bad` are the first few."""

    records: int
    size: int
    tokens: int
    places: int
    bad_records: int
    too_long: int
    bad: list[Bad]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The unit cannot be read at all; the message says what to do."""

    message: str


def format_of(kind: str) -> Format:
    """The format of the files that a config entry of this kind names."""
    return _KINDS[kind][1]


class Worker:
    """Tokenises units in this process."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._parse, self._format = Parser(config, tokenizer, needs), format_of(config.kind)

    def __call__(self, task: Task) -> Done:
        """Tries again after what may pass. Raises DataError when the unit cannot be read."""
        attempts = ATTEMPTS if is_remote(task.unit.url) else 1
        for attempt in range(1, attempts + 1):
            try:
                with explained(task.unit.url):
                    return self._segment(task)
            except DataError:
                if attempt == attempts:
                    raise
                time.sleep(DELAY_S * attempt)
        raise AssertionError("unreachable")

    def _segment(self, task: Task) -> Done:
        bad: list[Bad] = []
        places = bad_records = too_long = 0
        with SegmentWriter(self._directory, task.name) as segment:
            for raw in self._format.read(task.unit, self._config):
                places, found = places + 1, raw
                if raw is None:
                    continue
                if not isinstance(raw, Bad):
                    place, value = raw
                    try:
                        for record in self._parse(value):
                            segment.append(record)
                        continue
                    except TooLong:
                        too_long += 1
                        continue
                    except OverflowError:
                        found = Bad(place, "it keeps an integer of more than 64 bits: write it as a text")
                    except BadRecord as error:
                        found = Bad(place, str(error))
                assert isinstance(found, Bad)
                bad_records += found.count
                bad += [found] if len(bad) < NAMED else []
                if bad_records > self._config.max_bad:
                    break  # the run ends anyway
        return Done(segment.count, segment.size, segment.tokens, places, bad_records, too_long, bad)


def main() -> None:
    """The worker process."""
    from trainer.launch import die_with_parent

    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    config: FileData = strict.build(_KINDS[setup.kind][0], setup.config)
    tokenizer = Tokenizer(setup.model, setup.template, setup.given)
    worker = Worker(config, tokenizer, setup.needs, Path(setup.directory))
    for line in sys.stdin.buffer:
        answer: Done | Failed
        try:
            answer = worker(msgspec.json.decode(line, type=Task))
        except DataError as error:
            answer = Failed(str(error))
        answers.write(msgspec.json.encode(answer) + b"\n")


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
    """The digests of all records of a written segment, in order."""
    return np.fromfile(directory / f"{name}.index", "<i8").reshape(-1, 2)[:, 1].tobytes()


class Segment:
    """Random access to a written segment."""

    def __init__(self, directory: Path, name: str, count: int) -> None:
        self.path = directory / f"{name}.records"
        self._records = self.path.open("rb", buffering=0)  # closed with this object
        shape = (count, 2)
        self._index = np.memmap(directory / f"{name}.index", "<i8", "r", shape=shape) if count else np.empty(shape)

    def read(self, index: int) -> Tokenised:
        """Raises DataError when the bytes are not those that were written."""
        start = int(self._index[index - 1, 0]) if index else 0
        end, digest = (int(number) for number in self._index[index])
        encoded = os.pread(self._records.fileno(), end - start, start)
        if len(encoded) != end - start or _digest(encoded) != digest:
            raise DataError(f"{self.path} is damaged at byte {start}. Remove {self.path.parent}; it is made anew.")
        return msgspec.msgpack.decode(encoded, type=Tokenised)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path} ({error}). Free space, or set data.cache_dir elsewhere.") from error


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & _INT64_MAX


if __name__ == "__main__":
    main()
