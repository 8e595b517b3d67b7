"""Releases by simulation: how often a version that does no harm is taken back, and how soon one that does harm.

Whole releases through the very judgement of the gateway (server/gateway/release/judge.py): two steps, three conditions
(errors, seconds until the first token, refusals), looked at again with every 20 answers of the candidate. The stable
version gets nine times as many answers. Beside it, what a test for one look at the same level would do there: Welch's t
of two means at each look, which is how a dashboard is read.

And how much evidence a harm of a given size takes: thumbs up fall by 5, 10, 20 points, and the policy allows one point.
Beside it, the answers that a test with a size fixed beforehand takes to find that harm in four of five releases. Such a
test may be looked at once, at its end.

And clients that differ, whose requests go through the gateway's own split and observer: the same weights twice, by 30,
300 and 3,000 keys; and candidates that kill their engine, hang until clients leave, or refuse, at one request in five.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.measure.run import with_machine
from server.gateway.access.keys import ANONYMOUS, Principal
from server.gateway.config import UpstreamSettings
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.routing import Need
from server.gateway.fleet.splits import Splits
from server.gateway.observe.stats import Finished
from server.gateway.release.evidence import Observer, Watched, summed
from server.gateway.release.judge import Evidence, rule
from server.gateway.release.policy import METRICS, Condition, Policy, Step
from server.gateway.release.statistics import LEAST, Tally
from server.gateway.wire.bodies import Usage
from server.gateway.wire.head import RequestHead
from weightsync.control.records import ActiveRecord, InstanceRecord, ShareRecord, SplitRecord

Means = Mapping[str, tuple[float, float]]  # of the stable version and of the candidate, by metric
EVERY, TIMES = 20, 9
Z = 1.645  # one-sided, 5 %
Z_POWER = 0.842  # four in five
WIDTH = 140

POLICY = Policy(
    steps=(Step(traffic=10, for_=60), Step(traffic=10, for_=60)),
    conditions=(
        Condition("errors", max_increase=0.02),
        Condition("first_token_s", max_increase="10%"),
        Condition("refusals", max_increase=0.05),
    ),
)
SAME: Means = {"errors": (0.01, 0.01), "first_token_s": (0.5, 0.5), "refusals": (0.05, 0.05)}
AT_THE_BOUND: Means = {"errors": (0.01, 0.03), "first_token_s": (0.5, 0.55), "refusals": (0.05, 0.10)}
SCENARIOS: dict[str, Means] = {
    "the same as the stable version": SAME,
    "every metric at its bound": AT_THE_BOUND,
    "errors 1 -> 8 %": {**SAME, "errors": (0.01, 0.08)},
    "errors 1 -> 20 %": {**SAME, "errors": (0.01, 0.20)},
    "first token 0.5 -> 0.7 s": {**SAME, "first_token_s": (0.5, 0.7)},
    "first token 0.5 -> 1 s": {**SAME, "first_token_s": (0.5, 1.0)},
    "refusals 5 -> 20 %": {**SAME, "refusals": (0.05, 0.20)},
    "refusals 5 -> 50 %": {**SAME, "refusals": (0.05, 0.50)},
}

BY_KEYS = Policy(
    steps=(Step(traffic=5, for_=60), Step(traffic=50, for_=60)),
    conditions=(
        Condition("errors", max_increase=0.01),
        Condition("refusals", max_increase=0.02),
        Condition("tokens", max_change="10%"),
    ),
)

Harmful = Literal["none", "kills", "hangs", "degrades"]  # what the candidate does to its engine, clients, answers
HARMED = 0.2
CLIENTS: tuple[tuple[str, int, Harmful], ...] = (
    ("none", 30, "none"), ("none", 300, "none"), ("key", 30, "none"), ("key", 300, "none"), ("key", 3000, "none"),
    ("none", 300, "kills"), ("none", 300, "hangs"), ("none", 300, "degrades"),
)  # fmt: skip

THUMBS = 0.7
WORSE_BY = (0.05, 0.10, 0.20)
ALLOWED = 0.01
CURVE = Policy(steps=(Step(traffic=10, for_=60),), conditions=(Condition("feedback", max_decrease=ALLOWED),))
ANSWERS_AT = (100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True)
class Found:
    """Of the releases of one scenario: the share that was taken back, the candidate's answers until then (median), and
    the share that a test for one look would have taken back."""

    scenario: str
    taken_back: float
    answers: float | None
    naive: float


@dataclass(frozen=True)
class Ended:
    """The ends of releases with unequal keys, as shares of them."""

    sticky: str
    keys: int
    harm: Harmful
    passed: float
    held: float
    taken_back: float


@dataclass(frozen=True)
class Harm:
    """How soon a share of thumbs up that falls by `worse_by` is found.

    `found_by`: the share of the releases taken back, by the candidate's answers until then. `median`: answers until
    half of them are; None if fewer ever are. `fixed`: answers that a test of a fixed size takes for four in five.
    """

    worse_by: float
    found_by: dict[int, float]
    median: float | None
    fixed: int


def run(
    json: Path | None, *, releases: int = 1000, answers: int = 2000, longest: int = ANSWERS_AT[-1], seed: int = 0
) -> tuple[list[Found], list[Harm], list[Ended]]:
    """Simulates, prints the tables, and writes the figures to `json`.

    `answers` of the candidate in each step, and at most `longest` where it is asked how many a harm takes.
    """
    found = [of_scenario(name, means, releases, answers, seed) for name, means in SCENARIOS.items()]
    show(found, releases, answers)
    harms = [of_harm(worse, releases, longest, seed) for worse in WORSE_BY]
    show_harms(harms, releases)
    # a tenth as many: each request goes through the split and the observer
    ended = [of_clients(*each, max(1, releases // 10), 2 * answers, seed) for each in CLIENTS]
    show_ended(ended, max(1, releases // 10), 2 * answers)
    about = {"releases": releases, "answers_in_a_step": answers, "false_alarms": POLICY.false_alarms, "seed": seed}
    tables = {"scenarios": [asdict(each) for each in found], "harms": [asdict(each) for each in harms]}
    with_machine({**about, **tables, "clients": [asdict(each) for each in ended]}, json)
    return found, harms, ended


def of_harm(worse: float, releases: int, longest: int, seed: int) -> Harm:
    rng = np.random.default_rng(seed)
    means = {"feedback": (THUMBS, THUMBS - worse)}
    ends = [release(CURVE, means, longest, rng)[0] or math.inf for _ in range(releases)]
    found_by = {at: sum(end <= at for end in ends) / releases for at in ANSWERS_AT if at <= longest}
    median = statistics.median(ends)
    return Harm(worse, found_by, median if median < math.inf else None, fixed_size(worse))


def fixed_size(worse: float) -> int:
    """Answers of the candidate, with TIMES as many of the stable version, that a one-sided test of two shares at the
    5 % level takes to find with a power of 80 % that it is worse by more than ALLOWED."""
    variances = [(THUMBS - by) * (1 - THUMBS + by) for by in (worse, 0.0)]
    return math.ceil((Z + Z_POWER) ** 2 * (variances[0] + variances[1] / TIMES) / (worse - ALLOWED) ** 2)


def of_scenario(name: str, means: Means, releases: int, answers: int, seed: int) -> Found:
    rng = np.random.default_rng(seed)
    ends = [release(POLICY, means, answers, rng) for _ in range(releases)]
    back = [end for end, _ in ends if end is not None]
    naive = sum(alarm for _, alarm in ends) / releases
    return Found(name, len(back) / releases, statistics.median(back) if back else None, naive)


@dataclass
class Asks:
    """A request, as a split sees it."""

    principal: Principal
    head: RequestHead
    need: Need | None = None
    share: int | None = None
    drawn: int | None = None
    cluster: int = -1
    lost: bool = False


def of_keys(policy: Policy, keys: int, requests: int, rng: np.random.Generator, harm: Harmful = "none") -> str:
    """The end of a release: "passed", "held" or "taken back". Without `harm` the candidate has the weights that
    serve already; with one, it does so to one request in five.

    Clients differ: how much each key asks, how often it is refused and how long its answers are spread lognormally.
    Requests are drawn by the gateway's own split, as the policy has them stick, and counted by its own observer.
    """
    stable, candidate = 1, int(rng.integers(2, 2**31))
    volume = np.exp(rng.normal(0, 1.2, keys))
    refused = np.minimum(0.6, 0.03 * np.exp(rng.normal(0, 1.0, keys)))
    tokens = 200 * np.exp(rng.normal(0, 0.7, keys))
    principals = [replace(ANONYMOUS, digest=rng.bytes(32)) for _ in range(keys)]
    head = RequestHead(b"", b"")
    serving = [
        Instance(InstanceRecord(f"i{v}", "http://127.0.0.1:9", "SERVING", v, 1), UpstreamSettings())
        for v in (1, candidate)
    ]
    sticky = "" if policy.sticky == "none" else policy.sticky
    for number, step in enumerate(policy.steps):
        observer, splits = Observer(), Splits()
        observer.watch(Watched("r", number, frozenset({stable, candidate})))
        split = SplitRecord((ShareRecord(candidate, step.traffic, (f"i{candidate}",)),), sticky)
        splits.follow(ActiveRecord(stable, 1, None, "s", 0.0, split=split), serving)
        by = rng.choice(keys, requests, p=volume / volume.sum())
        refusals, lengths = rng.random(requests) < refused[by], rng.normal(tokens[by], tokens[by] / 3)
        for count, key in enumerate(by, 1):
            request = Asks(principals[key], head)
            splits.need(request)
            hit = harm if request.drawn == candidate and rng.random() < HARMED else "none"
            observer.end(_ended(request, hit, stable, int(lengths[count - 1])))
            if hit in ("none", "degrades"):
                refused_it = float(refusals[count - 1] or hit == "degrades")
                observer.observe("refusals", refused_it, request.drawn, cluster=request.cluster)
            if count % (requests // 16):
                continue
            taken = observer.taken()
            evidence = summed([taken[1]] if taken else [], policy.of_step(number), candidate, stable)
            ruling = rule(policy, number, evidence, lasted_s=step.seconds if count == requests else 0.0)
            if ruling.kind == "rollback":
                return "taken back"
        if ruling.kind == "hold":
            return "held"
    return "passed"


def _ended(request: Asks, hit: Harmful, stable: int, tokens: int) -> Finished:
    """The gateway's record of a request. The engine that dies is noticed by no client: the stable version answers."""
    wrote = stable if hit == "kills" else None if hit == "hangs" else request.drawn
    usage = None if hit == "hangs" else Usage(1, max(1, tokens))
    return Finished(
        "r", "POST", "/v1/completions", 499 if hit == "hangs" else 200, None, "k", 0.0, 1.0, first_version=wrote,
        last_version=wrote, drawn_version=request.drawn, cluster=request.cluster, lost=hit == "kills", usage=usage,
    )  # fmt: skip


def of_clients(sticky: str, keys: int, harm: Harmful, releases: int, requests: int, seed: int) -> Ended:
    """So many releases of one kind."""
    rng, policy = np.random.default_rng(seed), msgspec.structs.replace(BY_KEYS, sticky=sticky)
    found = Counter(of_keys(policy, keys, requests, rng, harm) for _ in range(releases))
    return Ended(sticky, keys, harm, *(found[end] / releases for end in ("passed", "held", "taken back")))


def release(
    policy: Policy, means: Means, answers: int, rng: np.random.Generator, every: int = EVERY
) -> tuple[int | None, bool]:
    """After how many answers of the candidate it is taken back (None: it is not), and whether the other test would."""
    looks = range(every, answers + 1, every)
    ended: int | None = None
    naive = False
    for step in range(len(policy.steps)):
        sums = {
            metric: [_sums(metric, mean, n, rng) for mean, n in _counts(pair, answers)]
            for metric, pair in means.items()
        }
        for seen in looks:
            evidence = {
                metric: Evidence(_tally(new, seen), _tally(old, TIMES * seen)) for metric, (old, new) in sums.items()
            }
            naive = naive or any(_alarms(c, evidence[c.metric]) for c in policy.of_step(step) if c.metric in evidence)
            if ended is None and rule(policy, step, evidence, lasted_s=0.0).kind == "rollback":
                ended = step * answers + seen
            if ended is not None and naive:
                return ended, naive
    return ended, naive


def _counts(pair: tuple[float, float], answers: int) -> list[tuple[float, int]]:
    return [(pair[0], TIMES * answers), (pair[1], answers)]


def _sums(metric: str, mean: float, count: int, rng: np.random.Generator) -> Any:
    """Running sums of values and of their squares: of shares Bernoulli's, of seconds exponential ones."""
    values = (rng.random(count) < mean).astype(float) if METRICS[metric][0] else rng.exponential(mean, count)
    return np.cumsum(values), np.cumsum(values**2)


def _tally(sums: Any, count: int) -> Tally:
    return Tally(count, float(sums[0][count - 1]), float(sums[1][count - 1]))


def _alarms(condition: Condition, evidence: Evidence) -> bool:
    """Welch's t at one look, as if it were the only one."""
    new, old = evidence.candidate, evidence.stable
    if new.count < LEAST:
        return False
    _, value, share = condition.bound
    over = new.mean - old.mean - (value * old.mean if share else value)
    error = math.sqrt(new.variance / new.count + old.variance / old.count)
    return error > 0 and over / error > Z


def show(found: list[Found], releases: int, answers: int) -> None:
    """As a table."""
    title = f"{releases} releases each, {answers} answers of the candidate in each of two steps"
    table = Table("candidate", "taken back", "after answers (median)", "by a test for one look", title=title)
    for each in found:
        after = f"{each.answers:.0f}" if each.answers is not None else ""
        table.add_row(each.scenario, f"{each.taken_back:.1%}", after, f"{each.naive:.1%}")
    Console(width=WIDTH).print(table)


def show_ended(ended: list[Ended], releases: int, requests: int) -> None:
    """As a table."""
    title = f"{releases} releases each, {requests} requests of unequal keys in each of two steps"
    table = Table("sticky", "keys", "the candidate", "passed", "held", "taken back", title=title)
    for each in ended:
        table.add_row(
            each.sticky, str(each.keys), each.harm, f"{each.passed:.0%}", f"{each.held:.0%}", f"{each.taken_back:.0%}"
        )
    Console(width=WIDTH).print(table)


def show_harms(harms: list[Harm], releases: int) -> None:
    """As a table."""
    columns = [f"after {at}" for at in harms[0].found_by]
    title = f"{releases} releases each; taken back by then"
    table = Table("thumbs up fall by", *columns, "half are found after", "a test of fixed size", title=title)
    for each in harms:
        shares = [f"{share:.0%}" for share in each.found_by.values()]
        median = f"{each.median:.0f}" if each.median is not None else ""
        table.add_row(f"{each.worse_by * 100:.0f} points", *shares, median, str(each.fixed))
    Console(width=WIDTH).print(table)
