"""When a receiver leaves a holder that has had nothing new for a while, so that another can be tried in its place."""

from __future__ import annotations

from collections.abc import Collection

LOOKS, MOST_LOOKS = 5, 20  # times in a row that a holder has nothing before it is left


class Patience:
    """Of one receiver. It doubles with each holder that is left, until something comes."""

    def __init__(self) -> None:
        self._idle: dict[str, int] = {}
        self._limit = LOOKS

    def saw(self, host: str, *, offers: bool, grows: bool = True) -> None:
        """What an open holder answered: whether it has anything that is missing here, and may get more."""
        self._idle[host] = 0 if offers else self._idle.get(host, 0) + (1 if grows else MOST_LOOKS)

    def came(self) -> None:
        """A chunk."""
        self._limit = LOOKS

    def forget(self, host: str) -> None:
        """It is open no more."""
        self._idle.pop(host, None)

    def exhausted(self, reading: Collection[str]) -> str | None:
        """The holder to leave now, none of those that are being read from."""
        found = next((h for h, looks in self._idle.items() if looks >= self._limit and h not in reading), None)
        if found is not None:
            self._limit = min(2 * self._limit, MOST_LOOKS)
        return found
