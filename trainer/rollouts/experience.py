"""The experience of a run, step by step: records, their samples, and the tensors that these become.

`ExperienceMaker.step` runs on every rank: rank 0 has an `Experience`, samples, and keeps the tensors. The engine sends
each rank its part of them.

    begin -> part, fill, part, fill, ... (None: all are there) -> batch

While samples are still being taken, `part` hands out those that fill a forward pass, so that the reference's, the
critic's and the actor's own passes over them need not wait for the last one; `fill` takes their results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from trainer.algorithms.base import Algorithm
from trainer.batch import Fields, Rows, Sequence, assemble, lay_out, plan_rows, take_back
from trainer.config import TrainerConfig
from trainer.data.records import Dataset, Record
from trainer.errors import DataError, RolloutError
from trainer.megatron.engine import Engine
from trainer.megatron.parallel import broadcast_json, on_rank_zero
from trainer.memory.phases import Phases
from trainer.metrics.rollouts import rollout_metrics
from trainer.metrics.throughput import Stopwatch
from trainer.rollouts.feed import Draw, Feed
from trainer.rollouts.sampling import RolloutSampler
from trainer.rollouts.schedules import Rollout, Schedule, build_schedule
from trainer.trajectory import Outcome, TrajectoryGroup

T = TypeVar("T")


@dataclass(frozen=True)
class TrainState:
    """The progress of a run: steps done, records drawn, the last version published (0: none)."""

    step: int = 0
    consumed: int = 0
    version: int = 0

    def after_step(self, records: int) -> TrainState:
        return dataclasses.replace(self, step=self.step + 1, consumed=self.consumed + records)


@dataclass(frozen=True)
class StepBatch:
    """A step's tensors (on rank 0), how many records were drawn for it and ahead of it (on every rank), and what is
    known about its rollouts (on rank 0)."""

    fields: Fields
    records: int
    metrics: dict[str, float]


class ExperienceMaker:
    """The steps' tensors, on rank 0. `experience` is rank 0's; it is None on the others. Collective."""

    def __init__(self, config: TrainerConfig, engine: Engine, phases: Phases, experience: Experience | None) -> None:
        self._steps, self._engine, self._phases, self._experience = config.steps, engine, phases, experience

    def step(self, state: TrainState, watch: Stopwatch) -> StepBatch:
        """The next step's tensors: records, and what the schedule has sampled for them if the algorithm wants it.

        While rollouts are still under way, the models already look at those that fill a forward pass; unless the two
        share a device by turns.
        """
        algorithm, steps_left = self._engine.algorithm, self._steps - state.step
        if algorithm.samples_per_prompt:
            self._phases.enter("rollout", watch)
        self._ask(lambda e: e.begin(state.step, state.consumed, steps_left))
        if self._phases.shared and algorithm.samples_per_prompt:
            with watch("rollout"):
                self._ask(lambda e: e.wait())
            if algorithm.needs:
                self._phases.enter("inference", watch)
        while (part := self._part(watch)) is not None:
            with watch("inference"):
                self._prefill(part)
        fields = self._looked_at(self._ask(lambda e: e.batch()) or {}, watch)
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

    def published(self, version: int, step: int) -> None:
        """The server has the weights after `step` optimizer steps, as `version`. Not collective."""
        if self._experience is not None and self._experience.schedule is not None:
            self._experience.schedule.steps.published(version, step)

    def _ask(self, question: Callable[[Experience], T]) -> T | None:
        """The answer of rank 0's experience; None on the other ranks. See `on_rank_zero` for errors."""

        def asked() -> T:
            assert self._experience is not None  # on rank 0
            return question(self._experience)

        return on_rank_zero(asked)

    def _looked_at(self, fields: Fields, watch: Stopwatch) -> Fields:
        """`fields` with the models' values, before the models are sent away: preferences are not sampled in parts."""
        if not self._phases.shared or broadcast_json(self._engine.algorithm.needs <= fields.keys()):
            return fields
        self._phases.enter("inference", watch)
        with watch("inference"):
            return self._engine.prefill_fields(fields)

    def _part(self, watch: Stopwatch) -> Fields | None:
        """The next part on rank 0, and an empty one on the others; None when there is none."""
        with watch("rollout"):
            part = self._ask(lambda e: e.part())
            return part or {} if broadcast_json(part is not None) else None

    def _prefill(self, part: Fields) -> None:
        filled = self._engine.prefill_fields(part)
        self._ask(lambda e: e.fill({name: filled[name] for name in filled.keys() - part.keys()}))


class Experience:
    """A step's experience, on rank 0. It owns neither the data set nor the rollouts. `longest` is how many tokens the
    model takes."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        dataset: Dataset,
        rollouts: RolloutSampler | None,
        longest: int,
    ) -> None:
        self._config, self._algorithm, self._longest = config, algorithm, longest
        self._rollouts = rollouts
        self.feed = Feed(dataset, config.seed, config.order)
        self.schedule: Schedule | None = None
        if algorithm.samples_per_prompt:
            every = config.publish.every if config.publish is not None else 1
            about = (config.schedule, config.batch, self.feed, self._start, self._keep)
            self.schedule = build_schedule(*about, every, config.rollout.rounds)
        self._arriving: Iterator[Rollout] = iter(())
        self._taken: list[Rollout] = []
        self._sequences: list[Sequence] = []
        self._part: list[Sequence] = []
        self._rows: Rows = []

    def begin(self, step: int, consumed: int, steps_left: int) -> None:
        """Start on a step from weights of `step` optimizer steps, for a run that has used `consumed` records.
        `steps_left` counts this step."""
        self._step, self._steps_left = step, steps_left
        self._taken, self._sequences = [], []
        if self.schedule is None:
            self.feed.drawn = consumed
            self._sequences = self._algorithm.sequences(self._draw(), [], step)
            return
        self.feed.drawn = max(self.feed.drawn, consumed)
        self._arriving = self.schedule.take(step, steps_left)

    def wait(self) -> None:
        """Take all of the step's rollouts now, because the server must not sample while the models compute."""
        self._arriving = iter(list(self._arriving))

    def part(self) -> Fields | None:
        """The next sequences that a forward pass takes, as soon as they are there; None when there are no more, or
        when the algorithm asks for no pass before the step's."""
        if not self._algorithm.needs:
            self._take(list(self._arriving))
            self._taken.sort(key=lambda rollout: rollout.draw.number)  # which answer was faster must not count
            self._sequences = self._sequences_of(self._taken) if self._taken else self._sequences
            return None
        self._part = []
        while not self._full(self._part) and (rollout := next(self._arriving, None)) is not None:
            self._take([rollout])
            self._part += self._sequences_of([rollout])
        return self._lay_out_part() if self._part else None

    def fill(self, values: Fields) -> None:
        """Take the models' values for the last part: [B, T] by name."""
        for name, values_BT in values.items():
            found = take_back(values_BT.cpu(), self._part, self._rows)
            pairs = zip(self._part, found, strict=True)
            self._part = [replace(s, per_token={**s.per_token, name: v.tolist()}) for s, v in pairs]
        self._sequences += self._part

    def batch(self) -> Fields:
        """The step's tensors. Raises DataError for a sequence that the model cannot take."""
        if not self._sequences:
            raise RolloutError(
                "a step has nothing to train on: each trajectory is empty, its environment or reward failed, or no "
                "reward applies to it. Check rollout.stop_token_ids, and the warnings above."
            )
        c = self._config
        for length in (s.length for s in self._sequences):
            if length > self._longest:
                problem = f"a sequence has {length} tokens, the model takes {self._longest}"
                raise DataError(f"{problem}. Shorten the records or rollout.max_tokens.")
        minibatches = self._algorithm.minibatches
        return assemble(self._sequences, c.packing, ranks=c.parallel.data, minibatches=minibatches)

    def skip_to(self, drawn: int) -> None:
        """Use no record before number `drawn` any more, nor what was sampled for one."""
        self.feed.drawn = drawn
        if self.schedule is not None:
            self.schedule.skip_to(drawn)

    @property
    def groups(self) -> list[TrajectoryGroup]:
        """The step's, in the order in which they were taken."""
        return [rollout.group for rollout in self._taken]

    def metrics(self) -> dict[str, float]:
        """The metrics of the step's rollouts."""
        if self.schedule is None or self._rollouts is None:
            return {}
        sampled = rollout_metrics(self.groups, self._step) | self.schedule.stats() | self._rollouts.stats()
        return sampled | self.feed.stats()

    def _start(self, draw: Draw, before: Future[Outcome] | None = None) -> Future[Outcome]:
        assert self._rollouts is not None  # the configuration insists on a gateway
        return self._rollouts.round(draw.record, self._algorithm.samples_per_prompt, draw.number, before)

    def _keep(self, group: TrajectoryGroup) -> bool:
        """Whether it is of use: an environment or a reward may have failed for all of it."""
        return bool(group.trajectories) and self._algorithm.keep_group(group)

    def _draw(self) -> list[Record]:
        return [draw.record for draw in self.feed.draw(self._config.batch)]

    def _take(self, rollouts: list[Rollout]) -> None:
        self._taken += rollouts
        if self.schedule is not None and len(self._taken) == self._config.batch:
            self.schedule.ahead(self._step, self._steps_left - 1)

    def _sequences_of(self, rollouts: list[Rollout]) -> list[Sequence]:
        records, groups = [r.draw.record for r in rollouts], [r.group for r in rollouts]
        return self._algorithm.sequences(records, groups, self._step)

    def _full(self, part: list[Sequence]) -> bool:
        """Whether every data-parallel rank has a forward pass's worth."""
        c = self._config
        if c.packing is not None:
            return sum(s.length for s in part) >= c.packing.max_tokens * c.parallel.data
        return len(part) >= c.micro_batch * c.parallel.data

    def _lay_out_part(self) -> Fields:
        c = self._config
        self._rows = [[i] for i in range(len(self._part))]
        if c.packing is not None:
            self._rows = plan_rows(self._part, c.packing.max_tokens, ranks=c.parallel.data)
        return lay_out(self._part, self._rows, packed=c.packing is not None)
