"""A version on its way to hosts that die, are cut off and become slow at any time: all others get all of it.

The hosts decide with the planner of weightsync/peer, in the simulated network of loadtest/scale.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from loadtest.histories.rules import require
from loadtest.scale import network
from loadtest.scale.network import MIB, SLOWER, Host, Scenario
from loadtest.scale.swarm import Swarm
from loadtest.simulation.clock import Clock
from loadtest.simulation.schedules import World, explore
from weightsync.peer import plan
from weightsync.peer.plan import Planner

from .rules import check_found, check_happened, without

SCHEDULES, FINDS_WITHIN = 200, 300
HAPPENED = {"done": 300, "died": 20, "slowed down": 100, "sent 2 times by the source": 20}


class FanOut(World):
    """A distribution to a few hosts over slow links, so that a chunk takes about as long as a question."""

    moves: ClassVar = {"let_time_pass": 20, "die": 1, "slow_down": 1}
    steps = 30

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        kinds, sources = rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 3))
        chunks, per_host = rng.choice((1, 7, 24, 61)), rng.choice((1, 2, 3, 6))
        self.scenario = Scenario(
            hosts=kinds * per_host, params=chunks * kinds * MIB / 2, hosts_per_instance=kinds, sources=sources,
            chunk_nbytes=MIB, nic_gbit=rng.choice((0.1, 0.4)), rack=rng.choice((2, 8)), readers=rng.choice((2, 8)),
            oversubscription=rng.choice((0.0, 0.0, 4.0)), seed=rng.randrange(1000), notice_s=rng.choice((0.0, 5.0)),
            way="swarm" if sources > 1 else "trees",
        )  # fmt: skip
        self.swarm = Swarm(self.scenario, clock)
        self.began = clock.now
        self.swarm.begin()

    @property
    def fetching(self) -> list[Host]:
        return [host for host in self.swarm.hosts.values() if host.done_at is None and not host.dead]

    def let_time_pass(self) -> None:
        self.clock.run(self.clock.now + self.rng.choice((0.01, 0.1, 0.1, 1.0)))

    def die(self) -> None:
        """Others notice later."""
        if len(self.fetching) > 1:
            self.swarm.die(self.rng.choice(self.fetching))
            self.seen["died"] += 1

    def slow_down(self) -> None:
        network, number = self.swarm.network, self.rng.randrange(self.scenario.sources + self.scenario.hosts)
        for station in (network.out[number], network.into[number]):
            station.rate = max(station.rate / SLOWER, self.scenario.nic / SLOWER**2)  # for which `settle` waits
        self.seen["slowed down"] += 1

    def check(self) -> None:
        planned = Counter[tuple[int, str]]()
        for host in self.fetching:
            require(len(host.in_flight) <= self.scenario.total, f"host {host.number} reads too much at once")
            for read in host.in_flight.values():
                planned[host.number, read.host] += 1
                require(read.chunk not in host.done, f"host {host.number} reads chunk {read.chunk} again")
                holder = self.swarm.hosts.get(int(read.host))
                has = holder is None or holder.done_at is not None or read.chunk in holder.done
                require(has, f"host {host.number} reads chunk {read.chunk} of one that does not have it")
        require(max(planned.values(), default=0) <= self.scenario.per_holder, "too many reads of one holder")

    def settle(self) -> None:
        end = self.began + SLOWER**2 * self.swarm.patience_s
        while self.fetching and self.clock.now < end and self.clock.step(end):
            pass
        require(not self.fetching, f"{len(self.fetching)} hosts wait for each other")
        total, need = self.swarm.totals(), self.scenario.host_nbytes
        alive = [host for host in self.swarm.hosts.values() if not host.dead]
        for host in alive:
            require(len(host.done) == self.scenario.chunks, f"host {host.number} says that it has all")
            came = self.swarm.network.into[host.number].nbytes
            require(came >= need, f"host {host.number} got {came} of {need} bytes")
            require(self.seen["died"] or came == need, f"host {host.number} got chunks twice")
        copies = -(-total.source_nbytes // (need * self.scenario.hosts_per_instance))
        self.seen[f"sent {copies} times by the source"] += 1
        self.seen["done"] += len(alive)


def test_no_schedule_leaves_a_host_without_its_chunks() -> None:
    check_happened(explore(FanOut, range(SCHEDULES)), HAPPENED)


# With one rule taken away, a schedule finds what the rule is for.


def holders_have_everything(real: Any, self: Planner, holders: list[plan.Holder], *args: Any, **more: Any) -> Any:
    return real(self, [replace(holder, have=None) for holder in holders], *args, **more)


RULES = [
    without("none but feeders", "wait for each other", (Planner, "loose", lambda *_, **__: 0)),
    without("holders have everything", "does not have it", (Planner, "next", holders_have_everything)),
    without("holders without limits", "too many reads of one holder", (
        plan, "_Capacity", lambda real, holders, in_flight, _: real(holders, in_flight, 1000),
    )),
    without("neighbours only", "wait for each other", (
        network, "choose", lambda _, known, *args: plan.choose([h for h in known if not h.distance], *args),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("taken", "found"), RULES)
def test_a_schedule_finds_that_a_rule_is_gone(taken: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(FanOut, taken, found, FINDS_WITHIN, monkeypatch)
