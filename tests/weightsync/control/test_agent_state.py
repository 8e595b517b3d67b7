"""The next action of an instance: each rule by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightsync.control import agent_state
from weightsync.control.agent_state import Drain, Flip, Rest, Serve, Stage, View, decide
from weightsync.control.records import ActiveRecord, ErrorInfo, InstanceRecord, ShareRecord, SwapRecord

ACTIVE = ActiveRecord(1, 5, None, "old", 0.0, "f1")
SWAP = SwapRecord("new", 2, "prepare", ("a", "b", "c"), 100.0, 90.0, mode="rolling", drain_s=3.0)
CANARY = replace(SWAP, phase="canary", canary="a")
TRYING = replace(ACTIVE, trial=ShareRecord(2, 0.0, ("a",), "f2"))
COMMIT = replace(CANARY, phase="commit")
COMMITTED = ActiveRecord(2, 6, 1, "new", 95.0, "f2")
SERVING = InstanceRecord("a", "x", "SERVING", 1, 5, fingerprint="f1")
STAGED = replace(SERVING, state="STAGED", staged_version=2, swap_id="new", staged_fingerprint="f2")
TRIAL = replace(SERVING, state="COMMITTING", swap_id="new", active_version=2, active_epoch=6, fingerprint="f2")


def view(active: ActiveRecord | None = ACTIVE, swap: SwapRecord | None = None, **others: InstanceRecord) -> View:
    return View(active, swap, others)


def test_one_that_starts_serves_when_it_runs_what_is_committed() -> None:
    blank = InstanceRecord("a", "x")
    assert decide(blank, view(None)) == Serve(None)
    assert decide(blank, view()) == Flip(ACTIVE)
    assert decide(replace(blank, active_version=1), view()) == Serve(ACTIVE)
    assert decide(replace(blank, active_version=1, fingerprint="f1"), view()) == Serve(ACTIVE)
    assert decide(replace(blank, active_version=1, fingerprint="other"), view()) == Flip(ACTIVE)


@pytest.mark.parametrize("state", ["TORN", "DRAINING", "STOPPED"])
def test_one_that_is_out_does_nothing_more(state: str) -> None:
    assert decide(replace(SERVING, state=state), view(COMMITTED, COMMIT)) == Rest()  # type: ignore[arg-type]


def test_a_swap_is_staged_once_and_again_if_that_was_interrupted() -> None:
    assert decide(SERVING, view(swap=SWAP)) == Stage(SWAP)
    assert decide(replace(SERVING, id="d"), view(swap=SWAP)) == Rest()
    assert decide(replace(SERVING, state="STAGING", swap_id="new"), view(swap=SWAP)) == Stage(SWAP)
    assert decide(replace(SERVING, swap_id="new", error=ErrorInfo("c", "m")), view(swap=SWAP)) == Rest()
    assert decide(STAGED, view(swap=SWAP)) == Rest()


@pytest.mark.parametrize("record", [STAGED, replace(STAGED, state="COMMITTING"), replace(STAGED, state="STAGING")])
def test_what_was_staged_for_a_swap_that_ended_is_dropped(record: InstanceRecord) -> None:
    assert decide(record, view(swap=replace(CANARY, phase="aborted"))) == Serve(ACTIVE)
    assert decide(record, view(swap=replace(SWAP, id="newer", participants=()))) == Serve(ACTIVE)


def test_together_it_flips_as_soon_as_it_sees_the_commit() -> None:
    for phase in ("prepare", "commit", "done"):
        swap = replace(SWAP, mode="together", phase=phase)  # type: ignore[arg-type]
        assert decide(STAGED, view(COMMITTED, swap)) == Flip(COMMITTED)


def test_the_canary_drains_then_flips_to_its_trial() -> None:
    for swap in (SWAP, CANARY):  # seen before, or with, the commit record
        assert decide(STAGED, view(TRYING, swap)) == Drain(swap)
        leaving = replace(STAGED, state="COMMITTING")
        assert decide(leaving, view(TRYING, swap)) == Drain(swap)
        assert decide(leaving, replace(view(TRYING, swap), drained="new")) == Flip(TRYING.of("a"))
        assert decide(replace(STAGED, id="b"), view(TRYING, swap)) == Rest()
    second = replace(TRYING, trial=ShareRecord(2, 0.0, ("b",), "f2"))
    stays = replace(SERVING, swap_id="new")  # in a split it runs its version already
    canary = replace(CANARY, canary="b")
    assert decide(replace(STAGED, id="b"), view(second, canary, a=stays)) == Drain(canary), "a trial has no turn"
    assert decide(STAGED, view(ACTIVE, CANARY)) == Rest()
    for ended in (None, replace(CANARY, phase="aborted")):
        assert decide(STAGED, view(TRYING, ended)) == Rest(), "the commit record comes next"


def test_a_trial_is_the_canary_s_alone_and_divides_no_requests() -> None:
    mine, others = TRYING.of("a"), TRYING.of("b")
    assert (mine.version, mine.epoch, mine.fingerprint, mine.previous) == (2, 6, "f2", None)
    assert mine.trial is not None
    assert others == ACTIVE
    assert ActiveRecord.from_json(TRYING.to_json()) == TRYING
    assert b"trial" not in ACTIVE.to_json(), "a release that knows no trials can read it"


def test_a_canary_whose_trial_ended_unseen_follows_the_commit_of_that_epoch() -> None:
    missed = ActiveRecord(3, 6, 1, "other", 94.0, "f3")
    assert decide(TRIAL, view(missed, replace(SWAP, id="other", phase="done", participants=("b",)))) == Flip(missed)
    assert decide(replace(TRIAL, active_epoch=4), view(missed, CANARY)) == Flip(missed)


def test_fingerprints_count_when_both_are_known() -> None:
    assert agent_state.same("f1", "f1")
    assert agent_state.same(None, "f1")
    assert agent_state.same("f1", "")
    assert not agent_state.same("f1", "f2")


def test_a_staging_goes_on_as_long_as_its_version_is_wanted() -> None:
    stages, flips = replace(SERVING, state="STAGING", swap_id="new"), Flip(COMMITTED)
    assert agent_state.to_stage(stages, Stage(SWAP)) == agent_state.to_stage(stages, flips) == 2
    assert agent_state.to_stage(STAGED, flips) is None
    for action in (Rest(), Stage(SWAP), flips):
        assert not agent_state.gives_up(stages, action, 2)
    for other in (Serve(ACTIVE), Stage(replace(SWAP, target=3)), Flip(ACTIVE)):
        assert agent_state.gives_up(stages, other, 2)


def test_a_canary_on_trial_waits_serves_or_goes_back() -> None:
    for swap in (None, CANARY, COMMIT, replace(CANARY, phase="aborted")):  # the commit record may come next
        assert decide(TRIAL, view(TRYING, swap)) == Rest()
    assert decide(replace(TRIAL, state="STARTING"), view(TRYING, CANARY)) == Serve(TRYING.of("a")), "it has slept"
    assert decide(TRIAL, view(COMMITTED, CANARY)) == Serve(COMMITTED)  # or the other way round
    assert decide(TRIAL, view(COMMITTED, COMMIT)) == Serve(COMMITTED)
    assert decide(TRIAL, view(swap=replace(CANARY, phase="aborted"))) == Flip(ACTIVE)
    assert decide(TRIAL, view(swap=replace(SWAP, id="newer"))) == Flip(ACTIVE)
    assert decide(TRIAL, view(swap=None)) == Flip(ACTIVE)


def test_the_others_follow_in_turn() -> None:
    second, third = replace(STAGED, id="b"), replace(STAGED, id="c")
    fleet = {"a": TRIAL, "b": second, "c": third}
    assert decide(second, view(COMMITTED, COMMIT, **fleet)) == Rest()
    fleet["a"] = replace(TRIAL, state="SERVING", active_epoch=6)
    for phase in (CANARY, COMMIT):  # seen before, or with, the commit record
        assert decide(second, view(COMMITTED, phase, **fleet)) == Drain(phase)
        assert decide(second, replace(view(COMMITTED, phase, **fleet), drained="new")) == Flip(COMMITTED)
        assert decide(third, view(COMMITTED, phase, **fleet)) == Rest()
    for gone in (None, replace(second, state="TORN"), replace(second, state="STARTING")):
        others = {name: i for name, i in {**fleet, "b": gone}.items() if i is not None}
        assert decide(third, view(COMMITTED, COMMIT, **others)) == Drain(COMMIT)
    assert decide(third, view(COMMITTED, replace(COMMIT, phase="done"), **fleet)) == Flip(COMMITTED)


def test_one_that_is_no_participant_follows_a_rolling_commit_at_once() -> None:
    assert decide(replace(SERVING, id="d"), view(COMMITTED, COMMIT, a=TRIAL)) == Flip(COMMITTED)
    assert decide(InstanceRecord("b", "x"), view(COMMITTED, COMMIT, a=TRIAL)) == Flip(COMMITTED)


def test_requests_are_taken_only_while_it_serves() -> None:
    assert all(agent_state.admits(replace(SERVING, state=s)) for s in ("SERVING", "STAGING", "STAGED"))  # type: ignore[arg-type]
    out = ("STARTING", "COMMITTING", "TORN", "DRAINING", "STOPPED")
    assert not any(agent_state.admits(replace(SERVING, state=s)) for s in out)  # type: ignore[arg-type]


def test_what_it_says_afterwards() -> None:
    error = ErrorInfo("c", "m")
    flipped = agent_state.flipped(STAGED, COMMITTED, "f2")
    assert (flipped.state, flipped.active_version, flipped.active_epoch, flipped.fingerprint) == ("SERVING", 2, 6, "f2")
    assert agent_state.flipped(STAGED, TRYING.of("a"), "f2") == TRIAL
    assert agent_state.serving(replace(TRIAL, state="STARTING"), TRYING.of("a")) == TRIAL
    assert agent_state.serving(TRIAL, COMMITTED) == replace(TRIAL, state="SERVING")
    assert agent_state.behind(STAGED, COMMITTED, error) == replace(
        SERVING, state="STARTING", swap_id="new", error=error
    )
    assert agent_state.refused(STAGED, error).error == error
    assert agent_state.torn(STAGED, error).state == "TORN"
    assert agent_state.serving(STAGED, ACTIVE) == replace(SERVING, swap_id="new")
