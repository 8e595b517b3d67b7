"""Policies that somebody else might have written, for `--routing tests.server.gateway.fleet.policies:NAME`."""

from __future__ import annotations

from collections.abc import Sequence

from server.gateway.fleet.affinity import Hint
from server.gateway.fleet.routing import C

NO_POLICY = "a name is none"


class Alternating:
    """By name, one after the other: it keeps state."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, candidates: Sequence[C], now: float, hint: Hint) -> C:
        self.turn += 1
        return sorted(candidates, key=lambda candidate: candidate.id)[self.turn % len(candidates)]


class Needy:
    """It cannot be made without arguments."""

    def __init__(self, something: int) -> None:
        self.something = something


def raises(candidates: Sequence[C], now: float, hint: Hint) -> C:
    """A policy with a fault."""
    raise RuntimeError("a fault")


def invents(candidates: Sequence[C], now: float, hint: Hint) -> str:
    """A policy that names nobody."""
    return "nobody"
