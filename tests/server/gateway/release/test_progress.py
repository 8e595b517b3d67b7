"""What a release does next, from its record and from what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from server.gateway.release.judge import Evidence
from server.gateway.release.policy import Policy, parse
from server.gateway.release.progress import Commit, Evaluate, Share, Split, Wait, World, Write, advance
from server.gateway.release.records import ReleaseRecord
from server.gateway.release.statistics import Tally

POLICY = parse(b"""
conditions: [{metric: errors, max: 0.1}]
steps: [{traffic: 0, shadow: 20, for: 10s}, {traffic: 50, for: 10s}]
""")
IMPATIENT = msgspec.structs.replace(POLICY, on_hold="rollback", hold="1m")
EVALUATED = parse(b"""
rewards: {math: {}}
evaluation: [{name: sums, by: math, min: 0.8}]
steps: [{traffic: 50, for: 10s}]
""")
GOOD = {"errors": Evidence(Tally(500, 2, 2))}
BAD = {"errors": Evidence(Tally(500, 200, 200))}
SHADOWED, HALF = {13: Share(0.0, 20.0)}, {13: Share(50.0)}
START = ReleaseRecord("r", 13, 12, "", "evaluating", 0, since=100.0, started_at=100.0)


def world(
    now: float, shares: Mapping[int, Share] | None, evidence: Mapping[str, Evidence] | None = None, **more: Any
) -> World:
    return World(now, more.pop("active", 12), shares, evidence or {}, **more)


def after(record: ReleaseRecord, seen: World, policy: Policy = POLICY) -> ReleaseRecord:
    action = advance(record, policy, seen)
    assert isinstance(action, Write)
    return action.record


def test_it_goes_step_by_step_to_the_end() -> None:
    record = after(START, world(100, {}))
    assert record.state == "applying"
    assert advance(record, POLICY, world(100, {})) == Split(Share(0.0, 20.0))
    assert isinstance(advance(record, POLICY, world(100, None)), Wait)  # the swap is under way
    record = after(record, world(101, SHADOWED))
    assert (record.state, record.step, record.since) == ("judging", 0, 101)
    assert isinstance(advance(record, POLICY, world(110.9, SHADOWED, GOOD)), Wait)
    record = after(record, world(111, SHADOWED, GOOD))
    assert (record.state, record.step) == ("applying", 1)
    assert advance(record, POLICY, world(111, SHADOWED)) == Split(Share(50.0))
    record = after(after(record, world(112, HALF)), world(122, HALF, GOOD))
    assert record.state == "finishing"
    assert record.findings[0].startswith("kept: errors max 0.1")
    assert advance(record, POLICY, world(122, HALF)) == Commit(13)
    record = after(record, world(123, {}, active=13))
    assert (record.state, record.ended_at, record.reason) == ("done", 123, "")


@pytest.mark.parametrize("state", ["judging", "held"])
def test_harm_takes_it_back(state: Any) -> None:
    record = replace(START, state=state, step=1)
    record = after(record, world(101, HALF, BAD))
    assert (record.state, record.since) == ("rolling_back", 101)
    assert "errors max 0.1" in record.reason
    assert record.findings[0].startswith("harmed")
    assert advance(record, POLICY, world(101, HALF)) == Commit(12)
    ended = after(record, world(102, {}))
    assert (ended.state, ended.reason, ended.ended) == ("rolled_back", record.reason, True)


def test_it_waits_for_what_it_cannot_judge_and_goes_on_when_it_can() -> None:
    record = replace(START, state="judging", step=1)
    assert isinstance(advance(record, POLICY, world(109, HALF)), Wait)
    held = after(record, world(110, HALF))
    assert (held.state, held.since) == ("held", 110)
    assert "0 of 100 answers" in held.reason
    assert isinstance(advance(held, POLICY, world(5000, HALF)), Wait)
    assert after(held, world(5000, HALF, GOOD)).state == "finishing"


def test_a_clock_that_is_set_back_shortens_no_step_and_hides_no_harm() -> None:
    record = replace(START, state="judging", step=1, since=5000.0)
    assert isinstance(advance(record, POLICY, world(100, HALF, GOOD)), Wait)
    assert after(record, world(100, HALF, BAD)).state == "rolling_back"
    held = replace(record, state="held")
    assert isinstance(advance(held, IMPATIENT, world(100, HALF)), Wait)


def test_holding_may_end_in_a_rollback() -> None:
    held = replace(START, state="held", step=1, since=110.0)
    assert isinstance(advance(held, IMPATIENT, world(169, HALF)), Wait)
    assert after(held, world(170, HALF), IMPATIENT).state == "rolling_back"


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        ("applying", world(101, {}, active=14)),
        ("judging", world(101, {}, active=13)),  # an operator was faster
        ("judging", world(101, {13: Share(10.0)})),
        ("held", world(101, {13: Share(50.0), 14: Share(5.0)})),
        ("rolling_back", world(101, {}, active=14)),
        ("finishing", world(101, {}, active=14)),
    ],
)
def test_it_does_not_fight_an_operator(state: Any, seen: World) -> None:
    ended = after(replace(START, state=state, step=1), seen)
    assert (ended.state, ended.ended_at) == ("cancelled", 101)
    assert "somebody else" in ended.reason


def test_a_version_that_is_gone_takes_it_back() -> None:
    record = after(replace(START, state="applying"), world(101, {}, ready=False))
    assert (record.state, "no longer ready" in record.reason) == ("rolling_back", True)


def test_the_evaluation_comes_before_any_traffic() -> None:
    assert advance(START, EVALUATED, world(101, {})) == Split(Share(0.0))
    here = {13: Share(0.0)}
    assert advance(START, EVALUATED, world(101, here)) == Evaluate()
    assert after(START, world(102, here, evaluated=""), EVALUATED).state == "applying"
    failed = after(START, world(102, here, evaluated="sums: math 0.5, which is below 0.8"), EVALUATED)
    assert (failed.state, failed.reason) == ("rolling_back", "sums: math 0.5, which is below 0.8")
