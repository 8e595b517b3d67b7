"""A slow import for a fork server of test_forks.py, and what it forks: `python -m tests.server.up.forked CODE`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def prepare() -> None:
    """Waits for a file `go` beside the log."""
    _wait_for("go")


def prepare_slow_forks() -> None:
    """Each fork waits for a file `go` beside the log, before it is anything."""
    os.register_at_fork(after_in_child=lambda: _wait_for("go"))


def _wait_for(name: str) -> None:
    path = Path(os.readlink("/proc/self/fd/1")).with_name(name)
    while not path.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    exec(sys.argv[1])
