"""Faults, when they come, and what they must not cost."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.chaos.models import ADAPTERS, ALIASES, FIRST_TOKEN, Placement, base_of, flawed, is_adapter
from weightsync.control.editions import split_name

Kind = Literal["kill", "freeze", "cut", "loss", "join", "configure", "restore"]
ALONE = frozenset({"configure", "restore"})  # they begin on a fleet that is whole, and take long
ETCD = "etcd"
SHARED = ("gateway", ETCD)
OF_A_MODEL = ("instance", "engine", "peer")
PUBLISHER = "publisher"
LINK = "link"
JOINER = "joiner"
JOINS = 4  # in a deck
FREEZE_S, CUT_S, LOSS_S = (2.0, 12.0), (3.0, 15.0), (5.0, 15.0)
STALE_S = (2.0, 8.0)  # what a snapshot of the store is behind when it is restored
STAYS_S = (5.0, 25.0)  # what a joiner serves before it is told to leave
LOSS = (0.02, 0.15)
PAUSE_S = (2.0, 8.0)
STARTS_S = (5.0, 60.0)  # the pause of what comes beside a joiner: while it starts, serves or leaves
OVERLAPPING, BESIDE_JOINER = 0.2, 0.6


@dataclass(frozen=True)
class Fault:
    """`what` (of `model`, unless all share it) on `host` is broken for `seconds` (0: it is killed), `pause_s` after the
    fleet was whole again; or an instance joins there, serves for `seconds` and leaves; or the publisher of `model`
    publishes another configuration (configure); or the store goes back by `seconds` (restore).

    `overlaps`: it comes while the fleet is not whole yet after the fault before. `loss` is a share of frames.
    """

    kind: Kind
    what: str
    host: int
    seconds: float
    pause_s: float
    overlaps: bool = False
    loss: float = 0.0
    model: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.what}"

    @property
    def process(self) -> str:
        """The name of the process that it is about; an engine is part of its instance."""
        return process_name("instance" if self.what == "engine" else self.what, self.host, self.model)


def process_name(what: str, host: int, model: str = "") -> str:
    return f"{model}-{what}-{host}" if model else f"{what}-{host}"


def schedule(seed: int, hosts: int, models: Sequence[Placement]) -> Iterator[Fault]:
    """Faults without end."""
    chance, before = random.Random(seed), ""
    while True:
        deck = _deck(hosts, models)
        chance.shuffle(deck)
        for kind, what, host, model in deck:
            yield _drawn(chance, kind, what, host, model, beside_joiner=before == "join")
            before = kind


def _deck(hosts: int, models: Sequence[Placement]) -> list[tuple[Kind, str, int, str]]:
    places = [(what, host, "") for what in SHARED for host in range(hosts)]
    for placed in models:
        places += [(what, host, placed.model) for what in OF_A_MODEL for host in placed.instances]
        places.append((PUBLISHER, placed.publisher, placed.model))
    broken: list[tuple[Kind, str, int, str]] = [(kind, *place) for kind in ("kill", "freeze") for place in places]
    links: list[tuple[Kind, str, int, str]] = [
        (kind, LINK, host, "") for kind in ("cut", "loss") for host in range(hosts)
    ]
    joins = [(host, placed.model) for placed in models for host in placed.joins]
    turns: list[tuple[Kind, str, int, str]] = [
        ("join", JOINER, *joins[n % len(joins)]) for n in range(JOINS if joins else 0)
    ]
    others: list[tuple[Kind, str, int, str]] = [("configure", PUBLISHER, p.publisher, p.model) for p in models]
    return [*broken, *links, *turns, *others, ("restore", ETCD, 0, "")]


def _drawn(chance: random.Random, kind: Kind, what: str, host: int, model: str, *, beside_joiner: bool) -> Fault:
    """All chances are drawn for every fault, so that a change of one range does not move the rest."""
    seconds = {bounds: chance.uniform(*bounds) for bounds in (FREEZE_S, CUT_S, LOSS_S, STAYS_S, STALE_S)}
    loss, pause_s, late_s = chance.uniform(*LOSS), chance.uniform(*PAUSE_S), chance.uniform(*STARTS_S)
    overlaps = chance.random() < (BESIDE_JOINER if beside_joiner else OVERLAPPING) and kind not in ALONE
    ranges = {"freeze": FREEZE_S, "cut": CUT_S, "loss": LOSS_S, "join": STAYS_S, "restore": STALE_S}
    bounds = ranges.get(kind)
    lasts = seconds[bounds] if bounds is not None else 0.0
    pause_s = late_s if beside_joiner and overlaps else pause_s
    return Fault(kind, what, host, lasts, pause_s, overlaps, loss if kind == "loss" else 0.0, model)


# Repeating the request is right. docs/api.md says of each when it is sent; version_unavailable names the version to ask
# for instead.
RETRYABLE = frozenset(
    {
        "bad_upstream", "deadline_unmet", "instance_unreachable", "leaving", "no_instance",
        "not_answering", "overloaded", "queue_full", "queue_timeout", "store_unavailable", "upstream_died",
        "upstream_timeout", "version_unavailable", "version_wait_timeout", "weights_changed",
    }
)  # fmt: skip
SILENT_S = 120.0  # no request may take longer, whatever is broken
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
    """All attempts, judged; `models` counts what each model has answered. `silence_s`: the longest time in which no
    answer was completed; `longest_s`: the longest that a question took, with its repetitions."""

    judged: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    models: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in FIRST_TOKEN})
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
    """The judgement of one attempt (a line of loadtest.chaos.clients)."""
    if attempt["outcome"] in ("answered", "untyped"):
        found: Judgement = attempt["outcome"]
        return found
    if attempt["outcome"] == "refused":
        return "refused" if _repeatable(attempt) else "not retryable"
    lost = any(w.host == attempt["gateway"] and overlaps(w, attempt) for w in windows)
    return "gateway's" if lost else "cut"


def _repeatable(attempt: Mapping[str, Any]) -> bool:
    gone = attempt["status"] == 404 and is_adapter(attempt["model"])  # withdrawn, or the version does not have it
    return gone or _flawed(attempt) or attempt["retry_after"] is not None or attempt["code"] in RETRYABLE


def _flawed(attempt: Mapping[str, Any]) -> bool:
    """Whether a request was refused as its edition must be, whose number the message has."""
    named = re.search(r"The adapter (\S+) cannot be served", attempt["message"])
    number = split_name(named[1])[1] if named is not None else None
    return attempt["code"] == "not_finite" and number is not None and flawed(number)


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
        silent = ["silent"] if attempt["ended"] - attempt["began"] > SILENT_S else []
        problems = [*(kind for kind, _ in attempt["problems"]), *silent]
        found.problems.update(problems)
        if problems or judgement in VIOLATIONS:
            found.examples.append(f"{judgement}: {dict(attempt)}")
        _add(found.totals, attempt)
        if (model := base_of(attempt["by"] or "")) in found.models:
            _add_of(found.models[model], attempt)
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
    totals["answers through an adapter"] += answered and attempt["model"] in ADAPTERS
    of_edition = is_adapter(attempt["model"]) and attempt["model"] not in ADAPTERS
    totals["answers through an edition"] += answered and of_edition
    totals["of these by its number"] += answered and of_edition and split_name(attempt["model"])[1] is not None
    totals["refusals of an edition that is not finite"] += not answered and _flawed(attempt)
    totals["answers to a request for an alias"] += answered and attempt["model"] in ALIASES
    totals["of these by its second model"] += answered and _fell_back(attempt)


def _fell_back(attempt: Mapping[str, Any]) -> bool:
    return attempt["model"] in ALIASES and attempt["by"] != ALIASES[attempt["model"]][0]


def _add_of(counted: Counter[str], attempt: Mapping[str, Any]) -> None:
    counted["answers"] += attempt["outcome"] == "answered"
    counted["tokens checked"] += attempt["tokens"]
    counted["crossed a swap"] += attempt["crossed"]
    for kind, _ in attempt["problems"]:
        counted[kind] += 1
