"""Phases: the components that each needs, what must make room for them, and the switch on all ranks together.

A training step goes round `CYCLE`. Belady's rule (A study of replacement algorithms, 1966) makes room: evict the
component needed latest, and evict nothing needlessly. All ranks decide alike, from the same numbers: without GPUs they
share one memory, and their bytes are added; with one GPU each, the fullest counts. First everything leaves, everywhere;
only then does anything come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from trainer.errors import MemoryPlanError, RankFailed
from trainer.megatron.parallel import gather_json
from trainer.memory.ledger import Ledger, gib
from trainer.metrics.throughput import Stopwatch

Phase = Literal["rollout", "inference", "train"]
CYCLE: tuple[Phase, ...] = ("rollout", "inference", "train")
NEEDS: dict[Phase, frozenset[str]] = {
    "rollout": frozenset({"engine", "kv_cache", "reward_model"}),
    "inference": frozenset({"actor", "critic", "reference"}),
    "train": frozenset({"actor", "actor_optimizer", "critic", "critic_optimizer"}),
}
TOGETHER = {"engine": ("kv_cache",), "kv_cache": ("engine",)}  # a serving engine has no other part to give up
OF_THE_DEVICE = frozenset({"engine", "kv_cache", "reward_model"})  # counted once, not for every rank


@dataclass(frozen=True)
class Moves:
    """The components that make room, in this order, and then those that come."""

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
        """Raises MemoryPlanError for the phase that needs most, if that does not fit, with the numbers."""
        worst = max(CYCLE, key=self.needed)
        room = self.budget - self.reserve
        if self.needed(worst) <= room:
            return
        parts = sorted(((s, n) for n, s in self.sizes.items() if n in NEEDS[worst]), reverse=True)
        told = ", ".join(f"{name} {gib(size)}" for size, name in parts if size)
        kept = f" less {gib(self.reserve)} kept for activations (memory.reserve_gib)" if self.reserve else ""
        problem = f"phase {worst} needs {gib(self.needed(worst))} ({told}), the budget is {gib(self.budget)}{kept}"
        advice = "Raise memory.budget_gib, shard over more ranks, or serve with a smaller KV cache"
        raise MemoryPlanError(f"{problem}. {advice}.", exit_code=2)

    def moves(self, phase: Phase, held: frozenset[str]) -> Moves:
        """How to get from what is `held` to the phase. Raises MemoryPlanError before anything is to be moved."""
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
        """By how late they are needed, the largest first among equals."""
        return sorted(names, key=lambda name: (-_until_needed(phase, name), -self.sizes[name], name))


def _until_needed(phase: Phase, name: str) -> int:
    """Phases from `phase` until the next one that needs `name`; a whole cycle and more if none does."""
    at = CYCLE.index(phase)
    ahead = (step for step in range(1, len(CYCLE) + 1) if name in NEEDS[CYCLE[(at + step) % len(CYCLE)]])
    return next(ahead, len(CYCLE) + 1)


class Memory(Protocol):
    """A schedule tells it which phase comes next. Collective."""

    def enter(self, phase: Phase) -> dict[str, float]:
        """Have the phase's components in memory; {} if this is the phase already, else what the switch took (ms):
        `memory_ms/PHASE`, and of it `memory_ms/PHASE/COMPONENT` for what left or came."""
        ...


class NothingShared:
    """For schedules whose phases overlap, and runs that fit: everything stays where it is."""

    def enter(self, phase: Phase) -> dict[str, float]:
        return {}


class SharedMemory:
    """The ledger of this rank, moved in step with the others'. Raises MemoryPlanError, at once if a phase
    cannot fit."""

    def __init__(self, ledger: Ledger, reserve: int = 0) -> None:
        self.ledger, self._reserve = ledger, reserve
        self.now: Phase | None = None
        self.plan().check()

    def plan(self) -> Plan:
        """The plan for components as large as they are now. Collective."""
        mine = {c.name: c.bytes for c in self.ledger.components if c.name not in OF_THE_DEVICE}
        every = gather_json(mine)
        together = max if torch.cuda.is_available() else sum
        sizes = {name: int(together([sizes[name] for sizes in every])) for name in mine}
        sizes |= {c.name: c.bytes for c in self.ledger.components if c.name in OF_THE_DEVICE}
        return Plan(sizes, self.ledger.budget, self._reserve)

    def enter(self, phase: Phase) -> dict[str, float]:
        if phase == self.now:
            return {}
        began = time.perf_counter()
        held = frozenset(c.name for c in self.ledger.components if c.state == "instantiated")
        moves = self.plan().moves(phase, held)
        self._everywhere(self.ledger.put_away, moves.away)
        self._everywhere(self.ledger.bring, moves.bring)
        self.now = phase
        took = {f"memory_ms/{phase}/{name}": round(self.ledger.ms[name], 3) for name in (*moves.away, *moves.bring)}
        return {f"memory_ms/{phase}": round((time.perf_counter() - began) * 1e3, 3), **took}

    def _everywhere(self, change: Callable[[str], None], names: tuple[str, ...]) -> None:
        """Change the components and wait for all ranks. If one failed, all raise."""
        error: MemoryPlanError | None = None
        try:
            for name in names:
                change(name)
        except MemoryPlanError as caught:
            error = caught
        failed = [rank for rank, bad in enumerate(gather_json(error is not None)) if bad]
        if failed:
            raise error or RankFailed(f"rank {failed[0]} could not change phase; its message says why")


class Phases:
    """The memory of a run as the loop uses it; a step's metrics have what its switches take. Collective."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._took: dict[str, float] = {}

    @property
    def shared(self) -> bool:
        """Whether phases share a device, so that they must not overlap."""
        return not isinstance(self._memory, NothingShared)

    def enter(self, phase: Phase, watch: Stopwatch | None = None) -> None:
        """Have in memory what the phase needs. With a watch the time counts as its step's."""
        if watch is None:
            self._memory.enter(phase)
        elif self.shared:
            with watch("memory"):
                took = self._memory.enter(phase)
            self._took |= {name: ms for name, ms in took.items() if "/" in name}

    def taken(self) -> dict[str, float]:
        """Milliseconds by phase and component since the last call."""
        took, self._took = self._took, {}
        return took
