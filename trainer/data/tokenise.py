"""Raw records to tokenised ones: what becomes of one unit of a source, the processes, and the files that they write.

NAME.records    the records end to end, msgpack
NAME.index      int64 [n, 3], little-endian: where record i ends, its 64-bit digest, its number in its file, from 1

A unit becomes a pair of files of its own, which `Writer.take` appends to the pair of the whole. Nothing but the index
of the whole is mapped; a record is read and checked when it is asked for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import xxhash

from trainer.config import FileData
from trainer.data.answers import AnswerLog
from trainer.data.formats import NAME, Arrow, Bad, Csv, Format, Jsonl, Parquet, Unit, WebDataset
from trainer.data.parse import BadRecord, Needs, Parser, Tokenised
from trainer.data.storage import explained, is_remote
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.launch import die_with_parent

FORMATS: dict[str, Format] = {
    "jsonl": Jsonl(),
    "csv": Csv(),
    "parquet": Parquet(),
    "arrow": Arrow(),
    "webdataset": WebDataset(),
    "answers": AnswerLog(),
}
NAMED = 20  # bad records that are named; all are counted
ATTEMPTS, DELAY_S = 3, 1.0  # for stores that are reached over a network
SMALL_BYTES = 1 << 22  # not worth the start of a process
_ROW = struct.Struct("<3q")
_INT64_MAX = (1 << 63) - 1


class Done(msgspec.Struct, frozen=True):
    """The result of a unit. `places` counts its lines or rows; `bad` are the first few, each with its number."""

    records: int
    tokens: int
    places: int
    bad_records: int
    too_long: int
    bad: list[tuple[int, Bad]]


def tokenise(
    units: Sequence[Unit], size: int, config: FileData, tokenizer: Tokenizer, needs: Needs, directory: Path
) -> Iterator[Done]:
    """Write part i (see `part_name`) from unit i, for all units, on as many processes as the configuration and the work
    ask for; the result of each, in the units' order. Raises DataError for the first unit that cannot be read; closing
    the iterator ends the processes."""
    names = [part_name(number) for number in range(len(units))]
    count = min(config.workers or len(os.sched_getaffinity(0)), len(units))
    if count <= 1 or (size < SMALL_BYTES and config.workers == 0):
        yield from map(Worker(config, tokenizer, needs, directory), names, units)
        return
    context, done = multiprocessing.get_context("spawn"), 0
    stop = context.RawValue("b", 0)
    pool = ProcessPoolExecutor(count, context, _begin, (config, tokenizer, needs, directory, stop))
    # All workers are there before the pool's thread looks after them. Else one that dies while another is being started
    # leaves that one behind, and the thread waits for it for ever.
    pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]
    try:
        for result in pool.map(_in_process, names, units):
            yield result
            done += 1
    except BrokenProcessPool:
        # A process that is being started can miss the pool's SIGTERM: between fork and exec the handler of this process
        # takes it, and exec drops it. The pool would wait for it for ever.
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise DataError(
            f"a worker that tokenised {units[done].url}, or a part behind it, died; what it printed says why. "
            "If it was killed for memory, lower data.workers."
        ) from None
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


def part_name(number: int) -> str:
    return f"{number:06d}"


_worker: Worker | None = None  # of this process, if it is one of the pool's


def _begin(config: FileData, tokenizer: Tokenizer, needs: Needs, directory: Path, stop: Any) -> None:
    global _worker
    die_with_parent()
    os.dup2(2, 1)  # the metrics may go to the standard output, and libraries print there
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(config, tokenizer, needs, directory, stop)


def _in_process(name: str, unit: Unit) -> Done:
    assert _worker is not None
    return _worker(name, unit)


class Worker:
    """Tokenises units in this process, until `stop.value` is set."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs, directory: Path, stop: Any = None) -> None:
        self._config, self._directory, self._stop = config, directory, stop
        self._parse, self._format = Parser(config, tokenizer, needs), FORMATS[config.kind]

    def __call__(self, name: str, unit: Unit) -> Done:
        """Tries again after what may pass. Raises DataError when the unit cannot be read."""
        attempts = ATTEMPTS if is_remote(unit.url) else 1
        for attempt in range(1, attempts + 1):
            try:
                with explained(unit.url):
                    return self._part(name, unit)
            except DataError:
                if attempt == attempts:
                    raise
                time.sleep(DELAY_S * attempt)
        raise AssertionError("unreachable")

    def _part(self, name: str, unit: Unit) -> Done:
        bad: list[tuple[int, Bad]] = []
        places = bad_records = too_long = 0
        with Writer(self._directory, name) as part:
            for raw in self._format.read(unit, self._config):
                place = places + 1
                places += raw.count if isinstance(raw, Bad) else 1
                if raw is None:
                    continue
                found = raw if isinstance(raw, Bad) else None
                try:
                    records = [] if found else self._parse(raw)
                    too_long += not (found or records)
                    for record in records:
                        part.append(record, place)
                except OverflowError:
                    found = Bad("it keeps an integer of more than 64 bits: write it as a text")
                except BadRecord as error:
                    found = Bad(str(error), name=raw.get(NAME, "") if isinstance(raw, dict) else "")
                if found:
                    bad_records += found.count
                    bad += [(place, found)] if len(bad) < NAMED else []
                if bad_records > self._config.max_bad or (self._stop is not None and self._stop.value):
                    break  # the run ends anyway
        return Done(part.count, part.tokens, places, bad_records, too_long, bad)


class Writer:
    """Writes a pair of files. Use as a context. Raises DataError when the disk refuses."""

    def __init__(self, directory: Path, name: str) -> None:
        self.count = self.size = self.tokens = 0
        self._path = directory / f"{name}.records"
        with writing(self._path):
            self._records = self._path.open("wb")
            self._index = self._path.with_suffix(".index").open("wb")

    def append(self, record: Tokenised, place: int) -> None:
        """`place` is the record's number in its unit."""
        encoded = msgspec.msgpack.encode(record)
        self.count, self.size, self.tokens = self.count + 1, self.size + len(encoded), self.tokens + record.tokens
        with writing(self._path):
            self._records.write(encoded)
            self._index.write(_ROW.pack(self.size, _digest(encoded), place))

    def take(self, name: str, places: int) -> None:
        """Moves the records of a part behind these; `places` is how many lines or rows its file has before the part."""
        part = self._path.with_name(f"{name}.records")
        index = np.fromfile(part.with_suffix(".index"), "<i8").reshape(-1, 3) + np.array([self.size, 0, places])
        with writing(self._path):
            with part.open("rb") as records:
                shutil.copyfileobj(records, self._records, 1 << 20)
            self._index.write(index.tobytes())
            self.count, self.size = self.count + len(index), self.size + part.stat().st_size
            part.unlink()
            part.with_suffix(".index").unlink()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        with writing(self._path), self._records, self._index:
            pass


class Records:
    """Random access to the records of a written pair of files."""

    def __init__(self, directory: Path, name: str, count: int) -> None:
        self._path = directory / f"{name}.records"
        self._records = self._path.open("rb", buffering=0)  # closed with this object
        index, shape = self._path.with_suffix(".index"), (count, 3)
        self._index = np.memmap(index, "<i8", "r", shape=shape) if count else np.empty(shape, "<i8")

    def read(self, index: int) -> Tokenised:
        """Raises DataError when the bytes are not those that were written."""
        start = int(self._index[index - 1, 0]) if index else 0
        end, digest, _ = (int(number) for number in self._index[index])
        encoded = os.pread(self._records.fileno(), end - start, start)
        if len(encoded) != end - start or _digest(encoded) != digest:
            raise DataError(f"{self._path} is damaged at byte {start}. Remove {self._path.parent}; it is made anew.")
        return msgspec.msgpack.decode(encoded, type=Tokenised)

    def place(self, index: int) -> int:
        """The number of a record's line or row in its file, from 1."""
        return int(self._index[index, 2])

    def digest(self, window: range) -> str:
        """Of some records in order: the same however their files were cut and wherever these are."""
        return xxhash.xxh3_128_hexdigest(self._index[window.start : window.stop, 1].tobytes())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path} ({error}). Free space, or set data.cache_dir elsewhere.") from error


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & _INT64_MAX
