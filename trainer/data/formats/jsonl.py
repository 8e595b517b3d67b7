"""JSON lines. A unit is a range of bytes: the lines that begin in it. A compressed file is one unit."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from typing import Any

import orjson

from trainer.config import FileData
from trainer.data.formats.base import LARGEST_BYTES, UNIT_BYTES, Bad, Raw, Unit
from trainer.data.storage import File, opened

COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lzma", ".zip")


class Jsonl:
    """Places are line numbers, from 1 at the start of the unit."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        if file.url.endswith(COMPRESSED) or not file.seekable or file.size <= UNIT_BYTES:
            return [Unit(file.url)]
        return [Unit(file.url, start, start + UNIT_BYTES) for start in range(0, file.size, UNIT_BYTES)]

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        number = 0
        try:
            for number, line in enumerate(_lines(unit), 1):
                yield _parse(number, line) if line.strip() else None
        except (EOFError, zlib.error, LZMAError) as error:
            yield Bad(number + 1, f"the compressed file is damaged ({error}); the rest of it is left out")
        except OSError as error:
            if error.errno is not None or not unit.url.endswith(COMPRESSED):
                raise
            yield Bad(number + 1, f"the compressed file is damaged ({error}); the rest of it is left out")


def _parse(number: int, line: bytes) -> Raw:
    if len(line) > LARGEST_BYTES:
        return Bad(number, f"the line is longer than {LARGEST_BYTES} bytes")
    try:
        return number, orjson.loads(line)
    except ValueError as error:
        return Bad(number, f"it is not JSON ({error})")


def _lines(unit: Unit) -> Iterator[bytes]:
    # A line belongs to the unit in which it begins: the first starts after the first newline at or after start - 1.
    position = max(unit.start - 1, 0)
    whole = unit.end < 0
    with opened(unit.url, None if whole else position, decompress=unit.url.endswith(COMPRESSED)) as stream:
        stream = io.BufferedReader(stream, 1 << 16)  # fsspec's own readline has no limit
        if unit.start:
            position += sum(len(piece) for piece in _pieces(stream))
        while whole or position < unit.end:
            line = b""
            for piece in _pieces(stream):
                position += len(piece)
                if len(line) <= LARGEST_BYTES:  # of a longer one no more is kept than tells that it is
                    line += piece
            if not line:
                return
            yield line


def _pieces(stream: Any) -> Iterator[bytes]:
    """One line, in pieces of bounded size."""
    while piece := stream.readline(LARGEST_BYTES):
        yield piece
        if piece.endswith(b"\n"):
            return
