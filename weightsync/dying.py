"""Processes that end with the one that began them: a parent that was killed can end nothing, so the kernel does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # not after a fork, where no library should be opened


def die_with(parent: int, number: int = signal.SIGTERM) -> None:
    """Have this process sent the signal `number` when the process `parent`, which began it, has ended.

    If the parent has ended before this call, the process exits here. Linux only; elsewhere this does nothing.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(128 + number)


def with_me(number: int = signal.SIGTERM) -> Callable[[], None]:
    """`preexec_fn` of a subprocess.Popen: the child ends with this process."""
    return partial(die_with, os.getpid(), number)
