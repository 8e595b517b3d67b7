"""Files must stay the same while they are read.

Others write the files of a checkpoint. One that is replaced or written anew in the middle of a read gives tensors of
two versions, which no digest tells from weights of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

State = tuple[int, int, int, int] | None  # device, inode, bytes and time of the last change; None: it is not there


def states(paths: Iterable[Path]) -> dict[Path, State]:
    """The files as they are; take it before the first byte is read."""
    return {path: _state(path) for path in paths}


def changed(before: Mapping[Path, State]) -> Path | None:
    """The first file that is another one now, or was written since; ask when the last byte was read."""
    return next((path for path, state in before.items() if _state(path) != state), None)


def _state(path: Path) -> State:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
