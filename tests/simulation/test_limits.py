"""Limits that several gateways divide, under random schedules: all together never use more, and one alone uses all.

Each gateway is the production code (`Sharing`, `Limits`) on a connection of its own to a simulated store. Gateways
come, leave and are killed, are cut off from the store, hear of each other late, and lose their leases.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from loadtest.histories.rules import require
from loadtest.simulation.clock import Clock
from loadtest.simulation.schedules import AwaitingWorld, explore
from loadtest.simulation.store import Client, ModelStore
from server.errors import HttpError
from server.gateway.access.keys import Principal
from server.gateway.access.limits import SLOTS, Grant, Limits, Window
from server.gateway.access.records import USAGE_PREFIX
from server.gateway.access.sharing import Division, Other, Sharing, UsageRecord
from server.key_limits import KeyLimits

from .rules import check_found, check_happened, without

WINDOW_S = 60.0
SCHEDULES, FINDS_WITHIN = 60, 400
HAPPENED = {"admitted": 500, "refused": 500, "lost leases": 50, "returned": 30, "killed": 15, "over the limit": 50}
MINUTE, NOW = "k/requests", "k/concurrency"


class Gateway:
    """One that takes requests of the key `k` once it may."""

    def __init__(self, store: ModelStore, limits: Callable[[], KeyLimits]) -> None:
        self._key_limits = limits
        self.client = Client(store)
        self.limits = Limits(Counter())
        self.sharing = Sharing(self.client, self.limits, lambda: {"k": limits()})
        self.running: list[Grant] = []
        self.task: asyncio.Task[None]

    def admit(self) -> bool:
        try:
            grant = self.limits.admit(self._principal(), None, "/v1/completions", b"")  # type: ignore[arg-type]
        except HttpError as refused:
            if refused.status != 429:
                raise
            return False
        assert grant is not None
        self.running.append(grant)
        return True

    def _principal(self) -> Principal:
        return Principal("k", frozenset(), id="k", limits=self._key_limits())


@dataclass
class Lost:
    """The part that a gateway had `said` to hold when its lease ended: others may take it over, unknown to the gateway.

    `until`: when what it has used meanwhile has left all windows; None while it goes on with its part.
    """

    gateway: str
    said: Other
    until: float | None


class SharedLimits(AwaitingWorld):
    moves: ClassVar = {
        "ask": 30, "let_time_pass": 40, "answer": 12, "come": 3, "leave": 1, "kill": 1, "cut_off": 2, "outage": 1,
        "be_slow": 5, "lose_lease": 1, "change_limits": 0.5,
    }  # fmt: skip
    steps = 150

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        self.store = ModelStore(clock)
        self.limits = KeyLimits(requests_per_min=rng.choice((1, 2, 3, 5, 10, 60)), concurrency=rng.choice((1, 4, 20)))
        self.gateways: list[Gateway] = []
        self.ended: set[str] = set()  # that said farewell
        self.lost: list[Lost] = []
        self.admitted: list[float] = []
        self._heard = 0

    @classmethod
    def opening(cls, rng: random.Random) -> list[str]:
        return ["come", "let_time_pass"] * rng.choice((1, 2, 2, 3))

    def come(self) -> None:
        if len(self.gateways) < 4:
            gateway = Gateway(self.store, lambda: self.limits)
            gateway.task = self.start(gateway.sharing.run())
            self.gateways.append(gateway)

    def one(self) -> Gateway | None:
        """Some are asked more than others."""
        return self.gateways[int(self.rng.random() ** 2 * len(self.gateways))] if self.gateways else None

    def ask(self) -> None:
        if (gateway := self.one()) is not None:
            self.burst(gateway, self.rng.randint(1, 12))

    def burst(self, gateway: Gateway, requests: int) -> None:
        for _ in range(requests):
            admitted = gateway.admit()
            self.seen["admitted" if admitted else "refused"] += 1
            if admitted:
                self.admitted.append(self.clock.now)
                self.keep()

    def answer(self) -> None:
        """Some of what runs ends."""
        for gateway in self.gateways:
            for grant in [grant for grant in gateway.running if self.rng.random() < 0.7]:
                gateway.running.remove(grant)
                grant.settle(None, 200)

    def let_time_pass(self) -> None:
        self.wait(self.rng.choice((0.002, 0.05, 0.3, 1.0, 1.0, 3.0, 12.0)))

    def leave(self) -> None:
        if len(self.gateways) > 1:
            gateway = self.take_out()
            if self.store.up and not gateway.client.away:
                self.ended.add(gateway.sharing.id)
            self.do(gateway.sharing.leave())

    def kill(self) -> None:
        if len(self.gateways) > 1:
            gateway = self.take_out()
            self.seen["killed"] += 1
            if gateway.sharing._keeper is not None:
                self.do(gateway.sharing._keeper.stop())

    def take_out(self) -> Gateway:
        gateway = self.gateways.pop(self.rng.randrange(len(self.gateways)))
        gateway.task.cancel()
        self.wait(0.0)
        self.returned(gateway.sharing.id)
        return gateway

    def cut_off(self) -> None:
        if (gateway := self.one()) is not None:
            gateway.client.away = not gateway.client.away

    def outage(self) -> None:
        self.store.up = not self.store.up
        self.store.expire()

    def be_slow(self) -> None:
        if (gateway := self.one()) is not None:
            gateway.client.latency_s, gateway.client.lag_s = (self.rng.choice((0.001, 0.03, 0.5, 2.0)) for _ in "ab")

    def lose_lease(self) -> None:
        if (gateway := self.one()) is not None and gateway.sharing._keeper is not None and self.store.up:
            self.store.revoke(gateway.sharing._keeper.id)

    def change_limits(self) -> None:
        self.limits = KeyLimits(requests_per_min=self.rng.choice((2, 10, 60)), concurrency=self.limits.concurrency)
        self.admitted.clear()  # what was used before may be more than the new limit

    # what must hold

    def check(self) -> None:
        super().check()
        for event in self.store.events[self._heard :]:
            gateway = event.kv.key.removeprefix(USAGE_PREFIX)
            if gateway == "round" or gateway in self.ended:
                continue
            record = UsageRecord.from_json(event.kv.value)
            if event.kind == "delete":
                self.lose(gateway, Other(record))
            elif record.state == "active":
                self.returned(gateway)
        self._heard = len(self.store.events)
        self.keep()

    def lose(self, gateway: str, said: Other) -> None:
        alive = any(known.sharing.id == gateway for known in self.gateways)
        self.lost.append(Lost(gateway, said, None if alive else self.clock.now + WINDOW_S + 2))
        self.seen["lost leases"] += 1

    def returned(self, gateway: str) -> None:
        for lost in self.lost:
            if lost.gateway == gateway and lost.until is None:
                lost.until = self.clock.now + WINDOW_S + 2
                self.seen["returned"] += 1

    def keep(self) -> None:
        """No more is in use than the limit, and what was lost with leases."""
        now = self.clock.now
        busy = {gateway.sharing.id for gateway in self.gateways if gateway.running}
        self.lost = [lost for lost in self.lost if lost.until is None or lost.until > now or lost.gateway in busy]
        self.admitted = [at for at in self.admitted if at > now - WINDOW_S]
        running = sum(len(gateway.running) for gateway in self.gateways)
        self.seen["over the limit"] += len(self.admitted) > self.bound(MINUTE)
        for resource, used in ((MINUTE, len(self.admitted)), (NOW, running)):
            limit = self.bound(resource)
            most = limit + sum(lost.said.held(resource, limit) for lost in self.lost)
            require(used <= most, f"{used} of {resource} are in use, and {most} may be")

    def bound(self, resource: str) -> int:
        limit = self.limits.of(resource.partition("/")[2])
        assert limit is not None
        return limit

    def settle(self) -> None:
        """Everybody is there again; one that alone is asked gets all of both limits."""
        self.store.up = True
        self.store.expire()
        for gateway in self.gateways:
            gateway.client.away, gateway.client.latency_s, gateway.client.lag_s = False, 0.001, 0.001
        while len(self.gateways) < 2:
            self.come()
        self.end_all()
        for _ in range(14):
            self.wait(WINDOW_S / 6)
            self.check()
        require(not self.lost, "a gateway that lost its lease does not come back")
        for _ in range(40):
            for _ in range(self.bound(MINUTE) + 1):
                self.burst(self.gateways[0], 1)
                self.end_all()
            self.wait(1.0)
            self.check()
            if len(self.admitted) == self.bound(MINUTE):
                return
        require(False, f"one that alone is asked gets {len(self.admitted)} of {self.bound(MINUTE)}")

    def end_all(self) -> None:
        for gateway in self.gateways:
            for grant in gateway.running:
                grant.settle(None, 200)
            gateway.running.clear()


def test_no_schedule_breaks_a_limit() -> None:
    check_happened(explore(SharedLimits, range(SCHEDULES)), HAPPENED)


# With one rule taken away, a schedule finds what the rule is for.


def a_window_of_half_a_minute(real: Any, self: Window, now: int) -> None:
    real(self, now if now - self.now < SLOTS / 2 else self.now + SLOTS)
    self.now = now


async def a_lost_lease_is_not_taken_up_again(real: Any, self: Sharing) -> None:
    await (asyncio.Event().wait() if self.entered.is_set() else real(self))


OVER, ALONE = "are in use, and", "one that alone is asked"
RULES = [
    # Of two that reach for the same units both get them.
    without("no look at who grew", OVER, (
        Client, "txn", lambda real, self, compares, puts, leases=None: real(self, {}, puts, leases),
    )),
    without("nothing is left behind", OVER, (
        Division, "farewell", lambda _, self, uses: UsageRecord(self.me, "left", ()),
    ), broad=True),
    # Of what is in use already.
    without("an equal part at once", OVER, (
        Division, "_entrance", lambda real, self, uses: replace(real(self, uses), held={}),
    ), broad=True),
    without("nobody is asked for welcome", OVER, (
        Division, "_entrance", lambda real, self, uses: replace(real(self, uses), state="active", grows=True),
    )),
    without("a window of half a minute", OVER, (Window, "advance", a_window_of_half_a_minute), broad=True),
    without("a part that never grows", ALONE, (
        Division, "_wanted", lambda real, self, r, use: min(real(self, r, use), self.held(r, use.limit)),
    )),
    without("one that is gone keeps its part", ALONE, (Division, "gone", lambda *_: None)),
    without("a lost lease is not taken up again", "does not come back", (
        Sharing, "enter", a_lost_lease_is_not_taken_up_again,
    )),
]  # fmt: skip


@pytest.mark.parametrize(("taken", "found"), RULES)
def test_a_schedule_finds_that_a_rule_is_gone(taken: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(SharedLimits, taken, found, FINDS_WITHIN, monkeypatch)
