"""Who is busy with a thing that may be closed at any moment by another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Closed(Exception):
    """The thing was closed; the caller says it in its own words."""


class Uses:
    """Uses of a region, link or transport. `close` ends those in flight and returns when the last one is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._enders: dict[object, Callable[[], None]] = {}
        self._closed = False

    @contextlib.contextmanager
    def use(self, end: Callable[[], None]) -> Iterator[None]:
        """Inside, the thing is there. Another thread calls `end` to make the inside end soon. Raises Closed."""
        key = object()
        with self._changed:
            if self._closed:
                raise Closed
            self._enders[key] = end
        try:
            yield
        finally:
            with self._changed:
                del self._enders[key]
                self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Nobody can begin a use any more, and all have ended. Twice is fine."""
        with self._changed:
            self._closed = True
            enders = list(self._enders.values())
        for end in enders:
            end()
        with self._changed:
            self._changed.wait_for(lambda: not self._enders)
