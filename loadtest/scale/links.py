"""Who has whom open, and what they tell each other, as between the peers of weightsync/peer."""

from __future__ import annotations

from collections.abc import Mapping

from loadtest.scale.host import Host, Outcome
from loadtest.scale.network import Network
from loadtest.scale.scenario import Scenario
from weightsync.peer.chunks import Bitmap
from weightsync.peer.holders import BUSY_S, IDLE_S
from weightsync.peer.plan import Holder, choose


class Links:
    """Sources are numbered from 0, `hosts` after them."""

    def __init__(self, scenario: Scenario, network: Network, hosts: Mapping[int, Host], outcome: Outcome) -> None:
        self._scenario, self._network, self._hosts, self._outcome = scenario, network, hosts, outcome
        kinds = range(scenario.hosts_per_instance)
        self._shards = [[h for h in hosts.values() if h.shard == shard] for shard in kinds]
        self._sources = [{n: _part(scenario, n, s) for n in range(scenario.sources)} for s in kinds]
        self._readers: dict[tuple[int, int], set[int]] = {}  # by holder and shard
        self._lent: dict[tuple[int, int], int] = {}

    def readers(self, number: int, shard: int) -> set[int]:
        return self._readers.setdefault((number, shard), set())

    def refresh(self, host: Host, now: float) -> None:
        """Ask every open holder what it has, and look for others where there is room, or nothing to be had."""
        if self._scenario.way == "swarm":
            self._open_more(host, now)
        host.holders = [self._ask(host, number) for number in host.links]
        for holder in host.holders:
            offers = holder.have is None or bool(holder.have.bits & ~host.done.bits)
            host.patience.saw(holder.host, offers=offers, grows=int(holder.host) in self._hosts)

    def close(self, host: Host) -> None:
        for number in list(host.links):
            self._leave(host, number)

    def open_parent(self, host: Host) -> None:
        """The one holder of a receiver in a baseline; a swarm has none."""
        place = self._shards[host.shard].index(host) if self._scenario.way != "swarm" else 0
        parents = {"star": -1, "chain": place - 1, "tree": (place + 1) // 2 - 1}
        if (before := parents.get(self._scenario.way)) is not None:
            self._enter(host, self._shards[host.shard][before].number if before >= 0 else 0)

    def _ask(self, host: Host, number: int) -> Holder:
        """What a holder has by now; it is told in turn what its reader has and reads."""
        self._outcome.asked += 1
        key, chunks = (number, host.shard), self._scenario.chunks
        lent = None
        if self._scenario.informed:
            self._lent[key] = self._lent.get(key, 0) | host.done.bits | host.reading
            lent = Bitmap(chunks, self._lent[key])
        have = self._have(number, host.shard)
        active = len(self.readers(*key)) - 1
        return Holder(str(number), self._network.distance(number, host.number), have, active, lent)

    def _have(self, number: int, shard: int) -> Bitmap | None:
        """A copy, as of now; None: everything."""
        if number not in self._hosts:
            return self._sources[shard][number]
        host = self._hosts[number]
        return None if host.done_at is not None else Bitmap(self._scenario.chunks, host.done.bits)

    def _open_more(self, host: Host, now: float) -> None:
        known, room = self._known(host, now), self._scenario.holders - len(host.links)
        if known and room <= 0 and self._scenario.informed:
            idle = host.patience.exhausted({read.host for read in host.in_flight.values()})
            if idle is not None:
                self._leave(host, int(idle))
                host.refused[int(idle)] = now + IDLE_S
                room = 1
        if not known or room <= 0:
            return
        for holder in choose(known, f"{self._scenario.seed}/{host.number}", room, host.turn):
            number = int(holder.host)
            if len(self.readers(number, host.shard)) < self._scenario.readers:
                self._enter(host, number)
            else:
                host.refused[number] = now + BUSY_S
                self._outcome.refused += 1
        host.turn += 1

    def _known(self, host: Host, now: float) -> list[Holder]:
        """Whom it might open; the informed know who is only fetching, and how far each is."""
        host.refused = {number: until for number, until in host.refused.items() if until > now}
        apart = {host.number, *host.links, *host.refused}
        nothing = Bitmap(self._scenario.chunks)
        known = {h.number: nothing if h.done_at is None else None for h in self._shards[host.shard]}
        known |= {n: have for n, have in self._sources[host.shard].items() if have is None or have.bits}
        others = ((number, have) for number, have in known.items() if number not in apart)
        if not self._scenario.informed:
            return [Holder(str(number)) for number, _ in others]
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
    """What a source has of a shard: of all chunks of all shards, each source has as many, side by side."""
    if scenario.sources == 1:
        return None
    chunks = scenario.chunks
    every = chunks * scenario.hosts_per_instance
    ends = (-(-every * n // scenario.sources) - shard * chunks for n in (source, source + 1))
    first, last = (min(max(end, 0), chunks) for end in ends)
    return Bitmap(chunks, (1 << last) - (1 << first))
