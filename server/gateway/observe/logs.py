"""Log lines that never hold up an answer: a bounded queue, and a thread that writes them to stderr.

    text    2026-01-31 12:00:00,123 INFO hotswap.access: route=/v1/completions status=200 ...
    json    {"time":"2026-01-31T12:00:00.123Z","level":"INFO","logger":"hotswap.access","route":...}

When whoever reads stderr is too slow, lines are dropped and counted; requests go on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

import orjson

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
QUEUE = 10_000
INTERVAL_S = 0.1
FLUSH_S = 2.0
T = TypeVar("T")


class LineWriter:
    """Writes lines to a file descriptor, in the order they came. `dropped` counts those that found the queue full."""

    def __init__(self, fd: int) -> None:
        self.dropped = 0
        self._fd = fd
        self._queue: deque[tuple[Any, Callable[[Any], bytes]]] = deque()
        self._wake = threading.Event()
        self._stopping = self._writing = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, record: T, line: Callable[[T], bytes]) -> None:
        """Takes a record of which `line` makes a line later, on the thread."""
        if len(self._queue) >= QUEUE:
            self.dropped += 1
        else:
            self._queue.append((record, line))

    def flush(self) -> None:
        """Waits, for a moment, until what is waiting now is written."""
        self._wake.set()
        deadline = time.monotonic() + FLUSH_S
        while (self._queue or self._writing) and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        """Writes what is waiting, for a moment."""
        self._stopping = True
        self._wake.set()
        self._thread.join(FLUSH_S)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._empty()
        self._empty()

    def _empty(self) -> None:
        while self._queue:
            self._writing = True
            count = min(64, len(self._queue))
            data = b"".join(_made(*self._queue.popleft()) for _ in range(count))
            with contextlib.suppress(OSError):  # nobody reads any more
                while data:
                    data = data[os.write(self._fd, data) :]
            self._writing = False


def _made(record: T, line: Callable[[T], bytes]) -> bytes:
    try:
        return line(record) + b"\n"
    except Exception as exc:  # one line that cannot be made must not end the log
        return b"a log line could not be made: %b\n" % repr(exc).encode("utf-8", "replace")


def lines_dropped() -> int:
    """Lines of this process that were dropped."""
    return stderr().dropped if stderr.cache_info().currsize else 0


@cache
def stderr() -> LineWriter:
    """The one writer of this process."""
    writer = LineWriter(2)
    atexit.register(writer.close)
    return writer


class _Handler(logging.Handler):
    """Formats on the thread that logs, for arguments may change later; writing is the writer's."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stderr().put(self.format(record).encode("utf-8", "replace"), bytes)
        except Exception:
            self.handleError(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": iso(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def iso(unix_s: float) -> str:
    """RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(level: str, log_format: str) -> None:
    """Sends everything this process logs, uvicorn's lines too, to stderr as `log_format` ("text" or "json")."""
    handler = _Handler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
