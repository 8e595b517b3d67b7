"""What passes between the phases of the loop."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trainer.batch import Fields


@dataclass(frozen=True)
class TrainState:
    """Where a run stands: steps done, records drawn, the last version published (0: none)."""

    step: int = 0
    consumed: int = 0
    version: int = 0

    def after_step(self, records: int) -> TrainState:
        return dataclasses.replace(self, step=self.step + 1, consumed=self.consumed + records)


@dataclass(frozen=True)
class StepBatch:
    """A step's tensors and how many records were drawn for it and ahead of it (on every rank), and what is known about
    its rollouts (on rank 0)."""

    fields: Fields
    records: int
    metrics: dict[str, float]
