"""Waiting for what another task, thread or process does: ask again and again, and say what did not happen in time.

`await eventually(...)` on an event loop, `wait_until(...)` elsewhere. Both return what the condition returned. The
condition's own source stands for a text that is not given.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
What = str | Callable[[], object]  # a text, or what looks at a state when the time is over


async def eventually(
    condition: Callable[[], Awaitable[T | None] | T | None], timeout_s: float = 30.0, what: What = ""
) -> T:
    for pause_s in _pauses(timeout_s):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found  # type: ignore[return-value]  # no awaitable any more
        await asyncio.sleep(pause_s)
    raise AssertionError(_missed(condition, timeout_s, what))


async def stays(condition: Callable[[], object], for_s: float, what: What = "") -> None:
    """The condition holds for that long; for what must not happen, which nothing tells of."""
    for pause_s in _pauses(for_s):
        held = condition()
        if not (await held if inspect.isawaitable(held) else held):
            raise AssertionError(f"no longer: {_text(condition, what)}")
        await asyncio.sleep(pause_s)


async def stands_still(value: Callable[[], object], for_s: float, timeout_s: float = 120.0) -> None:
    """The value stays the same for that long, at last."""
    seen, since = value(), time.monotonic()

    def does() -> bool:
        nonlocal seen, since
        if (now := value()) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since >= for_s

    await eventually(does, timeout_s, lambda: f"it stands still: {seen}")


def wait_until(
    condition: Callable[[], T | None],
    timeout_s: float = 30.0,
    what: What = "",
    process: subprocess.Popen[Any] | None = None,
) -> T:
    """Fails at once when `process`, which is to bring it about, has ended without it."""
    for pause_s in _pauses(timeout_s):
        ended = process is not None and process.poll() is not None
        if found := condition():
            return found
        if ended:
            raise AssertionError(f"the process ended: {_missed(condition, timeout_s, what)}")
        time.sleep(pause_s)
    raise AssertionError(_missed(condition, timeout_s, what))


def comes_true(condition: Callable[[], object], timeout_s: float = 30.0) -> bool:
    """Whether it does in time; for what a test goes on without."""
    for pause_s in _pauses(timeout_s):
        if condition():
            return True
        time.sleep(pause_s)
    return False


def _pauses(timeout_s: float) -> Iterator[float]:
    """Short ones at first. After the last, which is none, the condition is asked once more."""
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while (left_s := end - time.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, 0.02)
    yield 0.0


def _missed(condition: Callable[[], object], timeout_s: float, what: What) -> str:
    return f"not within {timeout_s:g} s: {_text(condition, what)}"


def _text(condition: Callable[[], object], what: What) -> str:
    if callable(what):
        return str(what())
    try:
        return what or " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or yet to be collected, which may happen between two questions."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
