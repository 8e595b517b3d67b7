"""Inter-token gaps: percentiles, and the longest ones in given windows of time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Arrivals = Sequence[Sequence[float | None]]
Window = tuple[float, float]


@dataclass(frozen=True)
class Gaps:
    """`ends` and `lengths` in seconds, one per gap, all streams together."""

    ends: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, arrivals: Arrivals) -> Gaps:
        """Gaps between consecutive tokens of one answer; `None` marks where an answer begins."""
        ends: list[float] = []
        lengths: list[float] = []
        for stream in arrivals:
            for before, after in itertools.pairwise(stream):
                if before is not None and after is not None:
                    ends.append(after)
                    lengths.append(after - before)
        return cls(np.array(ends), np.array(lengths))

    def within(self, windows: Sequence[Window]) -> np.ndarray:
        """Lengths of the gaps that overlap any of the windows."""
        mask = np.zeros(len(self.ends), dtype=bool)
        for start, end in windows:
            mask |= (self.ends >= start) & (self.ends - self.lengths <= end)
        return self.lengths[mask]

    def longest(self, windows: Sequence[Window]) -> list[float]:
        """The longest gap in each window, seconds."""
        return [float(found.max()) for w in windows if len(found := self.within([w]))]

    def largest(self, window: Window, count: int) -> list[tuple[float, float]]:
        """The `count` longest gaps that end in the window: (seconds since the window began, milliseconds)."""
        inside = np.flatnonzero((self.ends >= window[0]) & (self.ends <= window[1]))
        chosen = inside[np.argsort(self.lengths[inside])[::-1][:count]]
        return [(float(self.ends[i] - window[0]), float(self.lengths[i] * 1e3)) for i in chosen]

    def tokens_per_s(self, windows: Sequence[Window]) -> float:
        """Tokens that arrived inside the windows, over their total length."""
        count = sum(int(((self.ends >= a) & (self.ends < b)).sum()) for a, b in windows)
        return count / sum(b - a for a, b in windows)


def summary(lengths: np.ndarray) -> dict[str, float]:
    """p50, p99 and max in milliseconds."""
    p50, p99 = np.percentile(lengths, [50, 99])
    return {"p50": p50 * 1e3, "p99": p99 * 1e3, "max": float(lengths.max()) * 1e3}
