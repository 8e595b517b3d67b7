"""The memory of a run, phase by phase, on every rank: `enter` makes room and brings what the phase needs.

All ranks decide alike, from the same numbers: without GPUs they share one memory, and their bytes are added; with one
GPU each, the fullest counts. First everything leaves, everywhere; only then does anything come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from trainer.errors import MemoryPlanError, RankFailed
from trainer.megatron.parallel import gather_json
from trainer.memory.ledger import Ledger
from trainer.memory.plan import Phase, Plan

OF_THE_DEVICE = frozenset({"engine", "kv_cache", "reward_model"})  # counted once, not for every rank


class Memory(Protocol):
    """What a schedule tells which phase comes next. Collective."""

    def enter(self, phase: Phase) -> dict[str, float]:
        """Have the phase's components in memory; {} if this is the phase already, else what the switch took (ms):
        `memory_ms/PHASE`, and of it `memory_ms/PHASE/COMPONENT` for what left or came."""
        ...

    def phase(self, phase: Phase) -> AbstractContextManager[dict[str, float]]: ...

    def close(self) -> None: ...


class NothingShared:
    """For schedules whose phases overlap, and runs that fit: everything stays where it is."""

    def enter(self, phase: Phase) -> dict[str, float]:
        return {}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[dict[str, float]]:
        yield {}

    def close(self) -> None: ...


class SharedMemory:
    """The ledger of this rank, moved in step with the others'. Raises OverBudget, at once if a phase cannot fit."""

    def __init__(self, ledger: Ledger, reserve: int = 0, close: Callable[[], None] = lambda: None) -> None:
        self.ledger, self._reserve, self._close = ledger, reserve, close
        self.now: Phase | None = None
        self.plan().check()

    def plan(self) -> Plan:
        """With the components as large as they are now. Collective."""
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

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[dict[str, float]]:
        """The body runs in the phase; what was brought stays until another phase needs the room."""
        yield self.enter(phase)

    def close(self) -> None:
        """Leave the device to whoever else uses it."""
        self._close()

    def _everywhere(self, change: Callable[[str], None], names: tuple[str, ...]) -> None:
        """On all ranks, and return when all are done; if one failed, all raise."""
        error: MemoryPlanError | None = None
        try:
            for name in names:
                change(name)
        except MemoryPlanError as caught:
            error = caught
        failed = [rank for rank, bad in enumerate(gather_json(error is not None)) if bad]
        if failed:
            raise error or RankFailed(f"rank {failed[0]} could not change phase; its message says why")
