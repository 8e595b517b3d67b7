"""Work in a fork of this process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from weightsync.dying import die_with


def fork(work: Callable[[], object]) -> int:
    """Returns the child's process id. The child does `work` and ends, with a traceback and status 1 if that raises.

    The child ends with this process.
    """
    us = os.getpid()
    if child := os.fork():
        return child
    status = 1
    die_with(us)
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
