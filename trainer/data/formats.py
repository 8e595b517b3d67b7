"""File formats, by the kind of the data set's config entry: JSON, CSV, Parquet, Arrow, WebDataset; answers.py has
another.

A format cuts a file into units that can be read apart, each giving raw records in order.

The library `datasets` resolves names on the hub (hub.py), but reads no file here: its builders give each column one
type, so that values become others, and one bad line costs them the file (tests/world/test_datasets.py).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import operator
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import PurePath
from typing import Any

import msgspec
import orjson

from trainer.config import FileData
from trainer.config.datasets import PROMPT
from trainer.data.conversation import TOOLS
from trainer.data.layouts import KEYS, MEDIA
from trainer.data.storage import File, opened
from trainer.errors import DataError

UNIT_BYTES = 1 << 25  # of a file read by one worker at a time
LARGEST_BYTES = 1 << 26  # of one record, and of an array of them
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lzma", ".zip")
BATCH_ROWS = 256
JSON, TEXT, NAME = "json", {"txt": "prompt"}, "__key__"
LEFT_OUT = "the rest of it is left out"
_PLACES = {"jsonl": "line", "answers": "line", "webdataset": "sample"}
_BEYOND = re.compile(rb"\d{19}|NaN|Infinity")  # what orjson rounds or refuses, and Python's json reads
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of it
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)", re.DOTALL)  # a sample's name, and the extension
_OTHERS = {  # by the first bytes of a file
    b"[": "it begins an array, and lines of one object each are wanted: end the file's name in .json, or convert the "
    "file with jq -c '.[]'",
    codecs.BOM_UTF16_LE: "it is UTF-16, and UTF-8 is wanted: convert the file with iconv",
    codecs.BOM_UTF16_BE: "it is UTF-16, and UTF-8 is wanted: convert the file with iconv",
    b"\x1f\x8b": "it is compressed: end the file's name in .gz",
    b"\x28\xb5\x2f\xfd": "it is compressed: end the file's name in .zst",
}


class Unit(msgspec.Struct, frozen=True):
    """A part of a file: bytes or row groups [start, end), end -1 being the end of the file."""

    url: str
    start: int = 0
    end: int = -1


class Bad(msgspec.Struct, frozen=True):
    """`count` records that cannot be read, with a name if the format gives records names."""

    reason: str
    count: int = 1
    name: str = ""


Raw = Any  # a record; Bad; or None, which counts for places alone: an empty line


def place(kind: str, url: str, number: int, bad: Bad | None = None) -> str:
    """The place of record `number` of a file, from 1, for messages; of as many as a bad one stands for."""
    word = "record" if _may_be_array(url) and kind == "jsonl" else _PLACES.get(kind, "row")
    several = f"{word}s {number} to {number + bad.count - 1}" if bad and bad.count > 1 else f"{word} {number}"
    return f"{url}, {several}{f' ({bad.name})' if bad and bad.name else ''}"


class Format:
    """Reading one kind of file. Raises DataError when a file cannot be read at all."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        """The parts, in order: the file whole, or several. They depend on the file alone, so that the records' order
        does too."""
        return [Unit(file.url)]

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        """The records of a part, in order."""
        raise NotImplementedError


class Jsonl(Format):
    """JSON lines. A unit is a range of bytes: the lines that begin in it. A compressed file is one unit, and so is one
    that is named `.json`, which may also be an array of records."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        one = file.url.endswith(COMPRESSED) or _may_be_array(file.url)
        if one or not file.seekable or file.size <= UNIT_BYTES:
            return super().units(file, config)
        return [Unit(file.url, start, start + UNIT_BYTES) for start in range(0, file.size, UNIT_BYTES)]

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        return _until_damaged(_json(unit), unit.url)


def _may_be_array(url: str) -> bool:
    return f".{JSON}" in PurePath(url).suffixes


def _json(unit: Unit) -> Iterator[Raw]:
    lines, first, may_be_array = _lines(unit), unit.start == 0, _may_be_array(unit.url)
    for line in lines:
        text = (line.removeprefix(codecs.BOM_UTF8) if first else line).strip()
        if first and may_be_array and text.startswith(b"["):
            yield from _array(line, lines)
        elif text:
            yield _parse(line, first)
        elif not may_be_array:  # records are counted there, not lines
            yield None
        first = first and not text


def _array(start: bytes, lines: Iterator[bytes]) -> list[Raw]:
    pieces, size = [start], len(start)
    for line in lines:
        size += len(line)
        if size <= LARGEST_BYTES:
            pieces.append(line)
    if size > LARGEST_BYTES:
        return [Bad(f"the array is longer than {LARGEST_BYTES} bytes: convert the file with jq -c '.[]'")]
    try:
        return [Bad("it is not an object") if value is None else value for value in parsed(b"".join(pieces))]
    except ValueError as error:
        return [Bad(f"it is not JSON ({error})")]


def _parse(line: bytes, first: bool) -> Raw:
    if len(line) > LARGEST_BYTES:
        return Bad(f"the line is longer than {LARGEST_BYTES} bytes")
    for start, reason in _OTHERS.items() if first else ():
        if line.startswith(start):
            return Bad(reason)
    try:
        value = parsed(line)
    except ValueError as error:
        return Bad(f"it is not JSON ({error})")
    return Bad("it is not an object") if value is None else value


def _until_damaged(records: Iterator[Raw], url: str) -> Iterator[Raw]:
    """The records of a file that may be compressed, and in place of those behind a damage one that is bad."""
    try:
        yield from records
    except (EOFError, zlib.error, LZMAError, OSError) as error:
        if not (_of_content(error) and url.endswith(COMPRESSED)):
            raise
        yield Bad(f"the compressed file is damaged ({error}); {LEFT_OUT}")


def _of_content(error: Exception) -> bool:
    """Whether the file is wrong, rather than the reading of it: OSError is raised for both."""
    return not isinstance(error, OSError) or (type(error) in (OSError, gzip.BadGzipFile) and error.errno is None)


def parsed(text: bytes) -> Any:
    """The value of a JSON text, behind a byte order mark or without, with integers of any size, and NaN where pandas
    wrote it. Raises ValueError."""
    text = text.removeprefix(codecs.BOM_UTF8)
    if not _BEYOND.search(text):
        return orjson.loads(text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
    return value


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


class Csv(Format):
    """CSV, and TSV by the file's name, below a line of names. Values are texts, an empty one is none. Files are
    read whole: only the beginning says which line breaks are quoted."""

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        return _until_damaged(_rows(unit.url), unit.url)


def _rows(url: str) -> Iterator[Raw]:
    csv.field_size_limit(LARGEST_BYTES)
    delimiter = "\t" if ".tsv" in PurePath(url).suffixes else ","
    with opened(url) as stream:
        buffered = io.BufferedReader(stream, 1 << 16)
        text = io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline="")  # a row is refused, not a block
        try:
            for row in csv.DictReader(text, delimiter=delimiter, strict=True):
                if None in row:
                    yield Bad("it has more values than the file has names")
                elif _NO_UTF8.search("".join(filter(None, (*row, *row.values())))):
                    yield Bad("it is not CSV in UTF-8: convert the file with iconv")
                else:
                    yield {name: value or None for name, value in row.items()}
        except csv.Error as error:
            yield Bad(f"it is not CSV in UTF-8 ({error}); {LEFT_OUT}")


class Parquet(Format):
    """Parquet. A unit is a range of row groups; only the columns that the configuration names are read."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        _check_seekable(file)
        with _parquet(file.url) as parquet:
            groups, units, start, size = parquet.metadata, [], 0, 0
            for number in range(groups.num_row_groups):
                size += groups.row_group(number).total_byte_size
                if size >= UNIT_BYTES or number + 1 == groups.num_row_groups:
                    units.append(Unit(file.url, start, number + 1))
                    start, size = number + 1, 0
        return units

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        import pyarrow as pa  # slow to import, and other formats need none of it

        with _parquet(unit.url) as parquet:
            columns = _columns(parquet.schema_arrow.names, config)
            for group in range(unit.start, unit.end):
                left = parquet.metadata.row_group(group).num_rows
                try:
                    for batch in parquet.iter_batches(BATCH_ROWS, [group], columns, use_threads=False):
                        for value in batch.to_pylist():
                            left -= 1
                            yield value
                except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                    if not _of_content(error):
                        raise
                    yield Bad(f"row group {group} is damaged ({error})", left)


@contextmanager
def _parquet(url: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(url, 0, decompress=False) as stream:
        try:
            parquet = pq.ParquetFile(stream)
        except (OSError, pa.ArrowException) as error:
            if not _of_content(error):
                raise
            raise DataError(f"{url} is not a Parquet file ({error}). Write it anew.") from None
        yield parquet


class Arrow(Format):
    """Arrow's formats for streams, which `datasets` writes, and for files. A unit is a file; of the columns those that
    the configuration names are taken."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        _check_seekable(file)
        return super().units(file, config)

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        import pyarrow as pa

        with opened(unit.url, 0, decompress=False) as stream:
            begun = False
            try:
                for batch in _batches(stream):
                    columns = _columns(batch.schema.names, config)
                    for start in range(0, batch.num_rows, BATCH_ROWS):
                        yield from batch.slice(start, BATCH_ROWS).select(columns).to_pylist()
                        begun = True
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                if not _of_content(error):
                    raise
                if not begun:
                    raise DataError(f"{unit.url} is not an Arrow file ({error}). Write it anew.") from None
                yield Bad(f"the file is damaged ({error}); {LEFT_OUT}")


def _batches(stream: Any) -> Iterator[Any]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_stream(stream)
    except pa.ArrowInvalid:
        stream.seek(0)
        file = pa.ipc.open_file(stream)
        return (file.get_batch(number) for number in range(file.num_record_batches))
    return iter(reader)


def _check_seekable(file: File) -> None:
    if not file.seekable:
        raise DataError(f"{file.url} is on a server without range requests, which its format needs. Copy it first.")


def _columns(names: list[str], config: FileData) -> list[str]:
    wanted = {config.prompt_key, config.target_key, config.answer_key, config.chosen_key, config.rejected_key}
    wanted |= {"extra", TOOLS, *KEYS, *config.extra_keys, *(MEDIA if config.prompt_key == PROMPT else ())}
    return [name for name in names if name in wanted or any(key.startswith(f"{name}.") for key in wanted)]


class WebDataset(Format):
    """WebDataset shards: tar files in which neighbours with the same name up to its first dot are one sample
    (https://github.com/webdataset/webdataset). Nothing is unpacked onto the disk. A record's name
    is its key `__key__`, as in the library of that name."""

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        last = ""
        try:
            for name, parts in itertools.groupby(_members(unit.url), operator.itemgetter(0)):
                yield _record(name, {extension: content for _, extension, content in parts})
                last = name
        except (tarfile.TarError, EOFError, zlib.error, LZMAError, OSError) as error:
            if not _of_content(error):
                raise
            yield Bad(f"the shard is damaged after {last!r} ({error}); {LEFT_OUT}")


def _members(url: str) -> Iterator[tuple[str, str, bytes | None]]:
    """(sample, extension, content) of each file; None for content that is too large."""
    with opened(url) as stream:
        tail: Any = _Tail(stream)
        shard = tarfile.open(fileobj=tail, mode="r|")  # noqa: SIM115 - it holds nothing but the stream
        for member in shard:
            content, named = shard.extractfile(member) if member.isfile() else None, _MEMBER.fullmatch(member.name)
            if content is not None and named is not None:
                yield named[1], named[2].lower(), None if member.size > LARGEST_BYTES else content.read()
        if tail.last.strip(b"\0"):
            raise EOFError("it has no end mark, so it was cut short")


class _Tail:
    """A stream that remembers its last block: tarfile takes the end of a file for the end of an archive."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.last = stream, b""

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self.last = data[-tarfile.BLOCKSIZE :] or self.last
        return data


def _record(name: str, parts: dict[str, bytes | None]) -> Raw:
    record: dict[str, Any] = {NAME: name}
    for extension, content in parts.items():
        is_json = extension.rpartition(".")[2] == JSON
        if content is None:
            return Bad(f".{extension} is larger than {LARGEST_BYTES} bytes", name=name)
        try:
            value = parsed(content) if is_json else content.decode()
        except ValueError as error:
            if is_json:
                return Bad(f".{extension} is not JSON ({error})", name=name)
            continue  # another's file, an image say: no text, and not asked for
        if extension == JSON and isinstance(value, dict):
            record |= value
        else:
            record[TEXT.get(extension, extension.removesuffix(f".{JSON}"))] = value
    return record
