"""WebDataset shards: tar files in which neighbours with the same name up to its first dot are one sample
(https://github.com/webdataset/webdataset). A unit is a shard; nothing is unpacked onto the disk."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

import orjson

from trainer.config import FileData
from trainer.data.formats.base import LARGEST_BYTES, Bad, Raw, Unit
from trainer.data.storage import File, opened

JSON, TEXT = "json", {"txt": "prompt"}


class WebDataset:
    """Places are the samples' names."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        return [Unit(file.url)]

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        name = ""
        try:
            for name, parts in _samples(unit.url):
                yield _record(name, parts)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            yield Bad(f"after sample {name!r}", f"the shard is damaged ({error}); the rest of it is left out")


def _samples(url: str) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """(name, contents by extension); None for content that is too large."""
    name: str | None = None
    parts: dict[str, bytes | None] = {}
    with opened(url) as stream:
        tail: Any = _Tail(stream)
        shard = tarfile.open(fileobj=tail, mode="r|")  # noqa: SIM115 - it holds nothing but the stream
        for member in shard:
            prefix, dot, extension = _split(member.name)
            if not member.isfile() or not dot or not prefix.rsplit("/", 1)[-1]:
                continue
            if prefix != name and parts:
                yield name or "", parts
                parts = {}
            name = prefix
            content = shard.extractfile(member)
            assert content is not None  # it is a file
            parts[extension.lower()] = None if member.size > LARGEST_BYTES else content.read()
        if tail.last.strip(b"\0"):
            raise EOFError("it has no end mark, so it was cut short")
    if parts:
        yield name or "", parts


class _Tail:
    """A stream that remembers its last block: tarfile takes the end of a file for the end of an archive."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.last = stream, b""

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self.last = data[-tarfile.BLOCKSIZE :] or self.last
        return data


def _split(path: str) -> tuple[str, str, str]:
    folder, slash, file = path.rpartition("/")
    stem, dot, extension = file.partition(".")
    return folder + slash + stem, dot, extension


def _record(name: str, parts: dict[str, bytes | None]) -> Raw:
    place, record = f"sample {name!r}", dict[str, Any]()
    for extension, content in parts.items():
        if content is None:
            return Bad(place, f".{extension} is larger than {LARGEST_BYTES} bytes")
        try:
            if extension == JSON:
                value = orjson.loads(content)
                record |= value if isinstance(value, dict) else {JSON: value}
            elif extension.endswith(f".{JSON}"):
                record[extension.removesuffix(f".{JSON}")] = orjson.loads(content)
            else:
                record[TEXT.get(extension, extension)] = content.decode()
        except ValueError as error:
            if extension == JSON or extension.endswith(f".{JSON}"):
                return Bad(place, f".{extension} is not JSON ({error})")
            # Another's file, an image say: no text, and not asked for.
    return place, record
