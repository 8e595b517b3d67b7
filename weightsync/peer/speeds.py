"""How fast things were, and whether a difference between versions is worth its making and applying."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Deltas = Literal["always", "auto", "never"]
MOST_READERS = 64  # whose rates are remembered


@dataclass
class Speed:
    """Bytes per second, of late: what is learnt of many bytes weighs more than what is learnt of few."""

    nbytes: float = 0.0
    seconds: float = 0.0

    def learn(self, nbytes: float, seconds: float) -> None:
        """As much again as is known makes half of it forgotten."""
        if nbytes <= 0 or seconds <= 0:
            return
        kept = 0.5 ** min(1.0, nbytes / self.nbytes) if self.nbytes else 0.0
        self.nbytes, self.seconds = self.nbytes * kept + nbytes, self.seconds * kept + seconds

    @property
    def per_s(self) -> float | None:
        """None: nothing is known."""
        return self.nbytes / self.seconds if self.seconds else None


@dataclass
class Speeds:
    """Of this host. Before anything was made or applied here, `apply` and `make` count as the constants, in GB/s of
    the version: a slow core's, so that one that is tried once pays by a clear margin.
    """

    GUESSED_APPLY, GUESSED_MAKE = 0.5e9, 0.3e9

    deltas: Deltas = "auto"
    apply: Speed = field(default_factory=Speed)
    make: Speed = field(default_factory=Speed)
    _holders: dict[str, Speed] = field(default_factory=dict)
    _readers: dict[str, float] = field(default_factory=dict)

    def fetched(self, hosts: Iterable[str], nbytes: float, seconds: float) -> None:
        """A fetch from all of `hosts` at once: each of them stands for how fast it was."""
        for host in hosts:
            self._holders.setdefault(host, Speed()).learn(nbytes, seconds)

    def told(self, reader: str, bytes_per_s: float) -> None:
        """How fast another host reads, as it says itself."""
        if 0 < bytes_per_s < float("inf"):
            self._readers.pop(reader, None)
            self._readers[reader] = bytes_per_s
            while len(self._readers) > MOST_READERS:
                del self._readers[next(iter(self._readers))]

    def link(self, hosts: Iterable[str]) -> float | None:
        """Bytes per second in which something would come from `hosts`; None: no fetch from any of them is known."""
        known = [rate for host in hosts if host in self._holders and (rate := self._holders[host].per_s)]
        return max(known, default=None)

    def is_worth_reading(self, delta_nbytes: int, nbytes: int, hosts: Iterable[str]) -> bool:
        """Whether a difference is here, and applied, sooner than the whole slot of `nbytes`."""
        if delta_nbytes >= nbytes or self.deltas == "never":
            return False
        if self.deltas == "always":
            return True
        rate = self.link(hosts)
        return (
            rate is not None and delta_nbytes / rate + nbytes / (self.apply.per_s or self.GUESSED_APPLY) < nbytes / rate
        )

    def is_worth_making(self, nbytes: int) -> bool:
        """Whether the readers of before would have the version sooner, though they must wait until it is made."""
        if self.deltas != "auto":
            return self.deltas == "always"
        if not self._readers:
            return False
        making = nbytes / (self.make.per_s or self.GUESSED_MAKE) + nbytes / (self.apply.per_s or self.GUESSED_APPLY)
        return making < nbytes / statistics.median(self._readers.values())
