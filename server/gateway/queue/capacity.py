"""How many requests this gateway may have at one instance at a time.

The most is what the engine runs at once (`max_num_seqs`, which the instance says in its record) plus a little headroom,
so that a place that falls free is filled in the engine's next step and not after a round trip. Below that the window
follows vLLM's own figures at each scrape, additive increase and multiplicative decrease (Chiu and Jain, 1989):

    more wait inside than the headroom, or requests were preempted  ->  four fifths, of what is used of it; at least 1
    some wait inside                                                ->  a sixteenth of the most more
    none waits inside                                               ->  a quarter of the most more: there is room

Requests wait inside when the KV cache is full before `max_num_seqs` is reached, when one request asks for many samples,
or when other gateways send there too: all see the same figures, so their windows come to equal shares, and none has to
know of the others. A window that is not used is believed to be half as large at best (so does TCP, RFC 7661). An
instance that does not say what it can run gets `UNKNOWN` at most.
"""

from __future__ import annotations

import math
from typing import Final

from server.gateway.fleet.signals import Signals

UNKNOWN: Final = 1024
SHRINK: Final = 0.8
GROWTH, FAST_GROWTH = 16, 4  # steps from nothing to the most
HEADROOM: Final = 8  # one place ahead for so many that run


class Window:
    """`limit` is what may be in flight now; infinity where there is no limit."""

    __slots__ = ("_headroom", "_preemptions", "_size", "limit", "most")

    def __init__(self, max_num_seqs: int | None, configured: int | None) -> None:
        """`configured`: --max-in-flight, which overrides what the instance says; 0: no limit."""
        runs = configured if configured is not None else max_num_seqs
        self._headroom = -(-max_num_seqs // HEADROOM) if configured is None and max_num_seqs is not None else 0
        self.most: float = math.inf if runs == 0 else (runs or UNKNOWN) + self._headroom
        self.limit = self._size = self.most
        self._preemptions: float | None = None

    def adapt(self, signals: Signals, in_flight: int) -> None:
        """Takes in a scrape. `in_flight`: what this gateway has there now."""
        preempted = self._preemptions is not None and signals.num_preemptions > self._preemptions
        self._preemptions = signals.num_preemptions
        if self.most == math.inf:
            return
        if preempted or signals.num_requests_waiting > max(self._headroom, 1):
            self._size = max(1.0, min(self._size, max(in_flight, self._size / 2)) * SHRINK)
        else:
            steps = GROWTH if signals.num_requests_waiting else FAST_GROWTH
            self._size = min(self.most, self._size + max(1.0, self.most / steps))
        self.limit = math.floor(self._size)
