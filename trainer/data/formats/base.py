"""What a file format is: units that can be read apart, each giving raw records in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from trainer.config import FileData
from trainer.data.storage import File

UNIT_BYTES = 1 << 25  # of a file read by one worker at a time
LARGEST_BYTES = 1 << 26  # of one record


class Unit(msgspec.Struct, frozen=True):
    """A part of a file: bytes or row groups [start, end), end -1 being the end of the file."""

    url: str
    start: int = 0
    end: int = -1


class Bad(msgspec.Struct, frozen=True):
    """`count` records that cannot be read, at a place in the unit: a line number from 1, or words."""

    place: int | str
    reason: str
    count: int = 1


Raw = tuple[int | str, Any] | Bad | None  # a place and the record there; None for an empty line


class Format(Protocol):
    """Reading one kind of file. Raises DataError when a file cannot be read at all."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        """The parts, in order. They depend on the file alone, so that the records' order does too."""
        ...

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        """The records of a part, in order."""
        ...
