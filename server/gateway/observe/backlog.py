"""A bounded queue and the thread that empties it, so that log lines and spans hold up no answer."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

FLUSH_S = 2.0
T = TypeVar("T")


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
