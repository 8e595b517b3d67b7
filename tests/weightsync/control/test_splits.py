"""Versions that share traffic: who is placed where, what the leader decides, and real fleets that carry it out."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.waiting import eventually
from tests.weightsync.codes import refused
from tests.weightsync.fleet import KEYS, Engine, Fleet
from weightsync import Coordinator, ProbeResult, SwapReport
from weightsync.control.agent_state import Flip, Rest, Serve, Stage
from weightsync.control.agent_state import View as Seen
from weightsync.control.agent_state import decide as act
from weightsync.control.chain import recent
from weightsync.control.history import past_swaps
from weightsync.control.placement import counts, is_off, place, split_of
from weightsync.control.records import (
    ActiveRecord,
    InstanceRecord,
    Keys,
    ShareRecord,
    SplitRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.control.state import REPLACE_S, Ask, Step, View, Wait, decide
from weightsync.control.swap import depends_on

STORES = ["sqlite", "etcd"]
HALF = SplitRecord((ShareRecord(2, 50.0),))
PLACED = SplitRecord((ShareRecord(2, 50.0, ("a",), "f2"),))


def running(**versions: int) -> dict[str, InstanceRecord]:
    return {
        name: InstanceRecord(name, "x", "SERVING", v, 5, fingerprint=f"f{v}", path="p") for name, v in versions.items()
    }


# placement


@pytest.mark.parametrize(
    ("percents", "instances", "found"),
    [
        ({1: 50, 2: 50}, 2, {1: 1, 2: 1}),
        ({1: 90, 2: 10}, 2, {1: 1, 2: 1}),
        ({1: 90, 2: 10}, 10, {1: 9, 2: 1}),
        ({1: 75, 2: 25}, 8, {1: 6, 2: 2}),
        ({1: 99, 2: 1}, 3, {1: 2, 2: 1}),
        ({1: 0, 2: 100}, 4, {1: 1, 2: 3}),
        ({1: 34, 2: 33, 3: 33}, 4, {1: 2, 2: 1, 3: 1}),
    ],
)
def test_versions_have_instances_by_their_percent(
    percents: dict[int, float], instances: int, found: dict[int, int]
) -> None:
    active, split = split_of(percents, 1)
    assert counts(active, split, instances) == found


def test_each_version_has_its_minimum_or_there_is_no_split() -> None:
    active, split = split_of({1: 99, 2: 1}, 1, minimum=2)
    assert counts(active, split, 4) == {1: 2, 2: 2}
    with refused("not_enough_instances", match=r"of 4 instances or more \(2 for each\), and 3 serve"):
        counts(active, split, 3)
    with refused("not_enough_instances", match=r"2 instances or more \(one for each\), and 1 serves") as one:
        counts(1, HALF, 1)
    assert one.value.needed == 2


def test_no_more_instances_move_than_must() -> None:
    rng = random.Random(4)
    for _ in range(500):
        versions = rng.sample(range(1, 9), rng.choice((2, 2, 3)))
        cuts = sorted(rng.randint(0, 100) for _ in versions[1:])
        percents = [float(b - a) for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        active, split = split_of(dict(zip(versions, percents, strict=True)), versions[0])
        fleet = running(**{f"i{n}": rng.randint(1, 8) for n in range(rng.randint(3, 9))})
        wanted, placed = counts(active, split, len(fleet)), place(active, split, fleet)
        run = {name: share.version if (share := placed.share_of(name)) else active for name in fleet}
        assert Counter(run.values()) == Counter(wanted)
        had = Counter(i.active_version for i in fleet.values())
        least = sum(max(0, count - had[version]) for version, count in wanted.items())
        assert sum(run[name] != i.active_version for name, i in fleet.items()) == least
        settled = ActiveRecord(active, 1, None, "s", 0.0, split=placed)
        assert not is_off(settled, fleet)
        assert is_off(settled, ["x", "y", "z"]), "a version of it has none"


def test_a_wish_is_read_and_checked() -> None:
    assert split_of({12: 90, 13: 10}, 12) == (12, SplitRecord((ShareRecord(13, 10.0),)))
    assert split_of({12: 10, 13: 90}, 12)[0] == 12, "what is active stays so"
    assert split_of({12: 10, 13: 90}, 5)[0] == 13, "else the one with most is"
    assert split_of({12: 50, 13: 50}, None, sticky="header:X-User", minimum=2) == (
        12,
        SplitRecord((ShareRecord(13, 50.0),), "header:x-user", 2),
    )
    for percents in ({12: 100.0}, {}, {12: 90.0, 13: 20.0}, {12: 110.0, 13: -10.0}, {12: float("nan"), 13: 50.0}):
        with refused("bad_split"):
            split_of(percents, 12)
    for sticky in ("user", "header:", "header:a b", "Key"):
        with refused("bad_split", match="choose key, session or header:NAME"):
            split_of({12: 50, 13: 50}, 12, sticky=sticky)
    with refused("bad_split"):
        split_of({12: 50, 13: 50}, 12, minimum=0)
    assert split_of({12: 100, 13: 0}, 12, shadow={13: 5})[1].shares == (ShareRecord(13, 0.0, shadow=5.0),)
    for shadow in ({12: 5.0}, {14: 5.0}, {13: 101.0}, {13: -1.0}):
        with refused("bad_split", match="up to 100 %"):
            split_of({12: 50, 13: 50}, 12, shadow=shadow)


def test_percentages_make_a_hundred_with_the_active_version_first() -> None:
    assert list(SplitRecord((ShareRecord(3, 10.0), ShareRecord(4, 25.0))).percents(2).items()) == [
        (2, 65.0),
        (3, 10.0),
        (4, 25.0),
    ]


# what the leader decides

ACTIVE = ActiveRecord(1, 5, 0, "before", 50.0, "f1")
TARGET = TargetRecord(1, "new", "test", 10.0, split=HALF)
SWAP = SwapRecord("new", 1, "prepare", ("a", "b"), 110.0, 100.0, split=PLACED)
VERSIONS = {
    v: VersionRecord(v, "ready", "", 0, "", None, None, "t", 1, 0.0, "", 0, fingerprint=f"f{v}") for v in (1, 2)
}
FLEET = running(a=1, b=1)
STAGED = {**FLEET, "a": replace(FLEET["a"], state="STAGED", swap_id="new", staged_version=2, staged_fingerprint="f2")}


def view(**changes: object) -> View:
    known = View(100.0, TARGET, "ready", SWAP, ACTIVE, STAGED, "f1", shared=VERSIONS)
    return replace(known, **changes)  # type: ignore[arg-type]


def step(**changes: object) -> Step:
    decision = decide(view(**changes))
    assert isinstance(decision, Step), decision
    return decision


def test_a_split_opens_with_the_version_of_each_participant() -> None:
    opened = step(swap=None, instances=FLEET)
    assert (opened.kind, opened.swap) == ("open", replace(SWAP, former=ACTIVE))
    assert (opened.swap.of("a").target, opened.swap.of("b").target) == (2, 1)
    found = depends_on(opened, Keys("m"))
    assert {Keys("m").version(1), Keys("m").version(2)} <= set(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instances": running(a=1)}, "2 instances or more"),
        ({"instances": {}}, "and 0 serve"),
        ({"shared": {}}, "version 2 does not exist"),
        ({"shared": {**VERSIONS, 2: replace(VERSIONS[2], state="retired")}}, "version 2 is retired"),
        ({"target_state": "publishing"}, "version 1 is publishing"),
        ({"changes": "w is new"}, "versions that one engine can run .w is new"),
    ],
)
def test_a_split_that_cannot_be_is_refused(changes: dict[str, object], reason: str) -> None:
    refused = step(**{"swap": None, "instances": FLEET, **changes})
    assert (refused.kind, refused.active) == ("refuse", None)
    assert re.search(reason, refused.swap.reason or "")


def test_it_commits_when_each_has_or_runs_its_version() -> None:
    commit = step()
    assert commit.active == ActiveRecord(1, 6, 0, "new", 100.0, "f1", PLACED)
    assert (commit.active.of("a").version, commit.active.of("a").fingerprint) == (2, "f2")
    assert (commit.active.of("b").version, commit.active.of("newcomer").version) == (1, 1)
    assert decide(view(instances=FLEET)) == Wait(10.0), "a has not staged"


@pytest.mark.parametrize(
    "b", [{"active_epoch": 4}, {"active_version": 3}, {"fingerprint": "odd"}], ids=["behind", "another", "damaged"]
)
def test_one_that_does_not_run_its_version_is_waited_for(b: dict[str, object]) -> None:
    assert decide(view(instances={**STAGED, "b": replace(STAGED["b"], **b)})) == Wait(10.0)  # type: ignore[arg-type]


def test_fingerprints_are_compared_by_version() -> None:
    odd = {**STAGED, "a": replace(STAGED["a"], staged_fingerprint="f1")}
    assert "instance a built other weights than were published" in (step(instances=odd).swap.reason or "")
    gone = {**VERSIONS, 2: replace(VERSIONS[2], state="retired")}
    assert step(shared=gone).swap.reason == "version 2 is no longer ready"


def test_a_rolling_split_tries_the_first_that_changes() -> None:
    """It is probed before it has traffic, and b is not touched."""
    rolling = replace(TARGET, mode="rolling", drain_s=3.0)
    opened = step(swap=None, instances=running(a=2, b=1, c=1), target=rolling, active=replace(ACTIVE, split=None))
    assert (opened.swap.mode, opened.swap.split) == ("rolling", replace(PLACED, shares=opened.swap.split.shares))  # type: ignore[union-attr]
    swap = replace(SWAP, mode="rolling", drain_s=3.0)
    tried = step(swap=swap)
    assert (tried.kind, tried.swap.canary) == ("try", "a")
    assert tried.active == replace(ACTIVE, trial=ShareRecord(2, 0.0, ("a",), "f2"))
    trial = replace(FLEET["a"], state="COMMITTING", swap_id="new", active_version=2, active_epoch=6, fingerprint="f2")
    trying = {"swap": tried.swap, "active": tried.active, "instances": {**FLEET, "a": trial}}
    asked = decide(view(**trying))
    assert isinstance(asked, Ask)
    assert (asked.canary.id, asked.swap.target) == ("a", 2)
    passed = step(**trying, probe=ProbeResult(True))
    assert passed.kind == "commit"
    assert passed.active is not None
    assert (passed.active.trial, passed.active.split) == (None, swap.split), "the share of the trial, grown"


def test_the_canary_of_a_split_that_grows_is_one_that_changes() -> None:
    """`a` runs the version already, and answers requests with it."""
    active = replace(ACTIVE, split=PLACED)
    grown = SplitRecord((ShareRecord(2, 60.0, ("a", "b"), "f2"),))
    swap = replace(SWAP, participants=("a", "b", "c"), mode="rolling", split=grown)
    fleet = running(a=2, b=1, c=1)
    fleet["b"] = replace(fleet["b"], state="STAGED", swap_id="new", staged_version=2, staged_fingerprint="f2")
    tried = step(active=active, instances=fleet, swap=swap)
    assert tried.swap.canary == "b"
    assert tried.active == replace(active, trial=ShareRecord(2, 0.0, ("b",), "f2")), "and the split stays as it is"
    settled = replace(SWAP, participants=("a", "c"), mode="rolling", split=PLACED)
    assert step(active=active, instances=running(a=2, c=1), swap=settled).kind == "commit", "who changed has left"


def test_percentages_change_without_a_trial() -> None:
    active = replace(ACTIVE, split=PLACED)
    fleet = {**FLEET, "a": replace(FLEET["a"], active_version=2, fingerprint="f2")}
    ten = replace(TARGET, id="ten", mode="rolling", split=SplitRecord((ShareRecord(2, 10.0),)))
    opened = step(target=ten, active=active, instances=fleet, swap=replace(SWAP, phase="done"))
    assert (opened.swap.mode, opened.swap.of("a").target) == ("together", 2)
    commit = step(target=ten, active=active, instances=fleet, swap=opened.swap)
    assert commit.kind == "commit"
    assert commit.active is not None
    assert commit.active.split == SplitRecord((ShareRecord(2, 10.0, ("a",), "f2"),))


def test_who_is_lost_may_be_left_out_while_each_version_has_enough() -> None:
    three = replace(SWAP, participants=("a", "b", "c"), on_lost="continue")
    without_c = step(swap=three)
    assert (without_c.kind, without_c.swap.participants) == ("leave", ("a", "b"))
    lost = step(swap=three, instances={"b": STAGED["b"], "c": replace(STAGED["b"], id="c")})
    assert (lost.kind, lost.swap.reason) == ("abort", "instance a is gone")


DONE = replace(SWAP, phase="done")
SPLIT = replace(ACTIVE, split=PLACED, swap_id="new")


def test_a_version_whose_instances_have_gone_is_placed_anew() -> None:
    assert decide(view(swap=DONE, active=SPLIT, instances=running(a=2, b=1))) == Wait()
    assert decide(view(swap=DONE, active=SPLIT, instances=running(b=1))) == Wait(), "there is one instance for two"
    left = {"swap": DONE, "active": SPLIT, "instances": running(b=1, c=1)}
    anew = step(**left)
    assert (anew.kind, anew.swap.id, anew.swap.phase) == ("open", "new+1", "prepare")
    assert anew.swap.split == SplitRecord((ShareRecord(2, 50.0, ("b",), "f2"),))
    assert anew.swap.answers(TARGET)
    assert not anew.swap.answers(replace(TARGET, id="newer"))
    follows = {**running(c=1), "b": replace(running(b=1)["b"], active_epoch=4)}
    assert decide(view(swap=DONE, active=SPLIT, instances=follows)) == Wait(), "b follows the commit still"


def test_a_placement_that_failed_is_tried_again_after_a_while() -> None:
    failed = replace(SWAP, id="new+1", phase="aborted", opened_at=100.0)
    left = {"swap": failed, "active": SPLIT, "instances": running(b=1, c=1)}
    assert decide(view(**left, lasted_s=1.0)) == Wait(REPLACE_S - 1.0)
    assert step(**left, lasted_s=REPLACE_S).swap.id == "new+2"


def test_the_placement_is_that_of_the_commit_whatever_was_asked_since() -> None:
    """The last wish was refused: the version it named has nothing to do with it."""
    other = TargetRecord(9, "refused", "test", 10.0)
    seen = {"target": other, "target_state": None, "swap": replace(SWAP, id="refused", phase="aborted", split=None)}
    anew = step(**seen, active=SPLIT, instances=running(b=1, c=1))
    assert (anew.swap.id, anew.swap.target, anew.swap.split is not None) == ("refused+1", 1, True)


# what an instance does


def test_an_instance_follows_the_version_of_its_share() -> None:
    a, b = FLEET["a"], FLEET["b"]
    assert act(a, Seen(ACTIVE, SWAP, {})) == Stage(SWAP.of("a"))
    assert act(b, Seen(ACTIVE, SWAP, {})) == Rest()
    committed = ActiveRecord(1, 6, 0, "new", 100.0, "f1", PLACED)
    commit = replace(SWAP, phase="commit")
    assert act(STAGED["a"], Seen(committed, commit, {})) == Flip(committed.of("a"))
    assert act(b, Seen(committed, commit, {})) == Serve(committed.of("b"))
    newcomer = InstanceRecord("n", "x")
    assert act(newcomer, Seen(committed, commit, {})) == Flip(committed.of("n"))
    assert committed.of("n").version == 1


# fleets


async def divide(coordinator: Coordinator, percents: dict[int, float], active: int = 1, **options: Any) -> SwapReport:
    version, split = split_of(percents, active)
    return await coordinator.activate(version, split=split, **options)


def runs(fleet: Fleet) -> Counter[int | None]:
    return Counter(engine.running for engine in fleet.engines.values())


async def test_versions_share_a_fleet_until_one_has_all(fleet: Fleet) -> None:
    coordinator = await fleet.serving("abcd")
    engines = list(fleet.engines.values())
    second = await fleet.publish(1.0)
    report = await divide(coordinator, {1: 75, second: 25}, requested_by="key ops (1)", reason="try it")
    assert (report.ok, report.epoch, report.version) == (True, 2, 1)
    _, committed, asked = await recent(fleet.store(), 3)
    shares = "version 1: 75 %, version 2: 25 %"
    assert (asked.action, asked.who, asked.reason, asked.outcome) == ("split", "key ops (1)", "try it", shares)
    assert (committed.action, shares in committed.outcome) == ("commit", True)
    assert runs(fleet) == {1: 3, 2: 1}
    flips = [len([c for c in e.calls if c[0] == "commit"]) for e in engines]
    assert sorted(flips) == [1, 1, 1, 2], "nobody else has flipped"
    staged = [len([c for c in e.calls if c[0] == "stage"]) for e in engines]

    assert (await divide(coordinator, {1: 70, second: 30})).ok
    assert [len([c for c in e.calls if c[0] == "stage"]) for e in engines] == staged, "a change of percent moves nobody"
    assert {p.record.active_epoch for p in fleet.participants.values()} == {3}

    assert (await divide(coordinator, {1: 25, second: 75})).ok
    assert runs(fleet) == {1: 1, 2: 3}
    assert (await coordinator.activate(second)).ok
    assert runs(fleet) == {2: 4}
    back = await coordinator.rollback()
    assert (back.ok, runs(fleet)) == (True, {1: 4})
    past = await past_swaps(fleet.store(), KEYS)
    assert [p.split is not None for p in past] == [False, False, True, True, True, False]
    assert past[2].split is not None
    assert [s.percent for s in past[2].split.shares] == [75.0]
    assert {p.verified for p in past} == {True}


async def test_a_version_is_withdrawn_when_no_instance_is_to_run_it_any_more(fleet: Fleet) -> None:
    coordinator = await fleet.serving("abcd")
    second = await fleet.publish(1.0)
    for percent in (75, 25):
        assert (await divide(coordinator, {1: 100 - percent, second: percent})).ok
    assert runs(fleet) == {1: 3, second: 1}, "two have gone back to an older version"
    assert not any(member.withdraws for member in fleet.participants.values())
    assert (await coordinator.activate(1)).ok
    assert sum(member.withdraws for member in fleet.participants.values()) == 1


async def test_a_split_ends_and_its_versions_stay_until_then(fleet: Fleet) -> None:
    coordinator = await fleet.serving("ab", keep=1)
    assert (await coordinator.activate(await fleet.publish(1.0))).ok
    assert (await divide(coordinator, {2: 90, 1: 10}, 2)).ok
    for value in (2.0, 3.0):
        await fleet.publish(value)
    assert runs(fleet) == {2: 1, 1: 1}
    assert (await coordinator.activate(2)).ok
    assert runs(fleet) == {2: 2}


async def test_a_dead_instance_of_a_version_is_replaced_and_a_newcomer_evens_it_out(fleet: Fleet) -> None:
    coordinator = await fleet.serving("abc")
    second = await fleet.publish(1.0)
    assert (await divide(coordinator, {1: 90, second: 10})).ok
    candidate = next(name for name, engine in fleet.engines.items() if engine.running == second)
    await fleet.participants[candidate].stop()
    del fleet.engines[candidate]
    await eventually(lambda: runs(fleet) == {1: 1, 2: 1})
    await eventually(lambda: {p.record.state for n, p in fleet.participants.items() if n != candidate} == {"SERVING"})
    await fleet.instance("d", Engine())
    await eventually(lambda: runs(fleet) == {1: 2, 2: 1})
    store = fleet.store()

    async def newest_is_a_placement() -> bool:  # it is kept when its swap ends, after the instances run their versions
        newest = (await past_swaps(store, KEYS))[0]
        return (newest.requested_by, newest.split is not None) == ("placement", True)

    await eventually(newest_is_a_placement)
