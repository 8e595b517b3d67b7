"""The swap's decisions: each rule by itself, then whole fleets under schedules nobody would think of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    Record,
    SwapRecord,
    TargetRecord,
    VersionState,
)
from weightsync.swap_state import CONFIRM_S, Step, View, Wait, decide, depends_on, in_flight

TARGET = TargetRecord(2, "swap-2", "test", deadline_s=10.0)
SWAP = SwapRecord("swap-2", 2, "prepare", ("a", "b"), deadline=110.0, opened_at=100.0)
ACTIVE = ActiveRecord(1, 5, 0, "swap-1", 50.0)
STAGED = {
    name: InstanceRecord(name, "x", "STAGED", 1, 5, staged_version=2, swap_id="swap-2", fingerprint="f", path="packed")
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
    assert opened.swap == replace(SWAP, participants=("a", "c", "e"))


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


def test_the_first_commit_and_the_commit_of_what_is_active() -> None:
    assert step(active=None).active == ActiveRecord(2, 1, None, "swap-2", 100.0)
    assert step(active=replace(ACTIVE, version=2, previous=1)).active == ActiveRecord(2, 6, 1, "swap-2", 100.0)


@pytest.mark.parametrize(
    "late", [{"state": "STAGING"}, {"staged_version": 1}, {"swap_id": "other"}, {"state": "SERVING", "swap_id": None}]
)
def test_it_waits_for_the_last_one_until_the_deadline(late: dict[str, object]) -> None:
    assert decide(view(instances=instances(**late))) == Wait(110.0)
    aborted = step(instances=instances(**late), now=110.0)
    assert (aborted.kind, aborted.swap.phase) == ("abort", "aborted")
    assert aborted.swap.reason == "not staged within 10 s by b"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instances": {"a": STAGED["a"]}}, "instance b is gone"),
        ({"instances": instances(state="TORN")}, "instance b is TORN"),
        ({"instances": instances(state="DRAINING")}, "instance b is DRAINING"),
        ({"instances": instances(fingerprint="g")}, "fingerprints differ"),
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


def test_an_error_of_an_earlier_swap_does_not_count() -> None:
    stale = instances(state="SERVING", swap_id="swap-1", error=ErrorInfo("c", "old"))
    assert decide(view(instances=stale)) == Wait(110.0)


def test_fingerprints_are_compared_among_those_that_build_the_same_way() -> None:
    assert step(instances=instances(fingerprint="g", path="shadow")).kind == "commit"
    assert step(instances=instances(fingerprint=None)).kind == "commit"


def test_a_fleet_of_none_commits() -> None:
    assert step(swap=replace(SWAP, participants=()), instances={}).kind == "commit"


COMMITTED = ActiveRecord(2, 6, 1, "swap-2", 105.0)


def confirmed(**changes: object) -> dict[str, InstanceRecord]:
    flipped = {name: replace(i, state="SERVING", active_epoch=6, active_version=2) for name, i in STAGED.items()}
    return {**flipped, "b": replace(flipped["b"], **changes)}  # type: ignore[arg-type]


def test_a_commit_is_done_when_all_have_flipped() -> None:
    swap = replace(SWAP, phase="commit")
    assert decide(view(swap=swap, active=COMMITTED)) == Wait(105.0 + CONFIRM_S)
    done = step(swap=swap, active=COMMITTED, instances=confirmed())
    assert (done.kind, done.swap.phase, done.swap.reason) == ("finish", "done", None)


@pytest.mark.parametrize("fleet", [confirmed(state="TORN", active_epoch=5), {"a": confirmed()["a"]}])
def test_a_commit_stands_though_one_could_not_follow(fleet: dict[str, InstanceRecord]) -> None:
    done = step(swap=replace(SWAP, phase="commit"), active=COMMITTED, instances=fleet)
    assert (done.swap.phase, done.swap.reason) == ("done", "not flipped: b")


def test_a_commit_does_not_wait_for_ever() -> None:
    done = step(swap=replace(SWAP, phase="commit"), active=COMMITTED, now=105.0 + CONFIRM_S)
    assert done.swap.reason == "no confirmation from a, b"


# -- schedules

KEYS = Keys("m")


@dataclass
class Fleet:
    """A store of records with revisions, instances that follow the protocol, and coordinators with stale views."""

    now: float = 0.0
    records: dict[str, tuple[Record, int]] = field(default_factory=dict)
    revision: int = 0
    versions: dict[int, VersionState] = field(default_factory=dict)
    decided: list[tuple[Step | Wait, dict[str, int]] | None] = field(default_factory=lambda: [None, None])
    commits: list[ActiveRecord] = field(default_factory=list)
    outcomes: dict[str, set[str]] = field(default_factory=dict)
    asked: int = 0

    def get(self, key: str) -> Record | None:
        return self.records[key][0] if key in self.records else None

    def put(self, key: str, record: Record) -> None:
        self.revision += 1
        self.records[key] = (record, self.revision)

    def drop(self, key: str) -> None:
        self.revision += 1
        self.records.pop(key, None)

    @property
    def swap(self) -> SwapRecord | None:
        return self.get(KEYS.swap)  # type: ignore[return-value]

    @property
    def instances(self) -> dict[str, InstanceRecord]:
        return {r.id: r for r, _ in self.records.values() if isinstance(r, InstanceRecord)}

    def look(self, who: int) -> None:
        """A coordinator reads everything and decides; what it acts on later may be out of date."""
        swap, target = self.swap, self.get(KEYS.target)
        assert target is None or isinstance(target, TargetRecord)
        number = swap.target if swap and in_flight(swap) else target.version if target else 0
        seen = View(self.now, target, self.versions.get(number), swap, self.get(KEYS.active), self.instances)  # type: ignore[arg-type]
        revisions = {key: revision for key, (_, revision) in self.records.items()}
        self.decided[who] = (decide(seen), revisions)

    def act(self, who: int) -> None:
        """It writes what it decided, if nothing it depends on has changed."""
        plan, self.decided[who] = self.decided[who], None
        if plan is None or isinstance(plan[0], Wait):
            return
        step, seen = plan
        current = {key: revision for key, (_, revision) in self.records.items()}
        if any(seen.get(key, 0) != current.get(key, 0) for key in depends_on(step, KEYS) if "versions" not in key):
            return
        if step.kind in ("open", "commit") and self.versions.get(step.swap.target) != "ready":
            return
        self.check(step)
        self.put(KEYS.swap, step.swap)
        if step.active is not None:
            self.put(KEYS.active, step.active)
            self.commits.append(step.active)

    def check(self, step: Step) -> None:
        before, after = self.swap, step.swap
        self.outcomes.setdefault(after.id, set()).add(after.phase)
        assert not {"commit", "aborted"} <= self.outcomes[after.id], "committed and aborted"
        if before is not None and before.id == after.id:
            assert after.phase in {"prepare": ("commit", "aborted"), "commit": ("done",)}.get(before.phase, ()), (
                "backwards"
            )
        else:
            assert not in_flight(before), "two swaps at once"
        if step.kind == "commit":
            assert step.active is not None
            assert step.active.epoch == len(self.commits) + 1
            assert step.active.version == after.target
            assert all(self.instances[name].staged_version == after.target for name in after.participants)
            assert all(self.instances[name].state == "STAGED" for name in after.participants)

    # -- what the world does

    def join(self, name: str) -> None:
        if name not in self.instances:
            self.put(KEYS.instance(name), InstanceRecord(name, "x", "SERVING"))

    def answer(self, name: str, *, error: bool) -> None:
        instance, swap = self.instances.get(name), self.swap
        if instance is None or swap is None or swap.phase != "prepare" or name not in swap.participants:
            return
        if instance.swap_id == swap.id:
            return
        staged = {"state": "STAGED", "staged_version": swap.target, "error": None}
        failed = {"state": "SERVING", "staged_version": None, "error": ErrorInfo("c", "m")}
        self.put(KEYS.instance(name), replace(instance, swap_id=swap.id, **(failed if error else staged)))  # type: ignore[arg-type]

    def flip(self, name: str, *, torn: bool) -> None:
        instance, active = self.instances.get(name), self.get(KEYS.active)
        if instance is None or not isinstance(active, ActiveRecord) or instance.active_epoch == active.epoch:
            return
        changes = (
            {"state": "TORN"} if torn else {"state": "SERVING", "active_epoch": active.epoch, "staged_version": None}
        )
        self.put(KEYS.instance(name), replace(instance, **changes))  # type: ignore[arg-type]

    def ask(self, version: int) -> None:
        self.asked += 1
        self.put(KEYS.target, TargetRecord(version, f"t{self.asked}", "test", deadline_s=5.0))

    def settle(self) -> None:
        """From here on nothing fails, and time goes by: whatever the state, the last wish must get its answer."""
        for _ in range(40):
            for name in list(self.instances):
                self.answer(name, error=False)
                self.flip(name, torn=False)
            self.look(0)
            self.act(0)
            self.now += CONFIRM_S / 2


names = st.sampled_from(["a", "b"])
PREPARED = [("ask", 2), ("turn", 0), ("stage", "a"), ("stage", "b")]
LAGGING = [("ask", 2), ("look", 1), ("turn", 0)]  # the other coordinator is about to open it too
DECIDED = [*PREPARED, ("look", 0)]  # and then anything may happen before it acts
COMMITTED_TOO = [*PREPARED, ("turn", 0), ("flip", "a"), ("flip", "b")]
beginnings = st.sampled_from(
    [[], LAGGING, PREPARED[:2], PREPARED, DECIDED, COMMITTED_TOO, [*COMMITTED_TOO, ("turn", 1), *DECIDED]]
)
actions = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 4)),
    st.tuples(st.just("look"), st.integers(0, 1)),
    st.tuples(st.just("act"), st.integers(0, 1)),
    st.tuples(st.just("turn"), st.integers(0, 1)),
    st.tuples(st.just("join"), names),
    st.tuples(st.just("die"), names),
    st.tuples(st.just("stage"), names),
    st.tuples(st.just("stage"), names),
    st.tuples(st.just("refuse"), names),
    st.tuples(st.just("flip"), names),
    st.tuples(st.just("tear"), names),
    st.tuples(st.just("retire"), st.integers(1, 4)),
    st.tuples(st.just("time"), st.integers(1, 40)),
)


@settings(max_examples=400, deadline=None)
@given(beginnings, st.lists(actions, max_size=40))
def test_no_schedule_breaks_the_transaction(
    beginning: list[tuple[str, int | str]], schedule: list[tuple[str, int | str]]
) -> None:
    fleet = Fleet(versions={1: "ready", 2: "ready", 3: "ready"})
    fleet.join("a")
    fleet.join("b")
    perform = {
        "ask": fleet.ask,
        "look": fleet.look,
        "act": fleet.act,
        "turn": lambda who: (fleet.look(who), fleet.act(who)),
        "join": fleet.join,
        "die": lambda name: fleet.drop(KEYS.instance(name)),
        "stage": lambda name: fleet.answer(name, error=False),
        "refuse": lambda name: fleet.answer(name, error=True),
        "flip": lambda name: fleet.flip(name, torn=False),
        "tear": lambda name: fleet.flip(name, torn=True),
        "retire": lambda version: fleet.versions.update({version: "retired"}),
        "time": lambda seconds: setattr(fleet, "now", fleet.now + seconds),
    }
    for name, argument in [*beginning, *schedule]:
        perform[name](argument)  # type: ignore[operator]
    fleet.settle()
    swap, target = fleet.swap, fleet.get(KEYS.target)
    if target is not None:
        assert swap is not None
        assert isinstance(target, TargetRecord)
        assert swap.id == target.id, "the last wish got no answer"
        assert swap.phase in ("done", "aborted"), "dead end"
    assert [c.epoch for c in fleet.commits] == list(range(1, len(fleet.commits) + 1))
    for earlier, later in zip(fleet.commits, fleet.commits[1:], strict=False):
        assert later.previous == (earlier.previous if later.version == earlier.version else earlier.version)
    if fleet.commits:
        assert fleet.get(KEYS.active) == fleet.commits[-1], "a commit was lost"
