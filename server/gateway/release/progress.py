"""A release as a pure state machine: its record and what there is in; the one next action out.

    evaluating  --the evaluation sets are passed (or there are none)--> applying
    applying    --the fleet has the step's split--> judging
    judging     --the step has lasted, no harm--> applying, the next step; after the last one finishing
    judging     --it has lasted, and something cannot be judged--> held --it can--> as from judging
    judging, held, evaluating, applying  --harm, or the split cannot be made--> rolling_back
    finishing   --the candidate is active, whole--> done
    rolling_back  --the stable version is active, whole--> rolled_back
    any         --somebody makes another version active, or another split--> cancelled

Each state says what is wanted, so whoever takes over reads the record and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from server.gateway.release import judge
from server.gateway.release.judge import Evidence, Finding
from server.gateway.release.policy import Policy
from server.gateway.release.records import ReleaseRecord, State

LOOK_S = 0.25  # between two looks at the evidence, where nothing else happens


@dataclass(frozen=True)
class Share:
    """Percent of the requests: that a version answers, and that are repeated on it."""

    traffic: float
    shadow: float = 0.0


@dataclass(frozen=True)
class World:
    """The state at `now` (unix seconds). `active` is the version of the commit record, `shares` are those of the
    other versions in it; None while a swap is under way. `evidence`: of this step, by judge.key_of. `evaluated`:
    what the evaluation came to, "" if it was passed, None if it is not over."""

    now: float
    active: int | None
    shares: Mapping[int, Share] | None
    evidence: Mapping[str, Evidence]
    evaluated: str | None = None
    ready: bool = True  # the candidate still exists


@dataclass(frozen=True)
class Write:
    """The record as it is to be."""

    record: ReleaseRecord


@dataclass(frozen=True)
class Split:
    """Give the candidate this share of the traffic."""

    share: Share


@dataclass(frozen=True)
class Commit:
    """Make this version active, and the only one."""

    version: int


@dataclass(frozen=True)
class Evaluate:
    """Ask the candidate the questions of the evaluation sets."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something changes or so many seconds are over."""

    seconds: float


Action = Write | Split | Commit | Evaluate | Wait


def advance(record: ReleaseRecord, policy: Policy, world: World) -> Action:
    """The next action; `record` has not ended."""
    if world.shares is None:
        return Wait(LOOK_S)
    if record.state == "finishing":
        return _whole(record, world, record.version, "done")
    if record.state == "rolling_back":
        return _whole(record, world, record.stable, "rolled_back")
    if world.active != record.stable or set(world.shares) - {record.version}:
        return Write(ended(record, "cancelled", world.now, _superseded(record, world)))
    if not world.ready:
        return Write(failed(record, world.now, f"version {record.version} is no longer ready"))
    if record.state == "evaluating":
        return _evaluate(record, policy, world)
    wanted = Share(policy.steps[record.step].traffic, policy.steps[record.step].shadow)
    has = world.shares.get(record.version)
    if record.state == "applying":
        return Write(turned(record, "judging", world.now)) if has == wanted else Split(wanted)
    if has != wanted:
        return Write(ended(record, "cancelled", world.now, _superseded(record, world)))
    return _judge(record, policy, world)


def turned(record: ReleaseRecord, state: State, now: float, reason: str = "") -> ReleaseRecord:
    """In another state from now on."""
    return replace(record, state=state, since=now, reason=reason)


def failed(record: ReleaseRecord, now: float, reason: str, findings: tuple[Finding, ...] = ()) -> ReleaseRecord:
    """The candidate goes."""
    told = _told(findings) or record.findings
    return replace(turned(record, "rolling_back", now, reason), findings=told)


def ended(record: ReleaseRecord, state: State, now: float, reason: str) -> ReleaseRecord:
    """Over."""
    return replace(turned(record, state, now, reason), ended_at=now)


def _evaluate(record: ReleaseRecord, policy: Policy, world: World) -> Action:
    if not policy.evaluation:
        return Write(turned(record, "applying", world.now))
    if world.shares is not None and record.version not in world.shares:
        return Split(Share(0.0))  # an instance that nobody is sent to runs it
    if world.evaluated is None:
        return Evaluate()
    if world.evaluated:
        return Write(failed(record, world.now, world.evaluated))
    return Write(turned(record, "applying", world.now))


def _judge(record: ReleaseRecord, policy: Policy, world: World) -> Action:
    began = record.since if record.state == "judging" else record.since - policy.steps[record.step].seconds
    ruling = judge.rule(policy, record.step, world.evidence, lasted_s=world.now - began)
    told = _told(ruling.findings)
    if ruling.kind == "rollback":
        return Write(failed(record, world.now, ruling.reason, ruling.findings))
    if ruling.kind == "next":
        last = record.step == len(policy.steps) - 1
        after = turned(record, "finishing" if last else "applying", world.now)
        return Write(replace(after, step=record.step + (not last), findings=told))
    if ruling.kind == "hold" and record.state != "held":
        return Write(replace(turned(record, "held", world.now, ruling.reason), findings=told))
    return Wait(LOOK_S)


def _whole(record: ReleaseRecord, world: World, version: int, state: State) -> Action:
    if world.active == version and not world.shares:
        return Write(ended(record, state, world.now, record.reason))
    if world.active not in (record.stable, record.version):
        return Write(ended(record, "cancelled", world.now, _superseded(record, world)))
    return Commit(version)


def _superseded(record: ReleaseRecord, world: World) -> str:
    shares = ", ".join(f"version {v} {share.traffic:g} %" for v, share in sorted((world.shares or {}).items()))
    return (
        f"somebody else has changed what serves (version {world.active} is active{', ' if shares else ''}{shares}); "
        f"the release of version {record.version} does not interfere"
    )


def _told(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return tuple(f"{finding.state}: {finding.text}" for finding in findings)
