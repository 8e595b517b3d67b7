"""What is simulated: hosts, links, a version, and how the receivers behave. Bytes, seconds, bytes per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
Way = Literal["swarm", "star", "tree", "chain"]


class ScenarioError(ValueError):
    """A scenario that makes no sense; the message says which figure to change."""


@dataclass(frozen=True)
class Scenario:
    """`hosts` receive a version that `sources` hold at first, each an equal part of it (1: a publisher holds all).

    An instance spans `hosts_per_instance` hosts. Of the bytes of a version every host needs the part `shared`
    (what is not divided between them) and its share of the rest; hosts with the same place in their instances need the
    same, and read it from each other. `rack` hosts have an uplink of rack x NIC / `oversubscription`; 0: links between
    racks are no limit.

    `informed` receivers, as peers are, tell holders what they have and read (`Holder.lent`), know of hosts they have
    not opened which racks they are in and who is only fetching, and leave holders that offer nothing new. The figures
    below are the peers'. What several sources have in parts is found by the informed only; peers have no such sources.
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
    informed: bool = True
    seed: int = 0
    way: Way = "swarm"

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.hosts % self.hosts_per_instance:
            raise ScenarioError(f"{self.hosts} hosts are no instances of {self.hosts_per_instance}: choose a multiple")
        if self.sources < 1 or (self.way != "swarm" and self.sources > 1):
            raise ScenarioError("the baselines have one source; choose --sources 1, or more for the planner")
        if self.sources > 1 and not self.informed:
            raise ScenarioError("parts of a version are found by informed receivers only; choose those, or one source")

    @property
    def version_nbytes(self) -> int:
        return int(self.params * self.bytes_per_param)

    @property
    def host_nbytes(self) -> int:
        """What one host needs of a version."""
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
