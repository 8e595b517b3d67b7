"""Figures of load under a target: goodput, shares, and how fair they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.serving.arrivals import CUT, Seen


@dataclass(frozen=True)
class Target:
    """The limits of a good answer, in seconds: to its first token, and on average between its other tokens."""

    first_s: float
    gap_s: float

    def met_by(self, seen: Seen) -> bool:
        return seen.status == 200 and (seen.first or 0.0) <= self.first_s and (seen.gap or 0.0) <= self.gap_s


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that a share `q` of them does not exceed; None of no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe, 1984)."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def figures(seen: Sequence[Seen], seconds: float, target: Target) -> dict[str, Any]:
    """Of requests that came within `seconds`. Rates per second of these; times in milliseconds, of complete answers."""
    done = [s for s in seen if s.status == 200]
    good = [s for s in done if target.met_by(s)]
    found: dict[str, Any] = {
        "offered_per_s": len(seen) / seconds,
        "completed_per_s": len(done) / seconds,
        "goodput_per_s": len(good) / seconds,
        "good_of_offered": len(good) / max(1, len(seen)),
        "good_tokens_per_s": sum(s.tokens for s in good) / seconds,
        "tokens_per_s": sum(s.tokens for s in done) / seconds,
        "refused": {str(c): n for c in (429, 503, 504) if (n := sum(s.status == c for s in seen))},
        "unfinished": sum(s.status == CUT for s in seen),
        "failed": sum(s.status not in (200, 429, 503, 504, CUT) for s in seen),
    }
    for name, values in (("first_token_ms", [s.first for s in done]), ("gap_ms", [s.gap for s in done])):
        for q in (0.5, 0.99):
            value = quantile([v for v in values if v is not None], q)
            found[f"{name}_p{q * 100:.0f}"] = None if value is None else value * 1e3
    return found
