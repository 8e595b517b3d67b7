"""What one key has used of one limit, in integers.

Per minute means in any 60 seconds, not in the minute of a clock and not as a bucket that fills: a window that slides by
the second. What is taken in a second leaves the window when 60 whole seconds have passed after it, so no 60 seconds,
wherever they begin, hold more than the limit; a token bucket of the same size lets twice as much pass in its first
minute. The price is 61 integers a limit.

`allotted` is what this gateway may use of `limit`, the rest being other gateways' (shares.py).
"""

from __future__ import annotations

from typing import Final

SLOTS: Final = 61  # the second that runs, and 60 before it


class Quota:
    """Units in use now. As it stands, for what is given back when a request ends: concurrency."""

    __slots__ = ("allotted", "asked", "elsewhere", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allotted = limit
        self.elsewhere = 0  # units other gateways reported to be in use
        self.asked = 0  # units asked for, granted or not, since it was last set to 0
        self.used = 0

    def advance(self, now: int) -> None:
        """Lets time pass, to `now` (monotonic seconds)."""

    def remaining(self) -> int:
        """What is left of the limit, in all gateways together."""
        return max(0, self.limit - self.used - self.elsewhere)


class Window(Quota):
    """Units taken in the last minute."""

    __slots__ = ("_slots", "now")

    def __init__(self, limit: int, now: int) -> None:
        super().__init__(limit)
        self._slots = [0] * SLOTS
        self.now = now

    def advance(self, now: int) -> None:
        slots = self._slots
        if now - self.now >= SLOTS:
            slots[:] = [0] * SLOTS
            self.used = 0
        else:
            for second in range(self.now + 1, now + 1):
                self.used -= slots[second % SLOTS]
                slots[second % SLOTS] = 0
        self.now = now

    def take(self, units: int) -> None:
        """Counts `units` in the second of the last `advance`."""
        self._slots[self.now % SLOTS] += units
        self.used += units

    def correct(self, taken_at: int, units: int) -> None:
        """`units` more than was taken in the second `taken_at` were used, which counts now; or, below 0, fewer."""
        if units >= 0:
            self.take(units)
        elif self.now - taken_at < SLOTS:
            self._slots[taken_at % SLOTS] += units
            self.used += units

    def seconds_until(self, units: int) -> int:
        """Until `units` of those in use have left the window; the full length of it if there are not so many."""
        for second in range(self.now - SLOTS + 1, self.now + 1):
            units -= self._slots[second % SLOTS]
            if units <= 0:
                return second + SLOTS - self.now
        return SLOTS

    def seconds_until_unused(self) -> int:
        """Until all have left it; 0 if nothing is in use."""
        if not self.used:
            return 0
        for second in range(self.now, self.now - SLOTS, -1):
            if self._slots[second % SLOTS]:
                return second + SLOTS - self.now
        return 0
