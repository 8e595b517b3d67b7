"""Phases as the loop enters them: what the switches within a step take is told with the step."""

from __future__ import annotations

from trainer.memory.manager import Memory, NothingShared
from trainer.memory.plan import Phase
from trainer.metrics import Stopwatch


class Phases:
    """Collective, as the memory manager is."""

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

    def close(self) -> None:
        """Leave the device to whoever else uses it."""
        self._memory.close()
