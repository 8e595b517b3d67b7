"""Swaps under random schedules, and proof that they would find what they look for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from loadtest.histories.rules import Violation
from loadtest.simulation.schedules import explore
from server.gateway.fleet import routing
from weightsync.control import activation, agent_state, coordinator, placement
from weightsync.control import state as swap_state
from weightsync.control.agent import Pauses
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.control.state import Step, Wait

from .swaps import Swaps

SCHEDULES, SHARES = 10_000, 16  # of the first tier the first share, with other schedules for each commit
FINDS_WITHIN = 3_000
HAPPENED = {  # in a share; some four times as often as a rule
    "together done": 200, "rolling done": 24, "canary aborted": 40, "flipped back": 8, "trials": 90,
    "elected in a canary phase": 1, "deposed": 2, "stage failed": 12, "build failed": 14, "flip failed": 60,
    "together revert": 10, "all torn": 12, "probe failed": 8, "cut": 1, "admitted": 300, "refused": 20, "left out": 8,
    "staging given up": 10, "registered while staging": 5, "restarting done": 20, "restarting aborted": 45,
    "restarting revert": 2, "started for a swap": 90, "turns": 45, "forms dropped": 10, "split done": 25,
    "split aborted": 50,
}  # fmt: skip


@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.broad) for n in range(1, SHARES))])
def test_no_schedule_breaks_the_transaction(share: int) -> None:
    each = SCHEDULES // SHARES
    seen = explore(Swaps, range(share * each, (share + 1) * each))
    missing = {what: count for what, count in HAPPENED.items() if seen[what] < count}
    assert not missing, f"the schedules hardly try {missing}: {seen}"


# Mutants: with one rule taken away, a schedule finds what the rule is for.

Mutate = Callable[[pytest.MonkeyPatch], None]


def no_leader_compare(patch: pytest.MonkeyPatch) -> None:
    real = coordinator.depends_on
    patch.setattr(coordinator, "depends_on", lambda step, keys: [k for k in real(step, keys) if k != keys.leader])


def no_published_fingerprint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(swap_state, "_odd_fingerprint", lambda view, swap: None)


def no_fingerprint_when_catching_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_state, "same", lambda fingerprint, expected: True)


def requests_on_trial(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_state, "ADMITTING", agent_state.ADMITTING | {"COMMITTING"})


def no_way_back_for_a_canary(patch: pytest.MonkeyPatch) -> None:
    real = agent_state._follow

    def follow(record: InstanceRecord, active: Any, view: agent_state.View) -> agent_state.Action:
        tried = record.state == "COMMITTING" and record.active_epoch > active.epoch
        return agent_state.Rest() if tried else real(record, active, view)

    patch.setattr(agent_state, "_follow", follow)


def staged_for_ever(patch: pytest.MonkeyPatch) -> None:
    """What a swap had staged that was aborted."""
    real = agent_state.decide

    def decide(record: InstanceRecord, view: agent_state.View) -> agent_state.Action:
        action = real(record, view)
        ended = isinstance(action, agent_state.Serve) and record.state in ("STAGING", "STAGED")
        return agent_state.Rest() if ended else action

    patch.setattr(agent_state, "decide", decide)


def a_trial_without_an_end(patch: pytest.MonkeyPatch) -> None:
    real = swap_state.abort

    def abort(*args: Any, **more: Any) -> Step:
        return replace(real(*args, **more), active=None)

    patch.setattr(swap_state, "abort", abort)


def a_trial_that_is_committed_at_once(patch: pytest.MonkeyPatch) -> None:
    """The canary says that it serves."""
    patch.setattr(agent_state, "_state", lambda active: "SERVING")


def a_staging_that_goes_on_for_another_swap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_state, "gives_up", lambda record, action, version: False)


def pauses_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pauses, "wanted", lambda self, now: bool(self._ends))


def no_way_back_for_who_restarted(patch: pytest.MonkeyPatch) -> None:
    """They would stay with the engines that they have."""
    patch.setattr(agent_state, "_can_run", lambda record, version, view: True)


def a_revert_that_forgets_the_version_before(patch: pytest.MonkeyPatch) -> None:
    real = swap_state._revert

    def revert(view: swap_state.View, swap: SwapRecord, problem: str) -> Step:
        step = real(view, swap, problem)
        assert step.active is not None
        return replace(step, active=replace(step.active, previous=step.swap.target))

    patch.setattr(swap_state, "_revert", revert)


def a_commit_that_stands_though_all_are_torn(patch: pytest.MonkeyPatch) -> None:
    real = swap_state._confirm

    def confirm(view: swap_state.View, swap: SwapRecord) -> Step | Wait:
        return real(view, replace(swap, former=None))

    patch.setattr(swap_state, "_confirm", confirm)


def a_revert_though_one_serves(patch: pytest.MonkeyPatch) -> None:
    real = swap_state._confirm

    def confirm(view: swap_state.View, swap: SwapRecord) -> Step | Wait:
        step = real(view, swap)
        missed = isinstance(step, Step) and "not flipped" in (step.swap.reason or "") and swap.former is not None
        return swap_state._revert(view, swap, "one could not flip") if missed else step

    patch.setattr(swap_state, "_confirm", confirm)


def turns_without_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(swap_state, "_failed_start", lambda view, swap: None)
    patch.setattr(swap_state, "RESTART_S", 1e9)


def a_split_that_stays_as_it_was_placed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placement, "is_off", lambda active, instances: False)


def shares_retired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activation, "shared_versions", lambda split: [])


def one_version_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ActiveRecord, "of", lambda self, name: self)


def previous_retired(patch: pytest.MonkeyPatch) -> None:
    real = activation.needed_versions

    def needed(active: Any, swap: Any, target: Any, instances: Any) -> set[int]:
        return real(replace(active, previous=None), swap, target, ())

    patch.setattr(activation, "needed_versions", needed)


def a_form_goes_with_the_first_version_that_had_it(patch: pytest.MonkeyPatch) -> None:
    real = activation.retirement

    def retirement(keys: Keys, versions: Iterable[VersionRecord], *args: Any, **more: Any) -> dict[str, bytes | None]:
        known = list(versions)
        puts = real(keys, known, *args, **more)
        return puts | {keys.form(v.form): None for v in known if keys.version(v.version) in puts}

    patch.setattr(activation, "retirement", retirement)


def a_probe_that_is_never_run_again(patch: pytest.MonkeyPatch) -> None:
    """And no deadline that would end the wait for it."""
    real = swap_state._canary
    asked: set[str] = set()

    def canary(view: swap_state.View, swap: SwapRecord) -> Step | swap_state.Ask | Wait:
        decision = real(view, swap)
        if isinstance(decision, Step) and "in time" in (decision.swap.reason or ""):
            return Wait()
        if isinstance(decision, swap_state.Ask) and swap.id in asked:
            return Wait()
        if isinstance(decision, swap_state.Ask):
            asked.add(swap.id)
        return decision

    patch.setattr(swap_state, "_canary", canary)


@pytest.mark.parametrize(
    ("mutate", "found"),
    [
        (no_leader_compare, "a step of one who does not lead"),
        (no_published_fingerprint, "built other weights"),
        (no_fingerprint_when_catching_up, "serves wrong weights"),
        (requests_on_trial, "serves an uncommitted version"),
        (no_way_back_for_a_canary, "stays COMMITTING"),
        (a_trial_that_is_committed_at_once, "serves an uncommitted version"),
        (a_trial_without_an_end, "stays (COMMITT|START)ING|the way back|a trial in place of another|runs version"),
        (staged_for_ever, "stays STAG"),
        (a_staging_that_goes_on_for_another_swap, "has not staged it|built other weights|for nobody"),
        (pauses_without_end, "a pause outlived its owner"),
        (no_way_back_for_who_restarted, "of another form"),
        (a_revert_that_forgets_the_version_before, "reverted wrongly"),
        (a_commit_that_stands_though_all_are_torn, "no instance could flip, and"),
        pytest.param(a_revert_though_one_serves, "reverted, and an instance serves it", marks=pytest.mark.broad),
        (turns_without_an_end, "the swap stays in phase (canary|commit)"),
        pytest.param(a_split_that_stays_as_it_was_placed, "instances run the versions, not", marks=pytest.mark.broad),
        (shares_retired, "retired that is needed"),
        (one_version_for_all, "stays|the swap stays|has not staged it|built other weights"),
        (previous_retired, "retired that is needed"),
        (a_form_goes_with_the_first_version_that_had_it, "a form was dropped that a version has"),
        (a_probe_that_is_never_run_again, "the swap stays in phase canary"),
    ],
)
def test_without_a_rule_a_schedule_finds_what_it_is_for(
    mutate: Mutate, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation, match=found):
        explore(Swaps, range(FINDS_WITHIN), "rules")


def test_the_gateway_of_the_schedules_routes_as_the_real_one() -> None:
    """The model asks the policy itself, which keeps COMMITTING, TORN and STARTING out."""
    record = InstanceRecord("a", "x", "COMMITTING")
    assert not routing.eligible(record, None, None)
    assert routing.eligible(replace(record, state="SERVING"), None, None)
