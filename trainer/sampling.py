"""A step's tensors: records, and what was sampled for them. Rank 0 samples; all ranks get the same. Collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainer.batch import Fields
from trainer.config import TrainerConfig
from trainer.experience import Experience
from trainer.lead import Lead
from trainer.megatron.engine import Engine
from trainer.megatron.parallel import broadcast_json, broadcast_tensors, from_last, lead
from trainer.memory.phases import Phases
from trainer.metrics import Stopwatch
from trainer.state import StepBatch, TrainState

T = TypeVar("T")


class Sampling:
    """`ours` is None but on rank 0."""

    def __init__(self, config: TrainerConfig, engine: Engine, phases: Phases, ours: Lead | None) -> None:
        self._steps, self._engine, self._phases, self._ours = config.steps, engine, phases, ours

    def step(self, state: TrainState, watch: Stopwatch) -> StepBatch:
        """The next step's tensors: records, and what the schedule has sampled for them if the algorithm wants it.

        While rollouts are still under way, the models already look at those that fill a forward pass; unless the two
        share a device by turns.
        """
        algorithm, steps_left = self._engine.algorithm, self._steps - state.step
        if algorithm.samples_per_prompt:
            self._phases.enter("rollout", watch)
        self._ask(lambda e: e.begin(state.version, state.consumed, steps_left))
        if self._phases.shared and algorithm.samples_per_prompt:
            with watch("rollout"):
                self._ask(lambda e: e.wait())
            if algorithm.needs:
                self._phases.enter("inference", watch)
        while part := self._part(watch):
            with watch("inference"):
                self._prefill(part)
        fields = self._looked_at(broadcast_tensors(self._ask(lambda e: e.batch())), watch)
        self._phases.enter("train", watch)
        metrics = (self._ask(lambda e: e.metrics()) or {}) | self._phases.taken()
        return StepBatch(fields, self.drawn - state.consumed, metrics)

    @property
    def drawn(self) -> int:
        """How many records have been drawn."""
        count: int = broadcast_json(self._ask(lambda e: e.feed.drawn))
        return count

    def skip_to(self, drawn: int) -> None:
        """Use no record before number `drawn` any more, nor what was sampled for one."""
        self._ask(lambda e: e.skip_to(drawn))

    def renumber(self, by: int) -> None:
        """The version that training stands at has a number `by` higher now."""
        self._ask(lambda e: e.schedule.renumber(by) if e.schedule is not None else None)

    def _ask(self, question: Callable[[Experience], T]) -> T | None:
        """What rank 0's experience answers; None on the other ranks. See `lead` for errors."""

        def asked() -> T:
            assert self._ours is not None  # on rank 0
            return question(self._ours.experience)

        return lead(asked)

    def _looked_at(self, fields: Fields, watch: Stopwatch) -> Fields:
        """What training would ask of the models, before it sends them away: preferences are not sampled in parts."""
        if not self._phases.shared or self._engine.algorithm.needs <= fields.keys():
            return fields
        self._phases.enter("inference", watch)
        with watch("inference"):
            return self._engine.prefill_fields(fields)

    def _part(self, watch: Stopwatch) -> Fields:
        with watch("rollout"):
            return broadcast_tensors(self._ask(lambda e: e.part()))

    def _prefill(self, part: Fields) -> None:
        filled = self._engine.prefill_fields(part)
        found = {name: from_last(filled[name]) for name in sorted(filled.keys() - part.keys())}
        self._ask(lambda e: e.fill(found))
