"""One unit of a source to one segment of the cache: what a worker does, and its messages.

A worker is `python -m trainer.data.tokenise`; after a first line (Setup) it reads JSON lines saying what to do (Task),
writes the segment and answers each with one JSON line (Done, or Failed). It ends with its input, or with its parent.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainer.config import FileData, JsonlData, ParquetData, WebDatasetData, strict
from trainer.data.formats import Bad, Unit, format_of
from trainer.data.parse import BadRecord, Parser, TooLong
from trainer.data.segment import SegmentWriter
from trainer.data.storage import explained, is_remote
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

NAMED = 20  # bad records that are named; all are counted
ATTEMPTS, DELAY_S = 3, 1.0  # for stores that are reached over a network


_CONFIGS: dict[str, type[FileData]] = {"jsonl": JsonlData, "parquet": ParquetData, "webdataset": WebDatasetData}


class Setup(msgspec.Struct, frozen=True):
    """What a worker is told first."""

    model: str
    directory: str
    kind: Literal["jsonl", "parquet", "webdataset"]
    config: dict[str, Any]


class Task(msgspec.Struct, frozen=True, tag=True):
    """Tokenise a unit into the segment `name`."""

    name: str
    unit: Unit


class Done(msgspec.Struct, frozen=True, tag=True):
    """What a unit gave. `places` counts its lines, for naming those of the next unit; `bad` are the first few."""

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


class Worker:
    """Tokenises units in this process."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._parse, self._format = Parser(config, tokenizer), format_of(config.kind)

    def __call__(self, task: Task) -> Done:
        """Raises DataError when the unit cannot be read. What may pass is tried again."""
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
                        segment.append(self._parse(value))
                        continue
                    except TooLong:
                        too_long += 1
                        continue
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
    config: FileData = strict.build(_CONFIGS[setup.kind], setup.config)
    worker = Worker(config, Tokenizer(setup.model), Path(setup.directory))
    for line in sys.stdin.buffer:
        answer: Done | Failed
        try:
            answer = worker(msgspec.json.decode(line, type=Task))
        except DataError as error:
            answer = Failed(str(error))
        answers.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
