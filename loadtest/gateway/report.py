"""Medians and spread over the rounds, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtest.gateway.cancel import GIVE_UP_S, STATES
from loadtest.gateway.contenders import COPYING, FULL, ROUTER
from loadtest.gateway.measure import Figures

AGAINST = (  # what is measured, against whom, by which figure, and how many times theirs it must be
    ("requests per second of core, over vllm-router's", ROUTER, "requests_per_core_s", 1.6, False),
    ("CPU of a paced chunk, over vllm-router's", ROUTER, "cpu_us_per_chunk", 1.0, True),
    ("220 KB prompts a second, over vllm-router's", ROUTER, "large_requests_per_s", 2.0, False),
    ("latency added at one client, p50, over copying bytes", COPYING, "added_latency_us_p50", 1.2, True),
)


@dataclass
class Result:
    """All that was found of one contender; `failed` says why it is not measured."""

    version: str
    rounds: list[Figures] = field(default_factory=list)
    cancel_ms: dict[str, list[float | None]] = field(default_factory=dict)
    failed: str | None = None

    def median(self, name: str) -> float | None:
        values = [figures[name] for figures in self.rounds if name in figures]
        return statistics.median(values) if values else None

    def slowest_cancel(self, state: str) -> float | None:
        """The median in `state`; None where it was not seen within the time given, or not measured."""
        times = [GIVE_UP_S * 1e3 if t is None else t for t in self.cancel_ms.get(state, [])]
        found = statistics.median(times) if times else None
        return None if found is None or found >= GIVE_UP_S * 1e3 else found


@dataclass(frozen=True)
class Target:
    """A goal that the gateway with everything on must meet. `at_most`: else `wanted` is the least."""

    name: str
    wanted: float
    measured: float | None
    at_most: bool = True

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


def targets(results: Mapping[str, Result]) -> list[Target]:
    """Each target and what was measured; those against another contender only where it ran."""
    mine, found = results[FULL], []
    for name, other, figure, times, at_most in AGAINST:
        if other in results and results[other].rounds:
            ratio = _ratio(mine.median(figure), results[other].median(figure))
            found.append(Target(name, times, ratio, at_most=at_most))
    found += [
        Target("added us at one client, p99", 300, mine.median("added_latency_us_p99")),
        Target("RSS, MiB", 80, mine.median("rss_mb")),
    ]
    found += [Target(f"upstream closed, client left {state}, ms", 10, mine.slowest_cancel(state)) for state in STATES]
    return found


def as_json(results: Mapping[str, Result], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "machine": dict(machine),
        "targets": [
            {"name": t.name, "wanted": t.wanted, "at_most": t.at_most, "measured": t.measured, "met": t.met}
            for t in targets(results)
        ],
        "contenders": {name: _result_json(result) for name, result in results.items()},
    }


def _result_json(result: Result) -> dict[str, Any]:
    if result.failed is not None:
        return {"version": result.version, "failed": result.failed}
    names = sorted({name for figures in result.rounds for name in figures})
    values = {name: [f[name] for f in result.rounds if name in f] for name in names}
    spread = {n: {"median": statistics.median(v), "low": min(v), "high": max(v)} for n, v in values.items()}
    return {"version": result.version, "figures": spread, "cancel_ms": result.cancel_ms}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
