"""Releases: what one does next, from its record and from what there is, and how two gateways carry it out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from loadtest.simulation.clock import Clock, simulated
from loadtest.simulation.store import Client, ModelStore
from server.errors import ServerError
from server.gateway.access.records import By
from server.gateway.observe.stats import Finished
from server.gateway.release.evidence import Observer, Watched, summed
from server.gateway.release.judge import Evidence
from server.gateway.release.policy import Policy, parse
from server.gateway.release.progress import Commit, Evaluate, Share, Split, Wait, World, Write, advance
from server.gateway.release.records import ReleaseKeys, ReleaseRecord
from server.gateway.release.runner import Releases
from server.gateway.release.statistics import Tally
from server.gateway.wire.bodies import Usage
from tests.server.refusals import refuses
from tests.waiting import eventually, stays
from weightsync.errors import swap_aborted

TWO_STEPS = parse(b"""
conditions: [{metric: errors, max: 0.1}]
steps: [{traffic: 0, shadow: 20, for: 10s}, {traffic: 50, for: 10s}]
""")
IMPATIENT = msgspec.structs.replace(TWO_STEPS, on_hold="rollback", hold="1m")
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


def after(record: ReleaseRecord, seen: World, policy: Policy = TWO_STEPS) -> ReleaseRecord:
    action = advance(record, policy, seen)
    assert isinstance(action, Write)
    return action.record


def test_it_goes_step_by_step_to_the_end() -> None:
    record = after(START, world(100, {}))
    assert record.state == "applying"
    assert advance(record, TWO_STEPS, world(100, {})) == Split(Share(0.0, 20.0))
    assert isinstance(advance(record, TWO_STEPS, world(100, None)), Wait)  # the swap is under way
    record = after(record, world(101, SHADOWED))
    assert (record.state, record.step, record.since) == ("judging", 0, 101)
    assert isinstance(advance(record, TWO_STEPS, world(110.9, SHADOWED, GOOD)), Wait)
    record = after(record, world(111, SHADOWED, GOOD))
    assert (record.state, record.step) == ("applying", 1)
    assert advance(record, TWO_STEPS, world(111, SHADOWED)) == Split(Share(50.0))
    record = after(after(record, world(112, HALF)), world(122, HALF, GOOD))
    assert record.state == "finishing"
    assert record.findings[0].startswith("kept: errors max 0.1")
    assert advance(record, TWO_STEPS, world(122, HALF)) == Commit(13)
    record = after(record, world(123, {}, active=13))
    assert (record.state, record.ended_at, record.reason) == ("done", 123, "")


@pytest.mark.parametrize("state", ["judging", "held"])
def test_harm_takes_it_back(state: Any) -> None:
    record = replace(START, state=state, step=1)
    record = after(record, world(101, HALF, BAD))
    assert (record.state, record.since) == ("rolling_back", 101)
    assert "errors max 0.1" in record.reason
    assert record.findings[0].startswith("harmed")
    assert advance(record, TWO_STEPS, world(101, HALF)) == Commit(12)
    ended = after(record, world(102, {}))
    assert (ended.state, ended.reason, ended.ended) == ("rolled_back", record.reason, True)


def test_it_waits_for_what_it_cannot_judge_and_goes_on_when_it_can() -> None:
    record = replace(START, state="judging", step=1)
    assert isinstance(advance(record, TWO_STEPS, world(109, HALF)), Wait)
    held = after(record, world(110, HALF))
    assert (held.state, held.since) == ("held", 110)
    assert "0 of 100 answers" in held.reason
    assert isinstance(advance(held, TWO_STEPS, world(5000, HALF)), Wait)
    assert after(held, world(5000, HALF, GOOD)).state == "finishing"


def test_a_clock_that_is_set_back_shortens_no_step_and_hides_no_harm() -> None:
    record = replace(START, state="judging", step=1, since=5000.0)
    assert isinstance(advance(record, TWO_STEPS, world(100, HALF, GOOD)), Wait)
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


# two gateways on one store: one leads, both count; the fleet is a double, which can refuse

POLICY = """
conditions: [{metric: errors, max_increase: 0.05}]
steps: [{traffic: 10, for: 0s}, {traffic: 50, for: 0s}]
"""


class FakeFleet:
    """Does at once what it is asked for, unless it is told to refuse."""

    def __init__(self) -> None:
        self.active = 12
        self.shares: dict[int, Share] = {}
        self.versions = {12, 13}
        self.refuses: set[str] = set()
        self.done: list[str] = []
        self.verdict = ""

    async def serving(self) -> tuple[int | None, Mapping[int, Share] | None]:
        return self.active, dict(self.shares)

    async def instances(self) -> int:
        return 2

    async def ready(self, version: int) -> bool:
        return version in self.versions

    async def split(self, record: ReleaseRecord, share: Share, policy: Policy) -> None:
        if "split" in self.refuses:
            raise swap_aborted(record.version, "i2 is on fire")
        self.shares = {record.version: share}
        self.done.append(f"split {share.traffic:g}")

    async def commit(self, record: ReleaseRecord, version: int) -> None:
        if f"commit {version}" in self.refuses:
            raise swap_aborted(version, "i2 is on fire")
        self.active, self.shares = version, {}
        self.done.append(f"commit {version}")

    async def evaluate(self, record: ReleaseRecord, policy: Policy) -> str:
        if "evaluate" in self.refuses:
            raise ServerError("nobody scores")
        self.done.append("evaluate")
        return self.verdict


class Two:
    """Two gateways; the first leads until it is killed."""

    def __init__(self, clock: Clock) -> None:
        self.store, self.fleet, self.leader = ModelStore(clock), FakeFleet(), 0
        self.clients = [Client(self.store), Client(self.store)]
        self.observers = [Observer(), Observer()]
        self.releases = [
            Releases(self.clients[n], "m", self.fleet, observer, lambda n=n: self.leader == n)  # type: ignore[misc]
            for n, observer in enumerate(self.observers)
        ]
        self.dead: Releases | None = None

    async def __aenter__(self) -> None:
        self.tasks = [asyncio.create_task(each.run()) for each in self.releases]

    async def __aexit__(self, *_: object) -> None:
        for number in range(2):
            await self.kill(number)

    async def kill(self, number: int) -> None:
        self.dead = self.releases[number]
        self.tasks[number].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.tasks[number]

    @property
    def record(self) -> ReleaseRecord:
        found = self.releases[1].current
        assert found is not None
        return found

    async def until(self, *states: str, step: int | None = None) -> ReleaseRecord:
        def there() -> bool:
            seen = [each.current for each in self.releases if each is not self.dead]
            return all(r is not None and r.state in states and step in (None, r.step) for r in seen)

        await eventually(there)
        return self.record

    def answer(self, version: int, errors: int, of: int) -> None:
        """Half of them by each gateway."""
        for number in range(of):
            status = 500 if number < errors else 200
            usage = Usage(3, 5) if status == 200 else None
            done = Finished("r", "POST", "/generate", status, None, "k", 0.0, 0.1, first_version=version,
                            last_version=version, drawn_version=version, usage=usage)  # fmt: skip
            self.observers[number % 2].end(done)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def two(clock: Clock) -> Two:
    return Two(clock)


@simulated
async def test_a_good_version_takes_over_step_by_step(clock: Clock, two: Two) -> None:
    await two.releases[1].start(13, POLICY, By("somebody"))  # whoever is asked, the leader carries it on
    for step in range(2):
        await two.until("held", step=step)  # nobody has answered anything yet
        assert "0 of 100 answers of the candidate" in two.record.reason
        two.answer(12, 1, 600)
        two.answer(13, 1, 300)
    record = await two.until("done")
    assert two.fleet.done == ["split 10", "split 50", "commit 13"]
    assert (record.version, record.stable, record.requested_by, record.ended) == (13, 12, "somebody", True)
    assert record.findings[0].startswith("kept: errors max increase 0.05")

    await eventually(lambda: not two.store.list(ReleaseKeys("m").evidence)[0])


@simulated
async def test_a_gateway_stops_though_there_is_news(clock: Clock, two: Two) -> None:
    """A change and the end in one turn of the loop: the release must not wait for the next change."""
    waiting = asyncio.create_task(two.releases[0]._until_changed(60))
    await asyncio.sleep(0)
    two.releases[0]._changed.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@simulated
async def test_one_that_was_cut_off_does_not_lead_by_what_it_knew(clock: Clock, two: Two) -> None:
    two.clients[0].latency_s = 0.5
    await two.releases[0].start(13, POLICY, By("somebody"))
    await two.until("applying")
    two.clients[1].away = True
    await two.releases[0].cancel(By("somebody"))
    await eventually(lambda: two.releases[0].current is not None and two.releases[0].current.ended)
    done = list(two.fleet.done)
    two.leader, two.clients[1].away = 1, False
    await two.until("rolled_back")
    await stays(lambda: two.fleet.done == done, 5)


@pytest.mark.parametrize(("refused", "done"), [("split", []), ("commit 13", ["split 50", "commit 12"])])
@simulated
async def test_a_fleet_that_refuses_keeps_the_stable_version(
    clock: Clock, two: Two, refused: str, done: list[str]
) -> None:
    two.fleet.refuses = {refused}
    await two.releases[0].start(13, "steps: [{traffic: 50, for: 0s}]", By("somebody"))
    record = await two.until("rolled_back")
    assert "i2 is on fire" in record.reason
    assert (two.fleet.active, two.fleet.done) == (12, done)


@simulated
async def test_an_operator_may_cancel_it(clock: Clock, two: Two) -> None:
    with refuses(409, match="No release"):
        await two.releases[1].cancel(By("me"))
    await two.releases[0].start(13, POLICY, By("somebody"))
    await two.until("held")
    await two.releases[1].cancel(By("me", "it is Friday"))
    record = await two.until("rolled_back")
    assert record.reason == "cancelled by me: it is Friday"


@pytest.mark.parametrize("verdict", ["", "sums: math 0.2, which is below 0.8"])
@simulated
async def test_the_evaluation_decides_before_any_traffic(clock: Clock, two: Two, verdict: str) -> None:
    two.fleet.verdict = verdict
    evaluated = "rewards: {math: {}}\nevaluation: [{name: sums, by: math, min: 0.8}]\n"
    await two.releases[0].start(13, evaluated + "steps: [{traffic: 10, for: 0s}]", By("somebody"))
    record = await two.until("done", "rolled_back")
    assert two.fleet.done[:2] == ["split 0", "evaluate"]
    assert two.fleet.done[2:] == (["commit 12"] if verdict else ["split 10", "commit 13"])
    assert record.reason == verdict


@pytest.mark.parametrize("impatient", [False, True])
@simulated
async def test_an_evaluation_that_nobody_can_make_holds_it(clock: Clock, two: Two, impatient: bool) -> None:
    two.fleet.refuses = {"evaluate"}
    evaluated = "rewards: {math: {}}\nevaluation: [{name: sums, by: math, min: 0.8}]\n"
    evaluated += "on_hold: rollback\nhold: 0s\n" if impatient else ""
    await two.releases[0].start(13, evaluated + "steps: [{traffic: 10, for: 0s}]", By("somebody"))
    if impatient:
        assert "nobody scores" in (await two.until("rolled_back")).reason
        return
    await two.until("evaluating")
    await eventually(lambda: two.record.reason == "nobody scores")
    two.fleet.refuses = set()
    assert (await two.until("done")).reason == ""


@simulated
async def test_what_serves_already_is_not_released(clock: Clock, two: Two) -> None:
    """admin/test_releases.py has what else cannot begin."""
    with refuses(409, match="active already"):
        await two.releases[0].start(12, POLICY, By("me"))


@simulated
async def test_findings_of_the_step_that_is_judged(clock: Clock, two: Two) -> None:
    await two.releases[0].start(13, POLICY, By("me"))
    await two.until("held")
    two.answer(13, 3, 60)

    async def known() -> bool:
        finding, *_ = await two.releases[1].findings()
        return finding.text == "errors max increase 0.05: 60 of 100 answers of the candidate"

    assert await eventually(known)


def test_only_answers_of_one_of_the_two_versions_count() -> None:
    observer = Observer()
    observer.observe("errors", 1.0, 13)
    assert observer.taken() is None
    observer.watch(Watched("r", 0, frozenset({12, 13})))
    observer.observe("errors", 1.0, 11)
    observer.observe("errors", 1.0, None)
    observer.observe("errors", float("nan"), 13)
    assert observer.taken() is None
    crossed = Finished("r", "POST", "/generate", 200, None, "k", 0.0, 0.1, first_version=12, last_version=13,
                       drawn_version=13, usage=Usage(1, 5))  # fmt: skip
    observer.end(crossed)
    _, record = observer.taken() or (None, None)
    assert record is not None
    assert {(each.metric, each.total) for each in record.counted} == {("arrived", 0.0), ("left", 0.0)}
    observer.observe("errors", 1.0, 13, "shadow")
    observer.observe("errors", 0.0, 12)
    observer.lose("reward/math", "nobody answers")
    _, record = observer.taken() or (None, None)
    assert record is not None
    policy = parse("""
rewards: {math: {}}
steps:
  - traffic: 10
    shadow: 10
    for: 1
    conditions:
      - {metric: errors, max: 0.1}
      - {metric: errors, max: 0.1, answers: live}
      - {metric: reward/math, min: 0.1}
""")
    evidence = summed([record, record], policy.of_step(0), 13, 12)
    assert (evidence["errors"].candidate.count, evidence["errors"].stable.count) == (2, 2)
    assert evidence["errors@live"].candidate.count == 0
    assert evidence["reward/math"].lost == "nobody answers"
    assert observer.taken() is None
    observer.again()
    assert observer.taken() is not None
    observer.watch(Watched("r", 1, frozenset({12, 13})))
    assert observer.taken() is None
