"""Small files that are there whole or not at all, whenever the process that writes them is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write or replace `path` (0600). Raises OSError."""
    with _written_beside(path, text) as made:
        os.replace(made, path)
    _sync_directory(path.parent)


def write_new_file(path: Path, text: str) -> None:
    """Write `path` (0600). Raises FileExistsError, and leaves what is there; OSError."""
    with _written_beside(path, text) as made:
        os.link(made, path)
    _sync_directory(path.parent)


@contextlib.contextmanager
def _written_beside(path: Path, text: str) -> Iterator[Path]:
    """A file of its own in the same directory, on the disk; a killed writer leaves at most that."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        yield made
    finally:
        made.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
