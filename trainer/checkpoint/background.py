"""One thread that writes while training goes on. A thread, not a process: nothing is left behind by a killed rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """At most one job at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], T]) -> None:
        """Run `job` in the thread; the one before must have been taken."""
        assert self._thread is None, "take the last result first"
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> T | None:
        """The result of the job that has ended, once; None if there is none (yet, without `wait`). Raises what the job
        raised."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result

    def _run(self, job: Callable[[], T]) -> None:
        try:
            self._result = job()
        except Exception as error:
            self._error = error
