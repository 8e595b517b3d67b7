"""Log lines that never hold up an answer, and the access log: one for every request, or for a share of them.

    text    2026-01-31 12:00:00,123 INFO hotswap.access: route=/v1/completions status=200 ...
    json    {"time":"2026-01-31T12:00:00.123Z","level":"INFO","logger":"hotswap.access","route":...}

A bounded queue takes the lines, and a thread writes them to stderr. When whoever reads stderr is too slow, lines are
dropped and counted; requests go on. Requests that failed always have a line.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar, TypeVar

import orjson

from server.gateway.observe.stats import Finished
from server.gateway.wire.head import RequestHead

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ACCESS = "hotswap.access"
T = TypeVar("T")


FLUSH_S = 2.0


class Backlog(ABC):
    """`put` never waits: a record that finds the queue full is dropped and counted. The thread takes batches.

    The standard library's `QueueListener` and OpenTelemetry's `BatchSpanProcessor` take records one by one, and what is
    made of them must be made before; here the thread makes it, and wakes up a few times a second.
    """

    most: ClassVar[int]
    batch: ClassVar[int]
    interval_s: ClassVar[float]

    def __init__(self, name: str) -> None:
        self.dropped = 0
        self._queue: deque[tuple[Any, Callable[[Any], Any]]] = deque()
        self._wake = threading.Event()
        self._stopping = self._working = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, record: T, make: Callable[[T], Any]) -> None:
        """Takes a record of which `make` makes what is sent, later and on the thread."""
        waiting = len(self._queue)
        if waiting >= self.most:
            self.dropped += 1
            return
        self._queue.append((record, make))
        if waiting == self.most // 4:
            self._wake.set()

    def flush(self) -> None:
        """Waits, for a moment, until what is waiting now is sent."""
        self._wake.set()
        deadline = time.monotonic() + FLUSH_S
        while (self._queue or self._working) and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        """Sends what is waiting, for a moment; then whatever is left is lost."""
        self._stopping = True
        self._wake.set()
        self._thread.join(FLUSH_S)

    @abstractmethod
    def _send(self, batch: list[tuple[Any, Callable[[Any], Any]]]) -> None:
        """Sends what is made of these records. It raises nothing: that would end the thread."""

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self.interval_s)
            self._wake.clear()
            self._empty()
        self._empty()

    def _empty(self) -> None:
        while self._queue:
            self._working = True
            self._send([self._queue.popleft() for _ in range(min(self.batch, len(self._queue)))])
            self._working = False


class LineWriter(Backlog):
    """Writes lines to a file descriptor, in the order they came."""

    most = 10_000
    batch = 64
    interval_s = 0.1

    def __init__(self, fd: int) -> None:
        self._fd = fd
        super().__init__("log")

    def _send(self, batch: list[tuple[Any, Callable[[Any], bytes]]]) -> None:
        data = b"".join(_made(record, line) for record, line in batch)
        with contextlib.suppress(OSError):  # nobody reads any more
            while data:
                data = data[os.write(self._fd, data) :]


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


class AccessLog:
    """Writes lines about requests (stats.Watcher). `share` of 0 to 1; answers of 500 and above are not left out."""

    def __init__(self, writer: LineWriter, share: float, log_format: str) -> None:
        self._writer = writer
        self._share = share
        self._line = json_line if log_format == "json" else text_line

    def begin(self, head: RequestHead) -> None:
        """Nothing is told before the end."""

    def end(self, finished: Finished) -> None:
        """The line goes to the writer, which makes it on its own thread."""
        if self._share >= 1.0 or finished.status >= 500 or random.random() < self._share:  # noqa: S311 - no secret
            self._writer.put(finished, self._line)


def fields(finished: Finished) -> dict[str, Any]:
    """The fields of a line; those without a value are left out."""
    found: dict[str, Any] = {
        "request_id": finished.request_id,
        "method": finished.method,
        "route": finished.route,
        "status": finished.status,
        "code": finished.code,
        "key": finished.key,
        "model": finished.model or None,
        "instance": finished.instance,
        "weight_version_first": finished.first_version,
        "weight_version_last": finished.last_version,
        "duration_s": round(finished.duration_s, 6),
        "queue_s": round(finished.queued_s, 6),
        "ttft_s": None if finished.ttft_s is None else round(finished.ttft_s, 6),
        "stream": finished.streamed,
        "bytes_in": finished.bytes_in,
        "bytes_out": finished.bytes_out,
    }
    if finished.usage is not None:
        found["prompt_tokens"] = finished.usage.prompt_tokens if finished.usage.exact else None
        found["completion_tokens"] = finished.usage.completion_tokens
        found["tokens_exact"] = finished.usage.exact
    if finished.trace is not None:
        found["trace_id"] = f"{finished.trace.trace_id:032x}"
        found["span_id"] = f"{finished.trace.span_id:016x}"
    return {name: value for name, value in found.items() if value is not None}


def json_line(finished: Finished) -> bytes:
    """The line as JSON."""
    message = f"{finished.method} {finished.route} {finished.status}"
    head = {"time": iso(finished.ended), "level": "INFO", "logger": ACCESS, "message": message}
    return orjson.dumps(head | fields(finished))


def text_line(finished: Finished) -> bytes:
    """The line as words; names of keys are quoted, for they may hold anything."""
    told = " ".join(f"{name}={_word(value)}" for name, value in fields(finished).items())
    return f"{iso(finished.ended)} INFO {ACCESS}: {told}".encode()


def _word(value: Any) -> str:
    if isinstance(value, str) and not value.replace("/", "").replace("-", "").replace("_", "").isalnum():
        return orjson.dumps(value).decode()
    return str(value)
