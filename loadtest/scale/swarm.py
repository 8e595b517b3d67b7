"""Every receiver fetches its share as weightsync.peer does, by the same planner, in simulated time.

A receiver opens a few holders, asks each from time to time what it has by now, and reads what the planner says. A host
gives its chunks on as soon as it has them. Receivers know of each other only what they were told when they last asked.
"""

from __future__ import annotations

import heapq
import random
import time

from loadtest.scale.network import Host, Links, Network, Outcome, Read, Scenario
from weightsync.peer.chunks import Bitmap
from weightsync.peer.plan import Assignment, Planner


def distribute(scenario: Scenario) -> Outcome:
    """Simulate one version on its way; but for `planner_s` the same scenario gives the same. Raises SwarmStuck."""
    return Swarm(scenario).run()


class SwarmStuck(RuntimeError):
    """Receivers wait for each other: the plan is at fault, or the limits of the scenario are too low."""


class Swarm:
    """One distribution; `run` it once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.network, self.outcome = scenario, Network(scenario), Outcome()
        self.now, self._order = 0.0, 0
        self._events: list[tuple[float, int, Read | Host]] = []
        numbers = range(scenario.sources, scenario.sources + scenario.hosts)
        self.hosts = {number: self._host(number) for number in numbers}
        self._links = Links(scenario, self.network, self.hosts, self.outcome)

    def run(self) -> Outcome:
        starts, patience = (
            random.Random(self.scenario.seed),
            60 + (self.scenario.hosts + 10) * self.scenario.lower_bound_s,
        )
        for host in self.hosts.values():
            self._links.open_parent(host)
            self._at(starts.uniform(0, self.scenario.poll_s), host)
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            if self.now > patience:
                raise SwarmStuck(f"not done after {patience:.0f} s: allow more readers and holders")
            if isinstance(what, Host):
                self._look(what)
            else:
                self._pass(what)
        return self._totals()

    def _host(self, number: int) -> Host:
        s = self.scenario
        planner = Planner(s.chunks, f"{s.seed}/host-{number}", s.per_holder, s.total)
        shard = (number - s.sources) % s.hosts_per_instance
        return Host(number, shard, planner, Bitmap(s.chunks))

    def _at(self, when: float, what: Read | Host) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what))

    def _look(self, host: Host) -> None:
        """Ask the holders, begin what can be read, and look again later."""
        if host.done_at is not None:
            return
        self._links.refresh(host, self.now)
        self._plan(host)
        if self.scenario.poll_s:
            self._at(self.now + self.scenario.poll_s, host)

    def _plan(self, host: Host) -> None:
        started = time.perf_counter()
        begun = host.planner.next(host.holders, host.done, host.in_flight.values())
        self.outcome.planner_s += time.perf_counter() - started
        self.outcome.planned += 1
        for read in begun:
            host.begin(read)
            self._send(host, read)

    def _send(self, host: Host, read: Assignment) -> None:
        source, nbytes = int(read.host), self.scenario.chunk_size(read.chunk)
        self.network.crossed += nbytes * self.network.distance(source, host.number)
        path = self.network.path(source, host.number)
        left = path[0].passed(nbytes, self.now + self.scenario.latency_s, float("inf"))
        self._at(left, Read(host, read.chunk, nbytes, path, 1))

    def _pass(self, read: Read) -> None:
        """Its last byte has left a station."""
        if read.stage < len(read.path):
            left = read.path[read.stage].passed(read.nbytes, self.now, read.path[read.stage - 1].rate)
            read.stage += 1
            return self._at(left, read)
        host = read.reader
        self.outcome.reads += 1
        host.end(read.chunk)
        host.patience.came()
        if host.done.complete:
            host.done_at = self.now
            self._links.close(host)
        else:
            self._plan(host)
        return None if self.scenario.poll_s else self._tell(host)

    def _tell(self, host: Host) -> None:
        """Without asking, readers know at once."""
        for number in sorted(self._links.readers(host.number, host.shard)):
            reader = self.hosts[number]
            if reader.done_at is None and len(reader.in_flight) < self.scenario.total:
                self._look(reader)

    def _totals(self) -> Outcome:
        found = self.outcome
        found.done_s = sorted(h.done_at for h in self.hosts.values() if h.done_at is not None)
        found.out_nbytes = [station.nbytes for station in self.network.out]
        found.in_nbytes = [self.network.into[number].nbytes for number in self.hosts]
        found.source_nbytes = sum(found.out_nbytes[: self.scenario.sources])
        found.crossed_nbytes = self.network.crossed
        return found
