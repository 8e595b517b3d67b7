"""Swaps as this gateway sees them: how long their phases took and how long engines stood still; spans of them too.

Times are this process's: a phase lasts from the moment its record was seen here to the moment the next one was.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.gateway.observe.histogram import SECONDS, Histogram
from server.gateway.observe.tracing import Span
from weightsync.records import InstanceRecord, SwapRecord

if TYPE_CHECKING:
    from server.gateway.observe.otlp import SpanSender

PHASES = ("prepare", "canary", "commit")
ENDS = ("done", "aborted")
STALL = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Swaps:
    """Counts and times of swaps, from the records the fleet's view gets."""

    def __init__(self) -> None:
        self.ended = dict.fromkeys(ENDS, 0)
        self.duration = Histogram(SECONDS)
        self.phases = {phase: Histogram(SECONDS) for phase in PHASES}
        self.stall = Histogram(STALL)
        self._seen: list[tuple[str, float]] = []  # phases of the swap in flight and when they were seen, unix seconds
        self._sender: SpanSender | None = None
        self._leads: Callable[[], bool] = lambda: False

    def trace(self, sender: SpanSender, leads: Callable[[], bool]) -> None:
        """From now on swaps that end while `leads` are sent as spans: one gateway of several does so."""
        self._sender, self._leads = sender, leads

    def swap(self, before: SwapRecord | None, record: SwapRecord) -> None:
        """The swap record has changed. What was there when this process began is not counted."""
        if before is None or (before.id == record.id and before.phase == record.phase):
            return
        now = time.time()
        if before.id != record.id:
            self._seen = []
        elif self._seen and before.phase in self.phases:
            self.phases[before.phase].observe(max(0.0, now - self._seen[-1][1]))
        self._seen.append((record.phase, now))
        if record.phase in ENDS:
            self.ended[record.phase] += 1
            self.duration.observe(max(0.0, now - record.opened_at))
            if self._sender is not None and self._leads():
                self._sender.put((record, self._seen), _spans)
            self._seen = []

    def instance(self, before: InstanceRecord, after: InstanceRecord) -> None:
        """An instance's record has changed: with its epoch, it tells how long its engine stood still."""
        if after.active_epoch != before.active_epoch and after.commit_ms is not None:
            self.stall.observe(after.commit_ms / 1e3)


def _spans(ended: tuple[SwapRecord, list[tuple[str, float]]]) -> list[Span]:
    """The swap, and under it its phases."""
    record, seen = ended
    trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1
    about = {
        "hotswap.swap.id": record.id,
        "hotswap.weight_version": record.target,
        "hotswap.swap.mode": record.mode,
        "hotswap.swap.outcome": record.phase,
        "hotswap.swap.participants": list(record.participants),
    }
    failed = (record.reason or "aborted") if record.phase == "aborted" else None
    end = seen[-1][1]
    spans = [Span("swap", trace_id, span_id, 0, min(record.opened_at, end), end, about, failed, server=False)]
    for (phase, start), (_, until) in itertools.pairwise(seen):
        child = random.getrandbits(64) or 1
        spans.append(Span(f"swap {phase}", trace_id, child, span_id, start, until, {}, server=False))
    return spans
