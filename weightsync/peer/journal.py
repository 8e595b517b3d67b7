"""What a fetch has done so far, in a small file beside its slot, so that the next process need not fetch it again.

The first line says what is fetched; a number on a line of its own, in ASCII, is a chunk that has arrived. A last line
that was cut short counts for nothing. Nothing here is trusted: chunks are digested again before they are used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from weightsync.peer.bitmap import Bitmap
from weightsync.peer.chunks import MAX_CHUNKS, Shape
from weightsync.peer.messages import Key

PREFIX = "fetch-"
LONGEST_LINE = len(str(MAX_CHUNKS))  # Python takes no number of thousands of digits


class _First(msgspec.Struct, frozen=True):
    model: str
    part: str
    digest: str
    delta_of: str
    nbytes: int
    chunk_nbytes: int
    digests: tuple[str, ...]


class Journal:
    """Of one file that is being fetched, or was. Chunks may be added from one thread at a time."""

    def __init__(self, path: Path, model: str, part: str, key: Key, shape: Shape, done: Bitmap) -> None:
        self.path, self.model, self.part, self.key, self.shape, self.done = path, model, part, key, shape, done

    @classmethod
    def begin(cls, slot: Path, model: str, part: str, key: Key, shape: Shape) -> Journal:
        """A new one for `slot`, in place of any that was there. Raises OSError."""
        journal = cls(_beside(slot), model, part, key, shape, Bitmap(shape.chunks))
        first = _First(model, part, key.digest, key.delta_of, shape.nbytes, shape.chunk_nbytes, shape.digests)
        fresh = journal.path.with_name(f".{journal.path.name}")
        fresh.write_bytes(msgspec.json.encode(first) + b"\n")
        fresh.replace(journal.path)
        return journal

    @classmethod
    def all_in(cls, directory: Path, model: str) -> Iterator[Journal]:
        """Those of a model that can be read."""
        for path in sorted(directory.glob(f"{PREFIX}*")):
            journal = cls._read(path)
            if journal is not None and journal.model == model:
                yield journal

    @classmethod
    def _read(cls, path: Path) -> Journal | None:
        try:
            head, *lines = path.read_bytes().split(b"\n")
            first = msgspec.json.decode(head, type=_First)
            shape = Shape(first.nbytes, first.chunk_nbytes, first.digests)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return None
        done = Bitmap(shape.chunks)
        for line in lines[:-1]:
            if line.isdigit() and len(line) <= LONGEST_LINE and int(line) < shape.chunks:
                done.add(int(line))
        return cls(path, first.model, first.part, Key(first.digest, first.delta_of), shape, done)

    @property
    def slot(self) -> Path:
        """The file it is about."""
        return self.path.with_name(self.path.name.removeprefix(PREFIX))

    def add(self, chunk: int) -> None:
        """Note a chunk that is there, and was checked. Raises OSError."""
        self.done.add(chunk)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d\n" % chunk)
        finally:
            os.close(fd)

    def keep(self, done: Bitmap) -> None:
        """Forget the chunks that are not in `done`. Raises OSError."""
        fresh = Journal.begin(self.slot, self.model, self.part, self.key, self.shape)
        for chunk in done:
            fresh.add(chunk)
        self.done = fresh.done

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _beside(slot: Path) -> Path:
    return slot.with_name(f"{PREFIX}{slot.name}")
