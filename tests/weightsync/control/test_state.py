"""The swap's decisions: each rule by itself. `tests/simulation/swaps.py` has whole fleets."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    ShareRecord,
    StartRecord,
    SwapRecord,
    TargetRecord,
    VersionState,
)
from weightsync.control.state import (
    CONFIRM_S,
    NOT_RUN,
    TOO_OLD,
    Ask,
    Step,
    View,
    Wait,
    decide,
    not_flipped,
    on_trial,
)
from weightsync.control.swap import depends_on
from weightsync.control.trial import ProbeResult

TARGET = TargetRecord(2, "swap-2", "test", deadline_s=10.0)
SWAP = SwapRecord("swap-2", 2, "prepare", ("a", "b"), deadline=110.0, opened_at=100.0)
ACTIVE = ActiveRecord(1, 5, 0, "swap-1", 50.0)
STAGED = {
    name: InstanceRecord(
        name, "x", "STAGED", 1, 5, staged_version=2, swap_id="swap-2", staged_fingerprint="f", path="packed"
    )
    for name in ("a", "b")
}


def view(**changes: object) -> View:
    return replace(View(100.0, TARGET, "ready", SWAP, ACTIVE, STAGED), **changes)  # type: ignore[arg-type]


def step(**changes: object) -> Step:
    decision = decide(view(**changes))
    assert isinstance(decision, Step)
    return decision


def instances(**changes: object) -> dict[str, InstanceRecord]:
    return {**STAGED, "b": replace(STAGED["b"], **changes)}  # type: ignore[arg-type]


def test_a_target_opens_a_swap_with_those_that_serve() -> None:
    states = {"a": "SERVING", "b": "STARTING", "c": "STAGED", "d": "TORN", "e": "STAGING"}
    fleet = {name: InstanceRecord(name, "x", state) for name, state in states.items()}  # type: ignore[arg-type]
    opened = step(swap=None, instances=fleet)
    assert opened.kind == "open"
    assert opened.swap == replace(SWAP, participants=("a", "c", "e"), former=ACTIVE)


@pytest.mark.parametrize(
    ("state", "what"), [(None, "does not exist"), ("publishing", "is publishing"), ("retired", "is retired")]
)
def test_a_target_that_is_not_ready_is_refused(state: VersionState | None, what: str) -> None:
    refused = step(swap=None, target_state=state)
    assert (refused.kind, refused.swap.phase, refused.active) == ("refuse", "aborted", None)
    assert what in (refused.swap.reason or "")


@pytest.mark.parametrize("phase", ["done", "aborted"])
def test_a_target_is_dealt_with_once(phase: str) -> None:
    assert decide(view(swap=replace(SWAP, phase=phase))) == Wait()
    assert step(swap=replace(SWAP, phase=phase, id="before")).kind == "open"


def test_when_all_have_staged_it_commits() -> None:
    commit = step()
    assert commit.kind == "commit"
    assert commit.active == ActiveRecord(2, 6, 1, "swap-2", 100.0)
    assert commit.swap == replace(SWAP, phase="commit")
    assert step(swap=replace(SWAP, participants=()), instances={}).kind == "commit", "a fleet of none"


def test_the_first_commit_and_the_commit_of_what_is_active() -> None:
    assert step(active=None).active == ActiveRecord(2, 1, None, "swap-2", 100.0)
    assert step(active=replace(ACTIVE, version=2, previous=1)).active == ActiveRecord(2, 6, 1, "swap-2", 100.0)


@pytest.mark.parametrize(
    "late",
    [
        {"state": "STAGING"},
        {"staged_version": 1},
        {"swap_id": "other"},
        {"state": "SERVING", "swap_id": None},
        {"state": "SERVING", "swap_id": "swap-1", "error": ErrorInfo("c", "of an earlier swap")},
    ],
)
def test_it_waits_for_the_last_one_until_the_deadline(late: dict[str, object]) -> None:
    assert decide(view(instances=instances(**late))) == Wait(10.0)
    aborted = step(instances=instances(**late), lasted_s=10.0)
    assert (aborted.kind, aborted.swap.phase) == ("abort", "aborted")
    assert aborted.swap.reason == "not staged within 10 s by b"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instances": {"a": STAGED["a"]}}, "instance b is gone"),
        ({"instances": instances(state="TORN")}, "instance b is TORN"),
        ({"instances": instances(state="DRAINING")}, "instance b is DRAINING"),
        ({"instances": instances(staged_fingerprint="g")}, "fingerprints differ"),
        ({"target_state": "retired"}, "no longer ready"),
    ],
)
def test_it_aborts_at_once_when_it_cannot_succeed(changes: dict[str, object], reason: str) -> None:
    aborted = step(**changes)
    assert aborted.kind == "abort"
    assert aborted.active is None
    assert reason in (aborted.swap.reason or "")


def test_an_error_aborts_and_its_tensor_is_named() -> None:
    failed = instances(state="SERVING", error=ErrorInfo("digest_mismatch", "bytes changed", "w"), staged_version=None)
    aborted = step(instances=failed)
    assert (aborted.kind, aborted.swap.reason, aborted.swap.tensor) == ("abort", "instance b: bytes changed", "w")


COMMITTED = ActiveRecord(2, 6, 1, "swap-2", 105.0)


def confirmed(**changes: object) -> dict[str, InstanceRecord]:
    flipped = {name: replace(i, state="SERVING", active_epoch=6, active_version=2) for name, i in STAGED.items()}
    return {**flipped, "b": replace(flipped["b"], **changes)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fleet", "lasted_s", "reason"),
    [
        (confirmed(), 0.0, None),
        (confirmed(state="TORN", active_epoch=5), 0.0, "not flipped: b"),
        ({"a": confirmed()["a"]}, 0.0, "not flipped: b"),
        (STAGED, CONFIRM_S, "no confirmation from a, b"),
    ],
)
def test_a_commit_is_done_when_all_have_flipped_that_could(
    fleet: dict[str, InstanceRecord], lasted_s: float, reason: str | None
) -> None:
    swap = replace(SWAP, phase="commit")
    assert decide(view(swap=swap, active=COMMITTED)) == Wait(CONFIRM_S)
    done = step(swap=swap, active=COMMITTED, instances=fleet, lasted_s=lasted_s)
    assert (done.kind, done.swap.phase, done.swap.reason) == ("finish", "done", reason)


BROKEN = {name: replace(i, state="TORN", error=ErrorInfo("c", "no memory")) for name, i in STAGED.items()}
COMMIT = replace(SWAP, phase="commit", former=replace(ACTIVE, previous=7))


@pytest.mark.parametrize(
    ("fleet", "lasted_s"),
    [
        (BROKEN, 0.0),
        ({"b": BROKEN["b"]}, 0.0),
        ({**BROKEN, "a": STAGED["a"]}, CONFIRM_S),
        ({**BROKEN, "joined": replace(STAGED["a"], id="joined", state="STARTING")}, 0.0),
    ],
)
def test_a_commit_that_no_instance_could_follow_is_reverted(fleet: dict[str, InstanceRecord], lasted_s: float) -> None:
    back = step(swap=COMMIT, active=COMMITTED, instances=fleet, lasted_s=lasted_s)
    assert (back.kind, back.swap.phase) == ("revert", "revert")
    assert re.fullmatch(r"no instance could flip \([ab]: no memory\)", back.swap.reason or "")
    assert back.active == ActiveRecord(1, 7, 7, "swap-2", 100.0)
    assert Keys("m").instances in depends_on(back, Keys("m"))
    ended = step(swap=back.swap, active=back.active, instances=BROKEN)
    assert (ended.kind, ended.active, ended.swap) == ("abort", None, replace(back.swap, phase="aborted"))
    assert decide(view(swap=back.swap, active=back.active)) == Wait(CONFIRM_S)  # these have it to return to


@pytest.mark.parametrize(
    ("fleet", "former"),
    [
        ({**confirmed(), "b": BROKEN["b"]}, ACTIVE),
        ({**BROKEN, "joined": replace(confirmed()["a"], id="joined")}, ACTIVE),
        ({}, ACTIVE),
        (BROKEN, None),
    ],
)
def test_a_commit_stands_where_one_serves_it_or_nothing_was_torn(
    fleet: dict[str, InstanceRecord], former: ActiveRecord | None
) -> None:
    done = step(swap=replace(COMMIT, former=former), active=COMMITTED, instances=fleet)
    assert (done.kind, done.swap.phase) == ("finish", "done")
    missing = [name for name in ("a", "b") if name not in fleet or fleet[name].active_epoch < 6]
    assert done.swap.reason == f"not flipped: {', '.join(missing)}"
    assert not_flipped(done.swap, COMMITTED, fleet) == tuple(missing)
    assert not_flipped(done.swap, replace(COMMITTED, swap_id="later"), fleet) == ()


ROLLING = replace(SWAP, mode="rolling", drain_s=3.0)
TRYING = replace(ROLLING, phase="canary", canary="a")
TRIAL = replace(ACTIVE, trial=ShareRecord(2, 0.0, ("a",)))
FLIPPED = replace(
    STAGED["a"], state="COMMITTING", active_version=2, active_epoch=6, staged_version=None, fingerprint="f"
)
ON_TRIAL = {**STAGED, "a": FLIPPED}


def test_a_rolling_swap_tries_one_first_and_gives_it_the_time_of_the_request_again() -> None:
    tried = step(swap=ROLLING)
    assert (tried.kind, tried.swap, tried.active) == ("try", TRYING, TRIAL)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "rolling"),
        ({"active": None}, "together"),
        ({"active": replace(ACTIVE, version=2)}, "together"),
        ({"instances": {}}, "together"),
    ],
)
def test_a_rolling_swap_with_nothing_to_try_is_done_together(changes: dict[str, object], mode: str) -> None:
    opened = step(swap=None, target=replace(TARGET, mode="rolling", drain_s=3.0), **changes)
    assert (opened.swap.mode, opened.swap.drain_s) == (mode, 3.0)


@pytest.mark.parametrize("canary", [STAGED["a"], replace(STAGED["a"], state="COMMITTING")])
def test_it_waits_for_the_canary_to_drain_and_flip(canary: InstanceRecord) -> None:
    seen = {"swap": TRYING, "active": TRIAL, "instances": {**STAGED, "a": canary}}
    assert decide(view(**seen)) == Wait(3.0 + 10.0)
    late = step(**seen, lasted_s=13.0)
    assert (late.swap.reason, late.active) == (f"canary a did not flip in time; {TOO_OLD}", ACTIVE)


def test_a_canary_that_runs_the_version_from_before_is_not_on_trial() -> None:
    """Its epoch is that of a commit: it has not flipped for this swap, and nobody may commit on its account."""
    drains = replace(STAGED["a"], state="COMMITTING", active_version=2, active_epoch=3)
    seen = {"swap": TRYING, "active": TRIAL, "instances": {**STAGED, "a": drains}}
    assert decide(view(**seen, probe=ProbeResult(True))) == Wait(3.0 + 10.0)
    assert not on_trial(drains, TRIAL)
    assert on_trial(replace(drains, active_epoch=6), TRIAL)
    assert not on_trial(replace(FLIPPED, id="b"), TRIAL)
    assert not on_trial(replace(FLIPPED, state="SERVING"), TRIAL)
    assert not on_trial(FLIPPED, COMMITTED)


def test_a_trial_that_was_taken_out_of_the_commit_record_is_over() -> None:
    """As `restore` does, which writes another version after memory was lost."""
    aborted = step(swap=TRYING, instances=ON_TRIAL, probe=ProbeResult(True))
    assert (aborted.kind, aborted.active) == ("abort", None)
    assert "written anew meanwhile" in (aborted.swap.reason or "")


def test_a_canary_has_confirmed_when_it_serves() -> None:
    """The version that it flipped to on trial has the epoch of the commit already."""
    seen = {"swap": replace(TRYING, phase="commit"), "active": COMMITTED}
    b = replace(STAGED["b"], state="SERVING", active_version=2, active_epoch=6)
    assert isinstance(decide(view(**seen, instances={"a": FLIPPED, "b": b})), Wait)
    assert step(**seen, instances={"a": replace(FLIPPED, state="SERVING"), "b": b}).kind == "finish"


def test_a_flipped_canary_is_probed_and_its_result_decides() -> None:
    seen = {"swap": TRYING, "active": TRIAL, "instances": ON_TRIAL}
    assert decide(view(**seen)) == Ask(TRYING, FLIPPED, 13.0)
    passed = step(**seen, probe=ProbeResult(True), target_fingerprint="f", now=130.0)
    assert (passed.kind, passed.active) == ("commit", ActiveRecord(2, 6, 1, "swap-2", 130.0, "f"))
    failed = step(**seen, probe=ProbeResult(False, "drift 0.3"))
    assert (failed.kind, failed.swap.reason) == ("abort", "the probe of canary a failed: drift 0.3")
    late = step(**seen, lasted_s=13.0)
    assert (late.kind, late.swap.reason) == ("abort", "canary a was not probed in time")
    assert failed.active == late.active == ACTIVE, "what stood before, to the last byte"


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        ({"b": STAGED["b"]}, "instance a is gone"),
        ({**ON_TRIAL, "a": replace(FLIPPED, state="TORN")}, "instance a is TORN"),
        ({**ON_TRIAL, "a": replace(FLIPPED, state="SERVING", active_epoch=5)}, "canary a is SERVING"),
        ({"a": FLIPPED}, "instance b is gone"),
        ({**ON_TRIAL, "b": replace(STAGED["b"], state="SERVING")}, "instance b is SERVING and has not staged"),
        ({**ON_TRIAL, "a": replace(FLIPPED, fingerprint="g")}, "instance a built other weights than were published"),
        ({**ON_TRIAL, "b": replace(STAGED["b"], staged_fingerprint="g")}, "instance b built other weights"),
    ],
)
def test_a_trial_aborts_at_once_when_it_cannot_succeed(fleet: dict[str, InstanceRecord], reason: str) -> None:
    aborted = step(swap=TRYING, active=TRIAL, instances=fleet, probe=ProbeResult(True), target_fingerprint="f")
    assert (aborted.kind, aborted.active) == ("abort", ACTIVE)
    assert reason in (aborted.swap.reason or "")


def test_fingerprints_are_compared_with_the_published_one_or_among_those_that_build_the_same_way() -> None:
    assert step(instances=instances(staged_fingerprint="g", path="shadow")).kind == "commit"
    assert step(instances=instances(staged_fingerprint=None)).kind == "commit"
    assert step(target_fingerprint="f").active == ActiveRecord(2, 6, 1, "swap-2", 100.0, "f")
    odd = step(target_fingerprint="f", instances=instances(staged_fingerprint="g", path="shadow"))
    assert (odd.kind, "instance b built other weights than were published" in (odd.swap.reason or "")) == (
        "abort",
        True,
    )
    assert step(target_fingerprint="f", instances=instances(staged_fingerprint=None)).kind == "commit"
    waiting = {"a": replace(STAGED["a"], state="STAGING", staged_version=None), "b": STAGED["b"]}
    assert step(target_fingerprint="other", instances=waiting).kind == "abort", "it waits for no other"


def test_instances_must_make_the_same_of_a_version() -> None:
    """Where they have the same layout: no fingerprint tells what vLLM's processing made."""

    def built(one: str, other: str) -> Step:
        fleet = {"a": replace(STAGED["a"], built=one), "b": replace(STAGED["b"], built=other)}
        return step(target_fingerprint="f", instances=fleet)

    assert built("l1:d1", "l1:d1").kind == "commit"
    assert built("l1:d1", "l2:d2").kind == "commit", "another kind of processor"
    assert built("l1:d1", "").kind == "commit", "it does not say"
    odd = built("l1:d1", "l1:d2")
    assert odd.kind == "abort"
    assert "instances a and b made different weights of the same version" in (odd.swap.reason or "")


def test_who_flip_in_turn_are_given_their_time_each() -> None:
    swap = replace(TRYING, phase="commit")
    assert decide(view(swap=swap, active=COMMITTED)) == Wait(2 * (CONFIRM_S + 3.0))


def test_every_step_depends_on_the_leader_and_a_commit_on_everybody() -> None:
    keys = Keys("m")
    for kind in ("open", "refuse", "try", "commit", "abort", "finish"):
        found = depends_on(Step(kind, SWAP), keys)  # type: ignore[arg-type]
        assert {keys.leader, keys.swap, keys.active} <= set(found)
        assert (keys.instances in found) == (kind in ("try", "commit"))
        assert (keys.target in found) == (kind in ("open", "refuse"))
        assert (keys.version(2) in found) == (kind in ("open", "try", "commit"))


def without_it(swap: SwapRecord = SWAP, **left: InstanceRecord) -> Step:
    return step(swap=replace(swap, on_lost="continue"), instances=left)


@pytest.mark.parametrize("lost", [None, "TORN", "DRAINING"])
def test_a_swap_goes_on_without_who_is_lost_if_told_so(lost: str | None) -> None:
    b = {} if lost is None else {"b": replace(STAGED["b"], state=lost)}  # type: ignore[arg-type]
    found = without_it(a=STAGED["a"], **b)
    assert (found.kind, found.swap.phase, found.swap.participants) == ("leave", "prepare", ("a",))
    assert decide(view(swap=found.swap, instances={"a": STAGED["a"]})).kind == "commit"  # type: ignore[union-attr]


def test_nobody_left_or_no_canary_left_aborts_all_the_same() -> None:
    assert without_it().kind == "abort"
    canary = replace(SWAP, phase="canary", mode="rolling", canary="b")
    assert without_it(canary, a=STAGED["a"]).kind == "abort"
    assert without_it(replace(canary, canary="a"), a=STAGED["a"]).kind == "leave"


def test_a_failed_staging_is_never_left_out() -> None:
    """Weights that one instance cannot build are no reason to go on with the rest."""
    broken = replace(STAGED["b"], error=ErrorInfo("digest_mismatch", "bytes changed", "w"))
    assert without_it(a=STAGED["a"], b=broken).kind == "abort"


# a commit while no instance was there to refuse the version

UNTRIED = replace(SWAP, phase="commit", participants=(), former=ACTIVE)
ALONE = ActiveRecord(2, 6, 1, "swap-2", 100.0)
BEHIND = InstanceRecord("a", "x", "STARTING", 1, 5, swap_id="swap-2", error=ErrorInfo("not_finite", "NaN in w", "w"))
MISFIT = ErrorInfo("config_mismatch", "rope_theta differs")


def untried(*fleet: InstanceRecord, **changes: object) -> Step | Ask | Wait:
    known: dict[str, object] = {"swap": UNTRIED, "active": ALONE, "instances": {i.id: i for i in fleet}}
    return decide(view(**known | changes))


def test_a_version_that_no_instance_has_tried_is_not_done() -> None:
    opened = step(swap=None, instances={}).swap
    committed = step(swap=opened, instances={})
    assert (committed.kind, committed.swap.phase) == ("commit", "commit")
    assert committed.active == ALONE
    assert committed.swap.former == replace(ACTIVE, previous=None), "one version less holds a slot"
    assert untried() == Wait()
    assert untried(replace(BEHIND, error=None)) == Wait(), "it is loading"
    done = untried(replace(BEHIND, state="SERVING", active_version=2, active_epoch=6, error=None))
    assert done == Step("finish", replace(UNTRIED, phase="done"))


@pytest.mark.parametrize(
    "changes",
    [
        {"instances": {"a": BEHIND}},
        {"instances": {"a": replace(BEHIND, error=MISFIT)}, "changes": "another configuration"},
        {"starts": {"a": StartRecord("swap-2", 2, ErrorInfo("start_failed", "it ended"))}, "changes": "other tensors"},
    ],
)
def test_the_version_before_serves_again_if_the_first_instance_cannot_run_it(changes: dict[str, object]) -> None:
    back = untried(**changes)
    assert isinstance(back, Step)
    assert (back.kind, back.refused, back.swap.phase) == ("revert", 2, "revert")
    assert back.active is not None
    assert (back.active.version, back.active.epoch) == (1, 7)
    assert (back.swap.reason or "").startswith("instance a: ")
    assert step(swap=back.swap, active=back.active, instances={}).kind == "abort"


@pytest.mark.parametrize(
    "behind",
    [
        replace(BEHIND, swap_id="swap-1"),  # it says so of the version before
        replace(BEHIND, error=ErrorInfo("out_of_memory", "no room")),
        replace(BEHIND, error=MISFIT),  # nor would the version before fit to it
    ],
)
def test_a_fault_that_is_not_the_version_s_takes_nothing_back(behind: InstanceRecord) -> None:
    assert untried(behind) == Wait()


def test_a_newer_wish_does_not_wait_and_returns_to_what_an_instance_has_run() -> None:
    newer = replace(TARGET, version=3, id="swap-3")
    ended = untried(target=newer)
    assert ended == Step("finish", replace(UNTRIED, phase="done", reason=NOT_RUN))
    opened = step(swap=replace(UNTRIED, phase="done", reason=NOT_RUN), active=ALONE, target=newer, instances={})
    assert (opened.swap.target, opened.swap.former) == (3, ACTIVE)
    committed = step(swap=opened.swap, active=ALONE, target=newer, instances={})
    assert committed.active is not None
    assert (committed.active.version, committed.active.previous, committed.active.epoch) == (3, 1, 7)
    ran = {"a": replace(BEHIND, state="SERVING", active_version=2, active_epoch=6)}
    committed = step(swap=opened.swap, active=ALONE, target=newer, instances=ran)
    assert committed.active is not None
    assert (committed.active.version, committed.active.previous) == (3, 2), "one has run it meanwhile"
