"""Releases of several gateways under random schedules: the judgement, the progress and the runner as in production.

Each gateway counts answers and follows the release by a connection of its own to a simulated store; one of them leads,
until another does. The fleet is a double, which takes its time and may refuse. Candidates either fail no request or
fail all, so what must become of them is known.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from loadtest.histories.rules import require
from loadtest.simulation.clock import Clock
from loadtest.simulation.schedules import AwaitingWorld, explore
from loadtest.simulation.store import Client, ModelStore, Puts
from server.errors import HttpError, ServerError
from server.gateway.access.records import By
from server.gateway.release import judge, runner
from server.gateway.release.evidence import Observer
from server.gateway.release.policy import Policy, parse
from server.gateway.release.progress import Share
from server.gateway.release.records import ReleaseKeys, ReleaseRecord
from server.gateway.release.runner import Releases
from server.gateway.release.statistics import LEAST
from weightsync.errors import swap_aborted

from .rules import check_found, check_happened, without

TEXT = """
rewards: {math: {}}
evaluation: [{name: sums, by: math, min: 0.8}]
conditions: [{metric: errors, max_increase: 0.05}]
steps: [{traffic: 10, for: 4s}, {traffic: 50, for: 4s}]
"""
POLICY = parse(TEXT)
KEYS = ReleaseKeys("m")
NEXT = {
    "evaluating": {"evaluating", "applying", "rolling_back", "cancelled"},
    "applying": {"judging", "rolling_back", "cancelled"},
    "judging": {"applying", "held", "finishing", "rolling_back", "cancelled"},
    "held": {"applying", "finishing", "rolling_back", "cancelled"},
    "finishing": {"done", "rolling_back", "cancelled"},
    "rolling_back": {"rolled_back", "cancelled"},
}
SCHEDULES, FINDS_WITHIN = 60, 300
HAPPENED = {"begun": 40, "held": 15, "rolled_back": 25, "done": 3, "cancelled": 15}


class Fleet:
    """The fleet that serves. A change takes a while, in which it goes on without the gateway that asked for it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.active, self.published = clock, 1, 1
        self.shares: dict[int, Share] = {}
        self.takes_s, self.refuses, self.changing = 0.1, False, 0
        self.touched = False  # by an operator, since the last release began

    async def change(self, active: int, shares: dict[int, Share]) -> None:
        self.changing += 1
        refused = self.refuses
        await asyncio.sleep(self.takes_s)
        self.changing -= 1
        if refused:
            raise swap_aborted(active, "i2 is on fire")
        self.active, self.shares = active, shares


class Gateway:
    """`Releases`, with what it asks of the fleet."""

    def __init__(self, world: Releasing) -> None:
        self.fleet, self.client, self.observer = world.fleet, Client(world.store), Observer()
        self.releases = Releases(self.client, "m", self, self.observer, lambda: world.leader is self)
        self.task = world.start(self.releases.run())

    async def serving(self) -> tuple[int | None, Mapping[int, Share] | None]:
        fleet = self.fleet
        return await self.client._call(lambda: (fleet.active, None if fleet.changing else dict(fleet.shares)))

    async def instances(self) -> int:
        return 2

    async def ready(self, version: int) -> bool:
        return await self.client._call(lambda: version <= self.fleet.published)

    async def split(self, record: ReleaseRecord, share: Share, policy: Policy) -> None:
        await self._change(record.stable, {record.version: share})

    async def commit(self, record: ReleaseRecord, version: int) -> None:
        await self._change(version, {})

    async def evaluate(self, record: ReleaseRecord, policy: Policy) -> str:
        await asyncio.sleep(self.fleet.takes_s)
        if self.fleet.refuses:
            raise ServerError("no scorer answers")
        return ""

    async def _change(self, active: int, shares: dict[int, Share]) -> None:
        await self.client._call(lambda: None)
        await asyncio.shield(asyncio.ensure_future(self.fleet.change(active, shares)))


class Releasing(AwaitingWorld):
    moves: ClassVar = {
        "let_time_pass": 40, "answer": 30, "begin": 5, "cancel": 1.5, "interfere": 0.5, "lead": 3, "restart": 1,
        "outage": 0.5, "cut_off": 2, "be_slow": 2, "refuse": 2,
    }  # fmt: skip
    steps = 80

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        self.store, self.fleet = ModelStore(clock), Fleet(clock)
        self.look_at_writes(self.store, self.check_write)
        self.bad: set[int] = set()
        self.given: dict[tuple[str, int], int] = {}  # answers of the candidate, by release and step
        self.leader: Gateway | None = None
        self.gateways = [Gateway(self) for _ in range(rng.choice((2, 2, 3)))]
        self.leader = self.gateways[0]

    @classmethod
    def opening(cls, rng: random.Random) -> list[str]:
        return ["let_time_pass", "begin"]

    @property
    def record(self) -> ReleaseRecord | None:
        found = self.store.get(KEYS.current)
        return ReleaseRecord.from_json(found.value) if found is not None else None

    def one(self) -> Gateway:
        return self.rng.choice(self.gateways)

    def let_time_pass(self) -> None:
        self.wait(self.rng.choice((0.05, 0.3, 1.0, 1.0, 3.0)))

    def begin(self) -> None:
        self.fleet.published += 1
        version = self.fleet.published
        if self.rng.random() < 0.5:
            self.bad.add(version)
        try:
            self.do(self.one().releases.start(version, TEXT, By("somebody")))
        except HttpError as refused:
            if refused.status != 409:
                raise
            return
        self.fleet.touched = False
        self.seen["begun"] += 1

    def answer(self) -> None:
        """Some of each version, by one gateway."""
        gateway, record, count = self.one(), self.record, self.rng.choice((1, 20, 60, 150))
        if record is None or (share := self.fleet.shares.get(record.version)) is None or not share.traffic:
            return
        watched = gateway.observer.watched
        if watched is not None and watched.release == record.id:
            self.given[record.id, watched.step] = self.given.get((record.id, watched.step), 0) + count
        for _ in range(count):
            gateway.observer.observe("errors", float(record.version in self.bad), record.version)
            gateway.observer.observe("errors", 0.0, record.stable)

    def cancel(self) -> None:
        try:
            self.do(self.one().releases.cancel(By("somebody")))
            self.seen["cancelled"] += 1
        except HttpError as refused:
            if refused.status != 409:
                raise

    def interfere(self) -> None:
        """An operator makes another version active."""
        self.fleet.published += 1
        self.fleet.active, self.fleet.shares, self.fleet.touched = self.fleet.published, {}, True

    def lead(self) -> None:
        self.leader = self.one()
        self.leader.client.away = False  # its lease is one of the store's

    def restart(self) -> None:
        """Counts that the gateway has not written are gone."""
        gone = self.gateways.pop(self.rng.randrange(len(self.gateways)))
        gone.task.cancel()
        self.wait(0.0)
        self.gateways.append(Gateway(self))
        if self.leader is gone:
            self.leader = self.one()

    def outage(self) -> None:
        self.store.up = not self.store.up

    def cut_off(self) -> None:
        client = self.one().client
        client.away = not client.away

    def be_slow(self) -> None:
        client = self.one().client
        client.latency_s, client.lag_s = self.rng.choice((0.001, 0.05, 0.5)), self.rng.choice((0.001, 0.3, 2.0))
        self.fleet.takes_s = self.rng.choice((0.05, 1.0, 4.0))

    def refuse(self) -> None:
        self.fleet.refuses = not self.fleet.refuses

    # what must hold

    def check_write(self, puts: Puts) -> None:
        if (raw := puts.get(KEYS.current)) is None:
            return
        before, after = self.record, ReleaseRecord.from_json(raw)
        self.seen[after.state] += 1
        if before is None or before.id != after.id:
            require(before is None or before.ended, "a release begins while another is under way")
            require(after.state == "evaluating", f"a release begins {after.state}")
            return
        require(after.state in NEXT.get(before.state, ()), f"from {before.state} to {after.state}")
        if before.state == "judging" and after.state in ("applying", "finishing", "held"):
            lasted = self.clock.now - before.since
            require(lasted >= POLICY.steps[before.step].seconds, f"step {before.step} lasted {lasted:.2f} s")
        if before.state in ("judging", "held") and after.state in ("applying", "finishing"):
            self._check_passed(before, after)
        if after.state == "rolling_back" and "over the bound" in after.reason:
            require(after.version in self.bad, "a version that does no harm is taken back for harm")

    def _check_passed(self, before: ReleaseRecord, after: ReleaseRecord) -> None:
        require(after.step == before.step + (after.state == "applying"), "a step was left out")
        require(before.version not in self.bad, "a version that does harm has passed a step")
        answers = self.given.get((before.id, before.step), 0)
        require(answers >= LEAST, f"step {before.step} was passed with {answers} answers of the candidate")

    def check(self) -> None:
        super().check()
        record, fleet = self.record, self.fleet
        if record is None or fleet.touched:
            return
        share = fleet.shares.get(record.version, Share(0.0))
        require(share.traffic <= POLICY.steps[record.step].traffic, f"{share.traffic} % in step {record.step}")
        if fleet.active == record.version:
            require(record.state in ("finishing", "done", "rolling_back"), f"active, and {record.state}")

    def settle(self) -> None:
        """Everybody is there again, and answers come: the release comes to the end that it must have."""
        self.store.up, self.fleet.refuses, self.fleet.takes_s = True, False, 0.05
        for gateway in self.gateways:
            gateway.client.away, gateway.client.latency_s, gateway.client.lag_s = False, 0.001, 0.001
        self.wait(10.0)
        for _ in range(40):
            if (record := self.record) is None or record.ended:
                break
            self.answer()
            self.wait(1.0)
            self.check()
        self.wait(5.0)
        if (record := self.record) is None:
            return
        require(record.ended, f"the release stays {record.state}")
        require(all(gateway.releases.current == record for gateway in self.gateways), "a gateway has missed the end")
        if not self.fleet.touched and record.state != "cancelled":
            wanted = record.version if record.state == "done" else record.stable
            serves = self.fleet.active, self.fleet.shares
            require(serves == (wanted, {}), f"{record.state}, and {serves} serves")


def test_no_schedule_ends_a_release_otherwise_than_it_must() -> None:
    check_happened(explore(Releasing, range(SCHEDULES)), HAPPENED)


# With one rule taken away, a schedule finds what the rule is for.


def harm_that_is_overlooked(real: Any, *args: Any) -> tuple[judge.State, str]:
    found, text = real(*args)
    return ("kept" if found == "harmed" else found), text


def silence_that_passes(real: Any, *args: Any, **more: Any) -> judge.Ruling:
    found: judge.Ruling = real(*args, **more)
    return replace(found, kind="next") if found.kind == "hold" else found


async def a_rollback_that_is_tried_once(real: Any, self: Releases, record: ReleaseRecord, version: int) -> None:
    if self.__dict__.setdefault("tried", None) != (tried := (record.id, version)):
        self.__dict__["tried"] = tried
        await real(self, record, version)
    await asyncio.sleep(1.0)


RULES = [
    without("a decision on an older record", "from rolling_back to|from cancelled to|stays", (
        Releases, "_write", lambda real, self, before, *args, **more: real(self, self.current, *args, **more),
    )),
    without("answers of one gateway alone", "stays held", (
        runner, "summed", lambda real, records, *args: real(records[:1], *args),
    ), broad=True),
    without("harm that is overlooked", "does harm has passed", (judge, "_state", harm_that_is_overlooked)),
    without("silence that passes", r"passed with \d+ answers|does harm has passed", (
        judge, "rule", silence_that_passes,
    ), (judge, "LEAST", 0)),
    without("a step without its time", "lasted", (
        judge, "rule", lambda real, policy, step, evidence, lasted_s: real(policy, step, evidence, lasted_s=1e6),
    )),
    without("a rollback that is tried once", "stays rolling_back", (
        Releases, "_commit", a_rollback_that_is_tried_once,
    )),
    without("a fight with an operator", "stays|serves", (
        runner, "advance",
        lambda real, record, policy, world: real(record, policy, replace(world, active=record.stable)),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("taken", "found"), RULES)
def test_a_schedule_finds_that_a_rule_is_gone(taken: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(Releasing, taken, found, FINDS_WITHIN, monkeypatch)
