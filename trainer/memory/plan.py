"""Which components each phase needs, whether they fit, and what must make room. Pure: names and numbers in and out.

A training step goes round `CYCLE`. Room is made by Belady's rule (A study of replacement algorithms, 1966): first goes
what is needed latest, and nothing goes that need not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.errors import OverBudget
from trainer.memory.units import gib

Phase = Literal["rollout", "inference", "train"]
CYCLE: tuple[Phase, ...] = ("rollout", "inference", "train")
NEEDS: dict[Phase, frozenset[str]] = {
    "rollout": frozenset({"engine", "kv_cache", "reward_model"}),
    "inference": frozenset({"actor", "critic", "reference"}),
    "train": frozenset({"actor", "actor_optimizer", "critic", "critic_optimizer"}),
}
TOGETHER = {"engine": ("kv_cache",), "kv_cache": ("engine",)}  # a serving engine has no other part to give up


@dataclass(frozen=True)
class Moves:
    """What makes room, in this order, and then what comes."""

    away: tuple[str, ...]
    bring: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Bytes of every component on the shared device, the budget, and how much of it is kept for activations."""

    sizes: Mapping[str, int]
    budget: int
    reserve: int = 0

    def needed(self, phase: Phase) -> int:
        """Bytes of what the phase cannot do without."""
        return sum(size for name, size in self.sizes.items() if name in NEEDS[phase])

    def check(self) -> None:
        """Raises OverBudget for the phase that needs most, if that does not fit, with the numbers."""
        worst = max(CYCLE, key=self.needed)
        room = self.budget - self.reserve
        if self.needed(worst) <= room:
            return
        parts = sorted(((s, n) for n, s in self.sizes.items() if n in NEEDS[worst]), reverse=True)
        told = ", ".join(f"{name} {gib(size)}" for size, name in parts if size)
        kept = f" less {gib(self.reserve)} kept for activations" if self.reserve else ""
        problem = f"phase {worst} needs {gib(self.needed(worst))} ({told}), the budget is {gib(self.budget)}{kept}"
        advice = "Raise memory.budget_gib, shard over more ranks, or serve with a smaller KV cache"
        raise OverBudget(f"{problem}. {advice}.", needed=self.needed(worst), budget=room)

    def moves(self, phase: Phase, held: frozenset[str]) -> Moves:
        """How to get from what is `held` to the phase. Raises OverBudget before anything is to be moved."""
        self.check()
        bring = tuple(name for name in self.sizes if name in NEEDS[phase] and name not in held)
        room = self.budget - self.reserve - sum(self.sizes[name] for name in (*held, *bring))
        away: list[str] = []
        for name in self._latest_first(phase, held - NEEDS[phase]):
            if room >= 0:
                break
            for part in (name, *TOGETHER.get(name, ())):
                if part in held and part not in away:
                    away.append(part)
                    room += self.sizes[part]
        return Moves(tuple(away), bring)

    def _latest_first(self, phase: Phase, names: frozenset[str]) -> list[str]:
        """The largest first among those needed equally late."""
        return sorted(names, key=lambda name: (-_until_needed(phase, name), -self.sizes[name], name))


def _until_needed(phase: Phase, name: str) -> int:
    """Phases from `phase` until the next one that needs `name`; a whole cycle and more if none does."""
    at = CYCLE.index(phase)
    ahead = (step for step in range(1, len(CYCLE) + 1) if name in NEEDS[CYCLE[(at + step) % len(CYCLE)]])
    return next(ahead, len(CYCLE) + 1)
