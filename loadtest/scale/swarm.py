"""Every receiver fetches its share as weightsync.peer does, by the same planner, in simulated time.

A receiver opens a few holders, asks each from time to time what it has by now, and reads what the planner says. A host
gives its chunks on as soon as it has them. Receivers know of each other only what they were told when they last asked.
"""

from __future__ import annotations

import random
import time
from functools import partial

from loadtest.scale.network import Host, Links, Network, Outcome, Read, Scenario
from loadtest.simulation.clock import Clock
from weightsync.peer.chunks import Bitmap
from weightsync.peer.holders import Feeders
from weightsync.peer.plan import Assignment, Planner, feeders


def distribute(scenario: Scenario) -> Outcome:
    """Simulate one version on its way; but for `planner_s` the same scenario gives the same. Raises SwarmStuck."""
    return Swarm(scenario).run()


class SwarmStuck(RuntimeError):
    """Receivers wait for each other: the plan is at fault, or the limits of the scenario are too low."""


class Swarm:
    """One distribution; `run` it once. Or `begin` it, let the clock run, and take the `totals`."""

    def __init__(self, scenario: Scenario, clock: Clock | None = None) -> None:
        self.scenario, self.network, self.outcome = scenario, Network(scenario), Outcome()
        self.clock = clock or Clock()
        self._news: set[tuple[int, int]] = set()
        numbers = range(scenario.sources, scenario.sources + scenario.hosts)
        kinds = scenario.hosts_per_instance
        self._members = [
            [(f"{self.network.racks[n]:06d}", str(n)) for n in numbers if (n - scenario.sources) % kinds == shard]
            for shard in range(kinds)
        ]
        self.hosts = {number: self._host(number) for number in numbers}
        self._links = Links(scenario, self.network, self.hosts, self.outcome)

    def run(self) -> Outcome:
        self.begin()
        while self.clock.step():
            if self.clock.now > self.patience_s:
                raise SwarmStuck(f"not done after {self.patience_s:.0f} s: allow more readers and holders")
        return self.totals()

    @property
    def patience_s(self) -> float:
        return 60 + (self.scenario.hosts + 10) * self.scenario.lower_bound_s

    def begin(self) -> None:
        starts, now = random.Random(self.scenario.seed), self.clock.now
        for host in self.hosts.values():
            self._links.open_parent(host)
            self.clock.at(now + starts.uniform(0, self.scenario.poll_s), partial(self._look, host))
        for number in self.network.dying:
            self.clock.at(now + starts.uniform(0, self.scenario.lower_bound_s), partial(self.die, self.hosts[number]))

    def _host(self, number: int) -> Host:
        s = self.scenario
        shard = (number - s.sources) % s.hosts_per_instance
        above: tuple[tuple[str, ...], ...] = ()
        if s.way == "trees" and s.sources == 1:
            above = feeders(self._members[shard], "0", str(number))
        planner = Planner(s.chunks, f"{s.seed}/host-{number}", s.per_holder, s.total)
        return Host(number, shard, planner, Bitmap(s.chunks), feeders=Feeders(above))

    def _look(self, host: Host) -> None:
        """Ask the holders, begin what can be read, and look again later."""
        if host.done_at is not None or host.dead:
            return
        self._links.refresh(host, self.clock.now)
        self._plan(host)
        if self.scenario.poll_s:
            self.clock.at(self.clock.now + self.scenario.poll_s, partial(self._look, host))

    def _plan(self, host: Host) -> None:
        started = time.perf_counter()
        begun = host.planner.next(
            host.holders, host.done, host.in_flight.values(), host.fed(self.clock.now), late=self._links.is_late(host)
        )
        self.outcome.planner_s += time.perf_counter() - started
        self.outcome.planned += 1
        for read in begun:
            host.begin(read)
            self._send(host, read)

    def _send(self, host: Host, read: Assignment) -> None:
        source, nbytes = int(read.host), self.scenario.chunk_size(read.chunk)
        self.network.crossed += nbytes * self.network.distance(source, host.number)
        path = self.network.path(source, host.number)
        left = path[0].passed(nbytes, self.clock.now + self.scenario.latency_s, float("inf"))
        self.clock.at(left, partial(self._pass, Read(host, read, nbytes, path, 1)))

    def _pass(self, read: Read) -> None:
        """Its last byte has left a station."""
        if read.stage < len(read.path):
            left = read.path[read.stage].passed(read.nbytes, self.clock.now, read.path[read.stage - 1].rate)
            read.stage += 1
            return self.clock.at(left, partial(self._pass, read))
        host, source = read.reader, self.hosts.get(int(read.what.host))
        if host.dead or host.in_flight.get(read.what.chunk) is not read.what or (source is not None and source.dead):
            return None
        self.outcome.reads += 1
        host.end(read.what.chunk)
        host.patience.came()
        if host.done.complete:
            host.done_at = self.clock.now
            self._links.close(host)
        else:
            self._plan(host)
        return self._tell_fed(host) if self.scenario.poll_s else self._tell(host)

    def die(self, host: Host) -> None:
        host.dead = host.done_at is None
        if host.dead:
            self.clock.at(self.clock.now + self.scenario.notice_s, partial(self._notice, host))

    def _notice(self, dead: Host) -> None:
        self._links.forget(dead)
        for host in self.hosts.values():
            if dead.number in host.links:
                self._links.lose(host, dead.number)
                self._plan(host)

    def _tell_fed(self, host: Host) -> None:
        """Those that wait at their feeder hear of a chunk soon; others when they ask."""
        for number in sorted(self._links.readers(host.number, host.shard)):
            if str(host.number) in self.hosts[number].fed(self.clock.now) and (host.number, number) not in self._news:
                self._news.add((host.number, number))
                self.clock.at(
                    self.clock.now + self.scenario.hop_s, partial(self._hear, self.hosts[number], host.number)
                )

    def _hear(self, host: Host, number: int) -> None:
        self._news.discard((number, host.number))
        if host.done_at is None and not host.dead and number in host.links:
            self._links.hear(host, number, self.clock.now)
            self._plan(host)

    def _tell(self, host: Host) -> None:
        """Without asking, readers know at once."""
        for number in sorted(self._links.readers(host.number, host.shard)):
            reader = self.hosts[number]
            if reader.done_at is None and len(reader.in_flight) < self.scenario.total:
                self._look(reader)

    def totals(self) -> Outcome:
        found = self.outcome
        healthy = (h for n, h in self.hosts.items() if n not in self.network.slow)
        found.done_s = sorted(h.done_at for h in healthy if h.done_at is not None)
        found.out_nbytes = [station.nbytes for station in self.network.out]
        found.in_nbytes = [self.network.into[number].nbytes for number in self.hosts]
        found.source_nbytes = sum(found.out_nbytes[: self.scenario.sources])
        found.crossed_nbytes = self.network.crossed
        return found
