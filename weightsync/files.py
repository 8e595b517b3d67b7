"""Opens the files of a directory that others have filled: regular files only, and none from outside of it.

A FIFO would block its reader, a device never end, and a link could lead to any file of this host. Links inside the
directory are followed, and those of the Hugging Face hub's cache, whose snapshots/REVISION/ links to ../../blobs/.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weightsync.errors import CheckpointError


def open_inside(path: Path) -> int:
    """A descriptor of the regular file at `path`, for reading. Raises CheckpointError, never blocks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror}): fetch the checkpoint again") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(str(path), "is not a regular file: a checkpoint's files must be")
        real, home = Path(os.readlink(f"/proc/self/fd/{fd}")), path.parent.resolve()
        if not any(real.is_relative_to(allowed) for allowed in _allowed(home)):
            raise CheckpointError(str(path), "is a link out of its directory: put the file itself there")
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_inside(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes. Raises CheckpointError."""
    with open(open_inside(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(str(path), f"has over {most:,} bytes: is this the right file?")
    return data


def _allowed(home: Path) -> tuple[Path, ...]:
    if home.parent.name == "snapshots":
        return home, home.parent.parent / "blobs"
    return (home,)
