"""What a fork server of test_forks.py imports, slowly, and what it forks: `python -m tests.server.up.forked CODE`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def prepare() -> None:
    """Waits for a file `go` beside the log."""
    go = Path(os.readlink("/proc/self/fd/1")).with_name("go")
    while not go.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    exec(sys.argv[1])
