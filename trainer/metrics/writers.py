"""Writers of events: the interface, the file of JSON lines, and several at once."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import orjson

log = logging.getLogger(__name__)
BLOCK = 1 << 16


class MetricsWriter(Protocol):
    """Receives every event of a run, in order, on rank 0. A live display implements this."""

    def write(self, event: str, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends events to a file, or prints them for the path `-`. Each line is flushed. Half a line, left by a run that
    was killed while it wrote, is cut off: the next event would make it a line that is none."""

    def __init__(self, path: str) -> None:
        self._stream: TextIO = sys.stdout
        if path != "-":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(Path(path))
            self._stream = Path(path).open("a")  # noqa: SIM115 - closed in close()

    def write(self, event: str, values: dict[str, Any]) -> None:
        line = orjson.dumps(
            {"event": event, "time": round(time.time(), 3), **values}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        self._stream.write(line.decode() + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not sys.stdout:
            self._stream.close()


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():  # there is none yet, or it is a pipe
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        kept, block = end, b""
        while kept and b"\n" not in block:
            start = max(kept - BLOCK, 0)
            file.seek(start)
            block = file.read(kept - start)
            kept = start + block.rfind(b"\n") + 1  # of the block, nothing is kept if it has none
        if kept < end:
            file.truncate(kept)


class Tee:
    """Every event to several writers, in their order."""

    def __init__(self, *writers: MetricsWriter) -> None:
        self._writers = writers

    def write(self, event: str, values: dict[str, Any]) -> None:
        for writer in self._writers:
            writer.write(event, values)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class Spared:
    """A writer that training does not depend on: the first failure is logged, and it is left alone from then on."""

    def __init__(self, name: str, writer: MetricsWriter) -> None:
        self._name, self._writer, self._failed = name, writer, False

    def write(self, event: str, values: dict[str, Any]) -> None:
        self._try(lambda: self._writer.write(event, values))

    def close(self) -> None:
        self._try(self._writer.close)

    def _try(self, call: Any) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # a foreign library's: it may raise anything
            self._failed = True
            log.warning("%s takes no more metrics of this run (%r); training goes on", self._name, error)


def is_number(value: object) -> bool:
    """A finite int or float (a bool is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an event."""
    return {name: value for name, value in values.items() if is_number(value)}
