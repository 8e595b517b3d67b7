"""Swaps under random schedules, and proof that they would find what they look for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from loadtest.simulation.schedules import explore
from server.gateway.fleet import routing
from weightsync.control import agent_state, placement, swap
from weightsync.control import state as swap_state
from weightsync.control.pauses import Pauses
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.control.state import Step, Wait

from .rules import check_found, check_happened, without
from .swaps import Swaps

SCHEDULES, SHARES = 10_000, 16  # of the first tier the first share, with other schedules for each commit
FINDS_WITHIN = 3_000
HAPPENED = {  # in a share; four times as often as a rule, and what is rare twenty times
    "together done": 200, "rolling done": 24, "canary aborted": 40, "flipped back": 8, "trials": 90,
    "elected in a canary phase": 1, "deposed": 2, "stage failed": 12, "build failed": 14, "flip failed": 60,
    "together revert": 10, "all torn": 12, "probe failed": 8, "cut": 1, "admitted": 300, "refused": 20, "left out": 3,
    "staging given up": 10, "registered while staging": 1, "restarting done": 20, "restarting aborted": 45,
    "restarting revert": 2, "started for a swap": 90, "turns": 45, "forms dropped": 10, "split done": 25,
    "split aborted": 50, "unfit": 40, "untried done": 2, "untried revert": 40,
}  # fmt: skip


@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.broad) for n in range(1, SHARES))])
def test_no_schedule_breaks_the_transaction(share: int) -> None:
    each = SCHEDULES // SHARES
    seen = explore(Swaps, range(share * each, (share + 1) * each))
    check_happened(seen, HAPPENED)


# With one rule taken away, a schedule finds what the rule is for.


def no_way_back_for_a_canary(real: Any, record: InstanceRecord, active: Any, view: agent_state.View) -> Any:
    tried = record.state == "COMMITTING" and record.active_epoch > active.epoch
    return agent_state.Rest() if tried else real(record, active, view)


def staged_for_ever(real: Any, record: InstanceRecord, view: agent_state.View) -> Any:
    """An instance keeps what a swap had staged that was aborted."""
    action = real(record, view)
    ended = isinstance(action, agent_state.Serve) and record.state in ("STAGING", "STAGED")
    return agent_state.Rest() if ended else action


def a_revert_that_forgets_the_version_before(real: Any, *args: Any) -> Step:
    step: Step = real(*args)
    assert step.active is not None
    return replace(step, active=replace(step.active, previous=step.swap.target))


def a_revert_though_one_serves(real: Any, view: swap_state.View, swap: SwapRecord, active: ActiveRecord) -> Step | Wait:
    step: Step | Wait = real(view, swap, active)
    missed = isinstance(step, Step) and "not flipped" in (step.swap.reason or "") and swap.former is not None
    return swap_state._revert(view, swap, "one could not flip") if missed else step


def shares_that_nothing_needs(real: Any, *seen: Any) -> set[int]:
    *records, instances = seen
    whole = [replace(record, split=None) if record is not None else None for record in records]
    found: set[int] = real(*whole, instances)
    return found


def a_form_goes_with_the_first_version_that_had_it(
    real: Any, keys: Keys, versions: Iterable[VersionRecord], *args: Any, **more: Any
) -> dict[str, bytes | None]:
    known = list(versions)
    puts: dict[str, bytes | None] = real(keys, known, *args, **more)
    return puts | {keys.form(v.form): None for v in known if keys.version(v.version) in puts}


ASKED: set[str] = set()


def a_probe_that_is_never_run_again(real: Any, *args: Any) -> Step | swap_state.Ask | Wait:
    """And no deadline that would end the wait for it."""
    decision: Step | swap_state.Ask | Wait = real(*args)
    if isinstance(decision, Step) and "in time" in (decision.swap.reason or ""):
        return Wait()
    if isinstance(decision, swap_state.Ask):
        if decision.swap.id in ASKED:
            return Wait()
        ASKED.add(decision.swap.id)
    return decision


STUCK = "stays (COMMITT|START)ING|the way back|a trial in place of another|runs version"
RULES = [
    without("no leader compare", "a step of one who does not lead", (
        swap, "depends_on", lambda real, step, keys: [k for k in real(step, keys) if k != keys.leader],
    )),
    without("no published fingerprint", "built other weights", (swap_state, "_odd_fingerprint", lambda *_: None)),
    without("no fingerprint when catching up", "serves wrong weights", (agent_state, "same", lambda *_: True)),
    without("requests on trial", "serves an uncommitted version", (
        agent_state, "ADMITTING", agent_state.ADMITTING | {"COMMITTING"},
    )),
    without("no way back for a canary", "stays COMMITTING", (agent_state, "_follow", no_way_back_for_a_canary)),
    without("a canary says that it serves", "serves an uncommitted version", (
        agent_state, "_state", lambda *_: "SERVING",
    )),
    without("a trial without an end", STUCK, (
        swap_state, "abort", lambda real, *args, **more: replace(real(*args, **more), active=None),
    )),
    without("staged for ever", "stays STAG", (agent_state, "decide", staged_for_ever)),
    without("a staging that goes on for another swap", "has not staged it|built other weights|for nobody", (
        agent_state, "gives_up", lambda *_: False,
    )),
    without("pauses without end", "a pause outlived its owner", (
        Pauses, "wanted", lambda real, self, now: bool(self._ends),
    )),
    # They would stay with the engines that they have.
    without("no way back for who restarted", "of another form", (agent_state, "_can_run", lambda *_: True)),
    without("a revert that forgets the version before", "reverted wrongly", (
        swap_state, "_revert", a_revert_that_forgets_the_version_before,
    )),
    without("a commit that stands though all are torn", "no instance could flip, and", (
        swap_state, "_confirm",
        lambda real, view, swap, active: real(
            view, replace(swap, former=None) if swap.participants else swap, active
        ),
    )),
    without("a revert though one serves", "reverted, and an instance serves it", (
        swap_state, "_confirm", a_revert_though_one_serves,
    ), broad=True),
    without("turns without an end", "the swap stays in phase (canary|commit)", (
        swap_state, "_failed_start", lambda *_: None,
    ), (swap_state, "RESTART_S", 1e9)),
    without("an untried version stands", "stays STARTING", (swap_state, "untried", lambda *_: False)),
    without("a split that stays as it was placed", "instances run the versions, not", (
        placement, "is_off", lambda *_: False,
    ), broad=True),
    without("shares retired", "retired that is needed", (swap, "needed_versions", shares_that_nothing_needs)),
    without("one version for all", "stays|the swap stays|has not staged it|built other weights", (
        ActiveRecord, "of", lambda real, self, name: self,
    )),
    without("previous retired", "retired that is needed", (
        swap, "needed_versions",
        lambda real, active, swap, target, _: real(replace(active, previous=None), swap, target, ()),
    )),
    without("a form goes with the first version that had it", "a form was dropped that a version has", (
        swap, "retirement", a_form_goes_with_the_first_version_that_had_it,
    )),
    without("a probe that is never run again", "the swap stays in phase canary", (
        swap_state, "_canary", a_probe_that_is_never_run_again,
    )),
]  # fmt: skip


@pytest.mark.parametrize(("taken", "found"), RULES)
def test_a_schedule_finds_that_a_rule_is_gone(taken: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(Swaps, taken, found, FINDS_WITHIN, monkeypatch)


def test_the_gateway_of_the_schedules_routes_as_the_real_one() -> None:
    """The model asks the policy itself, which keeps COMMITTING, TORN and STARTING out."""
    record = InstanceRecord("a", "x", "COMMITTING")
    assert not routing.eligible(record, None, None)
    assert routing.eligible(replace(record, state="SERVING"), None, None)
