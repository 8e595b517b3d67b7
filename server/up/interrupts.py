"""Ctrl-C and SIGTERM as an exception that comes at a good moment: never while a process is being started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_holders = 0
_pending = False


class Interrupted(SystemExit):
    """Not KeyboardInterrupt: Python ends by SIGINT, whatever the exit status, if one was ever raised in code that an
    import compiled from a string."""


def install() -> None:
    """From now on both signals raise Interrupted in the main thread."""
    for number in NUMBERS:
        signal.signal(number, _handle)


def ignore() -> None:
    """From now on they do nothing: what cleans up must come to its end."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A signal that comes inside is raised at the end. For what starts processes; it must be short."""
    global _holders, _pending
    _holders += 1
    try:
        yield
    finally:
        _holders -= 1
    if _pending and not _holders:
        _pending = False
        raise Interrupted


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _pending
    if _holders:
        _pending = True
    else:
        raise Interrupted
