"""The parts of a model that a request needs: its instances, its queue, and its counts."""

from __future__ import annotations

from typing import Protocol

from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Stats
from server.gateway.queue.gate import Gate
from server.gateway.wire.foreign import Foreign


class Upstream(Protocol):
    """The changes to a request that goes to a server that is not ours (external.py)."""

    def check(self, route: str, *, constrained: bool) -> None: ...

    def prepared(self, route: str, body: bytes) -> tuple[bytes, bool]: ...

    def head(self, route: str, opening: bytes, length: int) -> bytes: ...

    def answer(self, *, hides_usage: bool) -> Foreign: ...


class Served:
    """One model, as the path of a request sees it."""

    __slots__ = ("fleet", "gate", "name", "stats", "upstream")

    def __init__(self, name: str, fleet: Fleet, gate: Gate, stats: Stats, upstream: Upstream | None = None) -> None:
        self.name = name
        self.fleet = fleet
        self.gate = gate
        self.stats = stats
        self.upstream = upstream  # where it is not ours

    def sweep(self, now: float) -> None:
        """Ends what is over its time; called a few times a second."""
        self.gate.changed()  # a limit may have grown
        self.fleet.shadows.sweep(now)
        for instance in self.fleet.instances.values():
            instance.pool.sweep(now)
