"""The simulated network: scenario, NICs and uplinks, what a host has and knows, links with the product's planner."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from weightsync.peer.chunks import Bitmap
from weightsync.peer.holders import BUSY_S, IDLE_S, Feeders, Patience
from weightsync.peer.plan import Assignment, Holder, Planner, choose

MIB = 1 << 20
SLOWER = 10
Way = Literal["trees", "swarm", "star", "tree", "chain"]
PEERS: tuple[Way, ...] = ("trees", "swarm")  # with holders that are chosen


class ScenarioError(ValueError):
    """A scenario that makes no sense; the message says which figure to change."""


@dataclass(frozen=True)
class Scenario:
    """`hosts` receive a version that `sources` hold at first, each an equal part of it (1: a publisher holds all).

    An instance spans `hosts_per_instance` hosts. Of the bytes of a version every host needs the part `shared`
    (what is not divided between them) and its share of the rest; hosts with the same place in their instances need the
    same, and read it from each other. `rack` hosts have an uplink of rack x NIC / `oversubscription`; 0: links between
    racks are no limit.

    Receivers read down two trees (`trees`, as peers do), or from holders that they choose all along (`swarm`).
    `dying` of them die, each at a time of its own; the others notice after `notice_s` and read elsewhere. `slow` of
    them have a tenth of the NIC. The times of both do not count.

    The figures below are the peers'. Peers have no sources of a part each; what those have is read as a swarm reads.
    """

    hosts: int
    params: float
    bytes_per_param: float = 2.0
    hosts_per_instance: int = 1
    shared: float = 0.05
    sources: int = 1
    chunk_nbytes: int = 32 * MIB
    nic_gbit: float = 400.0
    latency_s: float = 50e-6
    rack: int = 16
    oversubscription: float = 0.0
    readers: int = 8  # at most, of one slot of a host, at a time
    holders: int = 6  # that a receiver has open at a time
    per_holder: int = 2
    total: int = 8
    poll_s: float = 0.2  # how often a receiver asks what a holder has by now; 0: it is told at once
    hop_s: float = 0.01  # until who waits at a feeder hears of a new chunk
    seed: int = 0
    way: Way = "trees"
    dying: int = 0
    notice_s: float = 0.0
    slow: int = 0

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.hosts % self.hosts_per_instance:
            raise ScenarioError(f"{self.hosts} hosts are no instances of {self.hosts_per_instance}: choose a multiple")
        if self.sources < 1 or (self.way not in PEERS and self.sources > 1):
            raise ScenarioError("the baselines have one source; choose --sources 1, or more for the planner")
        if self.dying + self.slow >= self.hosts or (self.way not in PEERS and self.dying):
            raise ScenarioError("no host is left, or none to read from instead: choose fewer that die or are slow")

    @property
    def version_nbytes(self) -> int:
        return int(self.params * self.bytes_per_param)

    @property
    def host_nbytes(self) -> int:
        """The bytes of a version that one host needs."""
        divided = (1 - self.shared) / self.hosts_per_instance
        share = 1.0 if self.hosts_per_instance == 1 else self.shared + divided
        return int(self.version_nbytes * share)

    @property
    def nic(self) -> float:
        """Bytes per second, in each direction."""
        return self.nic_gbit * 1e9 / 8

    @property
    def chunks(self) -> int:
        """Of what one host needs."""
        return -(-self.host_nbytes // self.chunk_nbytes)

    def chunk_size(self, chunk: int) -> int:
        return min(self.chunk_nbytes, self.host_nbytes - chunk * self.chunk_nbytes)

    @property
    def lower_bound_s(self) -> float:
        """No plan is faster: every NIC once, the sources' for what only they have, and all that is sent by somebody."""
        need, kinds = self.host_nbytes, self.hosts_per_instance
        received, out = self.hosts * need, self.hosts + self.sources
        return max(need, need * kinds / self.sources, received / out) / self.nic + self.latency_s


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
        some = random.Random(scenario.seed).sample(range(scenario.sources, total), scenario.dying + scenario.slow)
        self.dying, self.slow = some[: scenario.dying], set(some[scenario.dying :])
        rates = [scenario.nic / (SLOWER if host in self.slow else 1) for host in range(total)]
        self.out, self.into = [Station(rate) for rate in rates], [Station(rate) for rate in rates]
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


@dataclass
class Outcome:
    """`done_s`: when each receiver had its bytes, ascending. `crossed_nbytes` went from rack to rack."""

    done_s: list[float] = field(default_factory=list)
    out_nbytes: list[int] = field(default_factory=list)  # the sources first, then the receivers
    in_nbytes: list[int] = field(default_factory=list)  # of the receivers
    source_nbytes: int = 0
    crossed_nbytes: int = 0
    reads: int = 0
    opened: int = 0
    refused: int = 0
    asked: int = 0  # questions to holders what they have by now
    planned: int = 0
    planner_s: float = 0.0


@dataclass(slots=True)
class Host:
    """A receiver of shard `shard`. `links`: the holders it has open."""

    number: int
    shard: int
    planner: Planner
    done: Bitmap
    in_flight: dict[int, Assignment] = field(default_factory=dict)
    links: dict[int, None] = field(default_factory=dict)  # in the order in which they were opened
    refused: dict[int, float] = field(default_factory=dict)  # until when not to ask
    holders: list[Holder] = field(default_factory=list)
    patience: Patience = field(default_factory=Patience)
    feeders: Feeders = field(default_factory=Feeders)
    turn: int = 0
    done_at: float | None = None
    dead: bool = False

    def begin(self, read: Assignment) -> None:
        self.in_flight[read.chunk] = read

    def end(self, chunk: int, *, came: bool = True) -> None:
        del self.in_flight[chunk]
        if came:
            self.done.add(chunk)

    def is_able(self, now: float) -> Callable[[str], bool]:
        return lambda host: self.refused.get(int(host), now) <= now

    def fed(self, now: float) -> tuple[str, ...]:
        return self.feeders.now(self.is_able(now), now)


@dataclass(slots=True)
class Read:
    """A chunk under way; `stage` counts the stations it has passed."""

    reader: Host
    what: Assignment
    nbytes: int
    path: tuple[Station, ...]
    stage: int = 0


class Links:
    """Sources are numbered from 0, `hosts` after them."""

    def __init__(self, scenario: Scenario, network: Network, hosts: Mapping[int, Host], outcome: Outcome) -> None:
        self._scenario, self._network, self._hosts, self._outcome = scenario, network, hosts, outcome
        kinds = range(scenario.hosts_per_instance)
        self._shards = [[h for h in hosts.values() if h.shard == shard] for shard in kinds]
        self._sources = [{n: _part(scenario, n, s) for n in range(scenario.sources)} for s in kinds]
        self._readers: dict[tuple[int, int], set[int]] = {}  # by holder and shard
        self._gone: set[int] = set()
        self._done = [False for _ in kinds]  # by shard: whether somebody has all

    def readers(self, number: int, shard: int) -> set[int]:
        return self._readers.setdefault((number, shard), set())

    def refresh(self, host: Host, now: float) -> None:
        """Ask every open holder what it has, and look for others where there is room, or nothing to be had."""
        if self._scenario.way in PEERS:
            self._open_feeders(host, now)
            if host.planner.loose(host.done, host.fed(now), late=self.is_late(host)):
                self._open_more(host, now)
            else:
                self._leave_idle(host, now)
        host.holders = [self._ask(host, number, now) for number in host.links]

    def is_late(self, host: Host) -> bool:
        return self._done[host.shard]

    def hear(self, host: Host, number: int, now: float) -> None:
        """Of what one holder has by now."""
        told = self._ask(host, number, now)
        host.holders = [told if holder.host == told.host else holder for holder in host.holders]

    def lose(self, host: Host, dead: int) -> None:
        """A holder is found to be dead."""
        for read in [read for read in host.in_flight.values() if read.host == str(dead)]:
            host.end(read.chunk, came=False)
        host.refused[dead] = float("inf")
        if dead in host.links:
            self._leave(host, dead)
        host.holders = [holder for holder in host.holders if holder.host != str(dead)]

    def _open_feeders(self, host: Host, now: float) -> None:
        for number in {int(feeder) for feeder in host.feeders.wanted(host.is_able(now)) if feeder} - host.links.keys():
            if number in self._gone:
                host.refused[number] = float("inf")
            elif self._has_room(host, number):
                self._enter(host, number)

    def _leave_idle(self, host: Host, now: float) -> None:
        """Others than feeders, when those do."""
        used = {read.host for read in host.in_flight.values()} | set(host.fed(now))
        for number in [number for number in host.links if str(number) not in used]:
            self._leave(host, number)

    def forget(self, dead: Host) -> None:
        """Its record has gone, and who tries to open it learns so at once. Its tickets end."""
        self._gone.add(dead.number)
        self._shards[dead.shard].remove(dead)
        for number in list(dead.links):
            self._leave(dead, number)

    def close(self, host: Host) -> None:
        """It has all."""
        self._done[host.shard] = True
        for number in list(host.links):
            self._leave(host, number)

    def open_parent(self, host: Host) -> None:
        """The one holder of a receiver in a baseline."""
        place = self._shards[host.shard].index(host) if self._scenario.way not in PEERS else 0
        parents = {"star": -1, "chain": place - 1, "tree": (place + 1) // 2 - 1}
        if (before := parents.get(self._scenario.way)) is not None:
            self._enter(host, self._shards[host.shard][before].number if before >= 0 else 0)

    def _ask(self, host: Host, number: int, now: float) -> Holder:
        """A holder, with the chunks that it has by now."""
        self._outcome.asked += 1
        key = number, host.shard
        have = self._have(number, host.shard)
        active = len(self.readers(*key)) - 1
        offers = have is None or bool(have.bits & ~host.done.bits)
        host.feeders.saw(str(number), now, offers=offers)
        host.patience.saw(str(number), offers=offers, grows=number in self._hosts)
        return Holder(str(number), self._network.distance(number, host.number), have, active)

    def _have(self, number: int, shard: int) -> Bitmap | None:
        """A copy, as of now; None: everything."""
        if number not in self._hosts:
            return self._sources[shard][number]
        host = self._hosts[number]
        return None if host.done_at is not None else Bitmap(self._scenario.chunks, host.done.bits)

    def _open_more(self, host: Host, now: float) -> None:
        known, room = self._known(host, now), self._scenario.holders - len(host.links)
        if known and room <= 0:
            idle = host.patience.exhausted({read.host for read in host.in_flight.values()})
            if idle is not None:
                self._leave(host, int(idle))
                host.refused[int(idle)] = now + IDLE_S
                room = 1
        if not known or room <= 0:
            return
        for holder in choose(known, f"{self._scenario.seed}/{host.number}", room, host.turn):
            number = int(holder.host)
            if self._has_room(host, number):
                self._enter(host, number)
            else:
                host.refused[number] = now + BUSY_S
                self._outcome.refused += 1
        host.turn += 1

    def _has_room(self, host: Host, number: int) -> bool:
        return len(self.readers(number, host.shard)) < self._scenario.readers

    def _known(self, host: Host, now: float) -> list[Holder]:
        """Whom it might open: who is only fetching is known, and how far each is."""
        host.refused = {number: until for number, until in host.refused.items() if until > now}
        apart = {host.number, *host.links, *host.refused}
        nothing = Bitmap(self._scenario.chunks)
        known = {h.number: nothing if h.done_at is None else None for h in self._shards[host.shard]}
        known |= {n: have for n, have in self._sources[host.shard].items() if have is None or have.bits}
        spared = host.feeders.spared(now)
        others = ((n, have) for n, have in known.items() if n not in apart and str(n) != spared)
        return [Holder(str(n), self._network.distance(n, host.number), have) for n, have in others]

    def _enter(self, host: Host, number: int) -> None:
        self.readers(number, host.shard).add(host.number)
        host.links[number] = None
        self._outcome.opened += 1

    def _leave(self, host: Host, number: int) -> None:
        self.readers(number, host.shard).discard(host.number)
        del host.links[number]
        host.patience.forget(str(number))


def _part(scenario: Scenario, source: int, shard: int) -> Bitmap | None:
    """The chunks of a shard that a source has: of all chunks of all shards, each source has as many, side by side."""
    if scenario.sources == 1:
        return None
    chunks = scenario.chunks
    every = chunks * scenario.hosts_per_instance
    ends = (-(-every * n // scenario.sources) - shard * chunks for n in (source, source + 1))
    first, last = (min(max(end, 0), chunks) for end in ends)
    return Bitmap(chunks, (1 << last) - (1 << first))
