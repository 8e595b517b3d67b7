"""What counts against the promise: wrong tokens, mixed answers, and failures that are not typed, or not to be repeated.

The failure contract lets a gateway that dies take its connections along: a connection that breaks while the gateway
at its other end, or that one's host, is the one that was broken is counted and held against nobody.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.chaos.schedule import LINK

# Repeating the request is right. docs/api.md says of each when it is sent; version_unavailable names the version to ask
# for instead.
RETRYABLE = frozenset(
    {
        "bad_upstream", "deadline_unmet", "instance_unreachable", "leaving", "no_instance",
        "not_answering", "overloaded", "queue_full", "queue_timeout", "store_unavailable", "upstream_died",
        "upstream_timeout", "version_unavailable", "version_wait_timeout", "weights_changed",
    }
)  # fmt: skip
AFTER_S = 5.0  # a connection may be noticed to be dead so long after its gateway is well again
Judgement = Literal["answered", "refused", "gateway's", "untyped", "not retryable", "cut"]
VIOLATIONS: tuple[Judgement, ...] = ("untyped", "not retryable", "cut")


@dataclass(frozen=True)
class Window:
    """A gateway (by its host) could not be counted on from `began` to `ended`, monotonic seconds."""

    host: int
    began: float
    ended: float


@dataclass
class Verdict:
    """All attempts, judged. `silence_s`: the longest time in which no answer was completed; `longest_s`: the longest
    that a question took, with its repetitions."""

    judged: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    silence_s: float = 0.0
    longest_s: float = 0.0

    @property
    def violations(self) -> int:
        return sum(self.problems.values()) + sum(self.judged[kind] for kind in VIOLATIONS)


def breaks_gateways(what: str) -> bool:
    """Whether a fault of that may end a gateway's connections to clients."""
    return what in ("gateway", LINK)


def judge(attempt: Mapping[str, Any], windows: Iterable[Window]) -> Judgement:
    """What one attempt (a line of loadtest.chaos.attempts) counts as."""
    if attempt["outcome"] in ("answered", "untyped"):
        found: Judgement = attempt["outcome"]
        return found
    if attempt["outcome"] == "refused":
        return "refused" if _repeatable(attempt) else "not retryable"
    lost = any(w.host == attempt["gateway"] and overlaps(w, attempt) for w in windows)
    return "gateway's" if lost else "cut"


def _repeatable(attempt: Mapping[str, Any]) -> bool:
    return attempt["retry_after"] is not None or attempt["code"] in RETRYABLE


def overlaps(window: Window, attempt: Mapping[str, Any]) -> bool:
    """Whether an attempt fell, even in part, into a window or into the seconds in which its end is noticed."""
    return bool(attempt["began"] <= window.ended + AFTER_S and attempt["ended"] >= window.began)


def verdict(attempts: Sequence[Mapping[str, Any]], windows: Sequence[Window], began: float, ended: float) -> Verdict:
    """Of a whole run, from `began` to `ended` (monotonic seconds)."""
    found = Verdict()
    for attempt in attempts:
        judgement = judge(attempt, windows)
        found.judged[judgement] += 1
        if judgement != "answered":
            found.refusals[attempt["code"] or f"status {attempt['status']}"] += 1
        for kind, _ in attempt["problems"]:
            found.problems[kind] += 1
        if attempt["problems"] or judgement in VIOLATIONS:
            found.examples.append(f"{judgement}: {dict(attempt)}")
        _add(found.totals, attempt)
    found.longest_s = max((a["ended"] - a["asked"] for a in attempts), default=0.0)
    answered = sorted(a["ended"] for a in attempts if a["outcome"] == "answered" and began < a["ended"] < ended)
    edges = [began, *answered, ended]
    found.silence_s = max(after - before for before, after in itertools.pairwise(edges))
    return found


def _add(totals: Counter[str], attempt: Mapping[str, Any]) -> None:
    answered = attempt["outcome"] == "answered"
    totals["tokens checked"] += attempt["tokens"]
    totals["answers"] += answered
    totals["answers that crossed a swap"] += answered and attempt["crossed"]
    totals["answers bound to one version"] += answered and (attempt["policy"] in ("finish", "abort"))
    totals["streams that another instance went on with"] += answered and bool(attempt["resumed"])
    totals["answers to a repeated question"] += answered and attempt["asked"] < attempt["began"] - 0.05
