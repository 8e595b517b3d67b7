"""NICs and uplinks as first-come, first-served stations.

A chunk passes the NIC of its source, the uplinks of both racks if they differ and are limited, and the NIC of its
reader. It leaves a station when that has had the time for all its bytes, and not before its last byte came in
(cut-through, not store-and-forward); so no station ever carries more than its rate, and who has several reads open at
one station gets a fair share of it over a few chunks.
"""

from __future__ import annotations

from loadtest.scale.scenario import Scenario


class Station:
    """A NIC or an uplink, in one direction."""

    __slots__ = ("free_at", "nbytes", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.free_at, self.nbytes = rate, 0.0, 0

    def passed(self, nbytes: int, tail: float, feed: float) -> float:
        """When the last byte has left, if it comes in at `tail` at `feed` bytes per second. Call in order of `tail`."""
        self.nbytes += nbytes
        self.free_at = max(max(self.free_at, tail - nbytes / feed) + nbytes / self.rate, tail)
        return self.free_at


class Network:
    """Hosts by number: the sources first, then the receivers, in racks of their own."""

    def __init__(self, scenario: Scenario) -> None:
        total = scenario.sources + scenario.hosts
        self.out = [Station(scenario.nic) for _ in range(total)]
        self.into = [Station(scenario.nic) for _ in range(total)]
        self._limited = scenario.oversubscription > 0
        source_racks = -(-scenario.sources // scenario.rack)
        self.racks = [host // scenario.rack for host in range(scenario.sources)]
        self.racks += [source_racks + host // scenario.rack for host in range(scenario.hosts)]
        rate = scenario.rack * scenario.nic / (scenario.oversubscription or 1.0)
        self.up = [Station(rate) for _ in range(self.racks[-1] + 1)]
        self.down = [Station(rate) for _ in range(self.racks[-1] + 1)]
        self.crossed = 0  # bytes between racks

    def distance(self, a: int, b: int) -> int:
        return int(self.racks[a] != self.racks[b])

    def path(self, source: int, reader: int) -> tuple[Station, ...]:
        """The stations of a read, in order."""
        ends = self.out[source], self.into[reader]
        if not self._limited or not self.distance(source, reader):
            return ends
        return ends[0], self.up[self.racks[source]], self.down[self.racks[reader]], ends[1]
