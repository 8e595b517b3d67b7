"""Digests, and bytes that are on the disk when a call returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from trainer.errors import CheckpointError

Listing = dict[str, tuple[int, str]]
"""File name -> (bytes, xxh3-128 digest)."""


def digest(file: Path) -> str:
    """xxh3-128 of a file's bytes, as hexadecimal."""
    running = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            running.update(block)
    return running.hexdigest()


def describe(file: Path) -> tuple[int, str]:
    """(bytes, digest) of a file."""
    return file.stat().st_size, digest(file)


def problem_with(file: Path, size: int, expected: str) -> str:
    """What is wrong with a file that should have `size` bytes and this digest; empty when nothing is."""
    if not file.exists():
        return f"{file} is missing."
    if file.stat().st_size != size:
        return f"{file} has {file.stat().st_size} bytes instead of {size}."
    return "" if digest(file) == expected else f"{file} has changed since it was written."


def flush(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_flushed(path: Path, text: str) -> None:
    path.write_text(text)
    flush(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """The operating system's refusals become CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({error}). Free space, or set checkpoint.path elsewhere."
        ) from error
