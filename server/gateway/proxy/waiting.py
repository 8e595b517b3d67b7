"""Requests that no instance can take for the moment: held here until the fleet changes, their time is up, or the client
leaves. A change wakes all of them, in the order they came; who is still not served goes on waiting for what is left.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from server.errors import HttpError, Unavailable

RETRY_S: Final = 0.5  # for who was turned away by an instance that looked well: the view may not change again


class Waiter(Protocol):
    """A request that waits."""

    started: float

    def wake(self) -> None:
        """Tries again; whether it has to wait on is its own affair."""
        ...


@dataclass(frozen=True)
class Patience:
    """How long a request is held, counted from its beginning, and the answer after that.

    `kind`: "fleet" if there is nobody to ask, "version" if nobody runs the version asked for.
    """

    kind: Literal["fleet", "version"]
    seconds: float
    error: HttpError


class WaitingRoom:
    """At most `limit` requests of one gateway."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._timers: dict[Waiter, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def enter(self, waiter: Waiter, patience: Patience, *, soon: bool) -> None:
        """Holds `waiter` for what is left of its patience, or raises the error that goes with it.

        `soon`: it is worth another try before anything changes. Raises Unavailable when too many wait already.
        """
        left = waiter.started + patience.seconds - time.monotonic()
        if left <= 0:
            raise patience.error
        if len(self._timers) >= self._limit:
            raise Unavailable(f"{self._limit} requests wait for an instance already; try again.", code="overloaded")
        delay = min(left, RETRY_S) if soon else left
        self._timers[waiter] = asyncio.get_running_loop().call_later(delay, waiter.wake)

    def leave(self, waiter: Waiter) -> None:
        """It waits no longer, or is about to try again."""
        timer = self._timers.pop(waiter, None)
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        """The fleet has changed."""
        for waiter in list(self._timers):
            if waiter in self._timers:
                waiter.wake()
