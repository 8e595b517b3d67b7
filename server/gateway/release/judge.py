"""The judgement of a step: what has been counted of both versions in, what becomes of the release out. Pure.

A condition is *harmed* once the interval of every mean that the evidence leaves over lies beyond its bound, *kept* once
it lies within, and *open* before. One that nobody can judge, for want of answers or of whoever scores them, is *blind*:
it holds the step, and never passes by silence.

If fewer of the requests that were drawn for one version ended with it than of the other's (`arrived`), what is left are
not samples that chance has drawn: the comparison is not valid (a sample ratio mismatch: A. Fabijan et al., "Diagnosing
sample ratio mismatch in online controlled experiments", KDD 2019), and the step is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from server.gateway.release.policy import TIMES, Condition, Policy, seconds_of
from server.gateway.release.statistics import LEAST, LEAST_CLUSTERS, NOTHING, Interval, Tally, bounded, unbounded

LOAD: Final = "load"  # the key of the evidence on how many requests an instance had at a time
COMPARABLE: Final = 1.5  # the factor between the loads of both versions within which their times are compared
INVALID: Final = "the comparison is not valid, as requests of one version were passed on: "
State = Literal["harmed", "kept", "open", "blind"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One metric of both versions. `lost` says why it is not measured, if it is not."""

    candidate: Tally = NOTHING
    stable: Tally = NOTHING
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one condition. `candidate` and `stable` are the intervals of the means."""

    condition: Condition
    state: State
    text: str
    candidate: Interval
    stable: Interval | None


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision on a release: the step goes on, is over, or waits for evidence; or the version goes."""

    kind: Literal["wait", "next", "hold", "rollback"]
    reason: str
    findings: tuple[Finding, ...]


def rule(policy: Policy, step: int, evidence: Mapping[str, Evidence], *, lasted_s: float) -> Ruling:
    """The judgement of step number `step` (from 0), which has lasted so long. `evidence` is by `key_of`."""
    findings = judged(policy, step, evidence)
    broken = [finding for finding in findings if finding.state == "harmed"]
    harmed = [finding.text for finding in broken if finding.condition.metric != "arrived"]
    if harmed:
        return Ruling("rollback", "; ".join(harmed), findings)
    over = policy.steps[step].seconds
    if lasted_s < over:
        return Ruling("wait", "", findings)
    missing = [INVALID + finding.text for finding in broken]
    missing += [f.text for f in findings if f.state == "blind" or (f.state == "open" and f.condition.prove)]
    if not missing:
        return Ruling("next", "", findings)
    reason = "; ".join(missing)
    if policy.on_hold == "rollback" and lasted_s >= over + seconds_of(policy.hold):
        return Ruling("rollback", f"held for {policy.hold} without evidence: {reason}", findings)
    return Ruling("hold", reason, findings)


def judged(policy: Policy, step: int, evidence: Mapping[str, Evidence]) -> tuple[Finding, ...]:
    """The findings on the conditions of a step."""
    each = (examine(c, evidence.get(key_of(c), Evidence()), policy.alpha) for c in policy.of_step(step))
    last = step == len(policy.steps) - 1
    return tuple(_at_load(finding, evidence.get(LOAD, Evidence()), last=last) for finding in each)


def _at_load(finding: Finding, load: Evidence, *, last: bool) -> Finding:
    """Times of two versions of which one has more to do show nothing, unless the one with less to do is slower. Another
    step may have equal loads; the last one must."""
    condition, c, s = finding.condition, load.candidate.mean, load.stable.mean
    if condition.metric not in TIMES or not condition.compares or not max(c, s) > COMPARABLE * min(c, s):
        return finding
    if finding.state == "harmed" and condition.bound[0] == "max_increase" and c < s:
        return finding
    text = (
        f"{condition}: an instance of the candidate had {c:.3g} requests at a time, one of the stable version {s:.3g}"
    )
    state: State = "blind" if last or condition.prove else "open"
    return replace(finding, state=state, text=f"{text}; times are compared where the loads are alike")


def key_of(condition: Condition) -> str:
    """Under which its evidence is found: the same metric of live answers is another than that of shadow answers."""
    return condition.metric if condition.answers == "both" else f"{condition.metric}@{condition.answers}"


def examine(condition: Condition, evidence: Evidence, alpha: float) -> Finding:
    """The state of one condition, wrong about harm at any look with probability `alpha` at most."""
    interval = bounded if condition.is_bounded else unbounded
    each = alpha / 2 if condition.compares else alpha
    candidate = interval(evidence.candidate, each)
    stable = interval(evidence.stable, each) if condition.compares else None
    state, text = _state(condition, evidence, candidate, stable)
    return Finding(condition, state, f"{condition}: {text}", candidate, stable)


def _state(condition: Condition, evidence: Evidence, candidate: Interval, stable: Interval | None) -> tuple[State, str]:
    least = condition.least if condition.is_bounded else max(condition.least, LEAST)
    known: Sequence[tuple[str, Tally]] = [("the candidate", evidence.candidate)]
    if stable is not None:
        known = [*known, ("the stable version", evidence.stable)]
    said = (
        ", ".join(f"{who} {tally.mean:.4g} of {tally.count}" for who, tally in known if tally.count) or "no answer yet"
    )
    low, high = _harm(condition, candidate, stable)
    if low > 0:
        return "harmed", f"{said}, which is over the bound with certainty enough"
    if evidence.lost:
        return "blind", evidence.lost
    for who, tally in known:
        if tally.count < least:
            return "blind", f"{tally.count} of {least} answers of {who}"
        if tally.clusters < LEAST_CLUSTERS <= tally.count and least:
            few = f"{tally.count} answers of {who} are those of {tally.clusters:.1f} values that requests stick by"
            return "blind", f"{few}; it takes {LEAST_CLUSTERS}"
    if high <= 0:
        return "kept", said
    return "open", f"{said}, which shows neither that it is kept nor that it is broken"


def _harm(condition: Condition, c: Interval, s: Interval | None) -> tuple[float, float]:
    """By how much the bound is exceeded, at least and at most; what is below 0 is within it."""
    name, value, share = condition.bound
    if name == "max":
        return c.low - value, c.high - value
    if name == "min":
        return value - c.high, value - c.low
    assert s is not None

    def slack(mean: float) -> float:
        return abs(mean) * value if share else value

    slackest, tightest = max(slack(s.low), slack(s.high)), min(slack(s.low), slack(s.high))
    if share and s.low <= 0 <= s.high:
        tightest = 0.0
    up = c.low - s.high - slackest, c.high - s.low - tightest
    down = s.low - c.high - slackest, s.high - c.low - tightest
    if name == "max_increase":
        return up
    if name == "max_decrease":
        return down
    return max(up[0], down[0]), max(up[1], down[1])
