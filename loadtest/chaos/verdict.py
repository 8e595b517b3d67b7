"""What breaks when, and what it must not cost."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["kill", "freeze", "cut", "loss"]
ON_EACH = ("instance", "engine", "peer", "gateway", "etcd")
PUBLISHER = "publisher"
LINK = "link"
FREEZE_S, CUT_S, LOSS_S = (2.0, 12.0), (3.0, 15.0), (5.0, 15.0)
LOSS = (0.02, 0.15)
PAUSE_S = (2.0, 8.0)
OVERLAPPING = 0.2


@dataclass(frozen=True)
class Fault:
    """`what` on `host` is broken for `seconds` (0: it is killed), `pause_s` after the fleet was whole again.

    `overlaps`: it comes while the fleet is not whole yet after the fault before. `loss` is a share of frames.
    """

    kind: Kind
    what: str
    host: int
    seconds: float
    pause_s: float
    overlaps: bool = False
    loss: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.what}"


def schedule(seed: int, hosts: int, publisher: int = 0) -> Iterator[Fault]:
    """Faults without end. `publisher`: the host where it runs."""
    chance = random.Random(seed)
    while True:
        deck = _deck(hosts, publisher)
        chance.shuffle(deck)
        for kind, what, host in deck:
            yield _drawn(chance, kind, what, host)


def _deck(hosts: int, publisher: int) -> list[tuple[Kind, str, int]]:
    places = [(what, host) for what in ON_EACH for host in range(hosts)] + [(PUBLISHER, publisher)]
    ends: list[tuple[Kind, str, int]] = [("kill", what, host) for what, host in places]
    stops: list[tuple[Kind, str, int]] = [("freeze", what, host) for what, host in places]
    links: list[tuple[Kind, str, int]] = [(kind, LINK, host) for host in range(hosts) for kind in ("cut", "loss")]
    return ends + stops + links


def _drawn(chance: random.Random, kind: Kind, what: str, host: int) -> Fault:
    """All chances are drawn for every fault, so that a change of one range does not move the rest."""
    seconds = {bounds: chance.uniform(*bounds) for bounds in (FREEZE_S, CUT_S, LOSS_S)}
    loss, pause_s, overlaps = chance.uniform(*LOSS), chance.uniform(*PAUSE_S), chance.random() < OVERLAPPING
    bounds = {"kill": None, "freeze": FREEZE_S, "cut": CUT_S, "loss": LOSS_S}[kind]
    lasts = seconds[bounds] if bounds is not None else 0.0
    return Fault(kind, what, host, lasts, pause_s, overlaps, loss if kind == "loss" else 0.0)


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
    """What one attempt (a line of loadtest.chaos.clients) counts as."""
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
