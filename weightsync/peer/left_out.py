"""Hosts that a fetch does not read from for a while, and when one of them is tried all the same."""

from __future__ import annotations

import time
from dataclasses import dataclass

BUSY_S, LOST_S, STALLED_S, WRONG_S = 2.0, 2.0, 30.0, 60.0  # how long a holder is left out
FIRST_TRY_S = 1.0  # after a stall, when nobody else has what is missing; then twice as long each time
MOST_DOUBLINGS = 16  # beyond STALLED_S by far; a fetch may go on for days


@dataclass
class _Out:
    until: float
    again_at: float
    stalls: int = 0


class LeftOut:
    """Of one slot, kept from fetch to fetch."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Out] = {}

    def leave(self, host: str, seconds: float) -> None:
        """Not before so many seconds, whatever is missing; nor sooner than it would have been before."""
        until, known = time.monotonic() + seconds, self._hosts.get(host) or _Out(0.0, 0.0)
        self._hosts[host] = _Out(max(until, known.until), max(until, known.again_at), known.stalls)

    def stalled(self, host: str) -> None:
        """It did not answer in time. It may be the only one that has a chunk, so it is tried again before long."""
        now, stalls = time.monotonic(), self._stalls(host)
        pause = min(FIRST_TRY_S * 2 ** min(stalls, MOST_DOUBLINGS), STALLED_S)
        self._hosts[host] = _Out(now + STALLED_S, now + pause, stalls + 1)

    def came(self, host: str) -> None:
        """It gave a chunk."""
        self._hosts.pop(host, None)

    def is_able(self, host: str, *, needed: bool) -> bool:
        """Whether to read from it; `needed`: nobody else has what is missing."""
        out, now = self._hosts.get(host), time.monotonic()
        return out is None or out.until <= now or (needed and out.again_at <= now)

    def _stalls(self, host: str) -> int:
        known = self._hosts.get(host)
        return known.stalls if known is not None else 0
