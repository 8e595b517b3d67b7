"""One run's components on one rank, and the phases that the loop strings together.

Rank 0 alone has a data set, a connection to the gateway, a metrics writer; what it finds is broadcast as tensors.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.algorithms import build_algorithm
from trainer.batch import Fields
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.config import TrainerConfig
from trainer.config.datasets import identity
from trainer.data import Tokenizer, build_dataset, summary
from trainer.errors import ConfigError, DataError, Preempted, PublishError, RankFailed
from trainer.evaluation import evaluate
from trainer.experience import Experience
from trainer.faults import Guard, progress
from trainer.faults.faults import Faults
from trainer.faults.rollback import Rollback, judged
from trainer.megatron.engine import Engine, StepStats
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import finish_checkpoint, write_shards
from trainer.megatron.parallel import broadcast_json, broadcast_tensors, from_last, gather_json, is_lead, lead
from trainer.memory import Memory, Phase, build_memory
from trainer.metrics import MetricsWriter, Stopwatch
from trainer.metrics.throughput import Throughput, peak_flops
from trainer.publish import WeightPublisher
from trainer.rewards import Scorer, build_scorer
from trainer.rollout import Rollouts

log = logging.getLogger(__name__)
T = TypeVar("T")


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


class Run:
    """Everything the loop needs. Built after `parallel.distributed`, on every rank; close it at the end."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, metrics: MetricsWriter) -> None:
        self.config, self.shape = config, shape
        self.algorithm = build_algorithm(config.algorithm, config.rollout.max_tokens)
        self.engine = Engine(config, shape, self.algorithm)
        self._metrics = metrics
        self.checkpoints = Checkpoints(config.checkpoint, self.engine, self._identity()) if config.checkpoint else None
        self._publisher: WeightPublisher | None = None
        self._failed_publishes = 0
        self._evaluated = (-1, 0.0)
        self.faults: Faults | None = None
        self._guard, self._suspicious = Guard(config.faults), False
        self.roll_back = Rollback(self)
        self._rollouts: Rollouts | None = None
        self._scorer: Scorer | None = None
        lead(self._open_lead)
        peak = config.watch.peak_tflops
        self._throughput = Throughput(shape, config.parallel.world_size, peak * 1e12 if peak else peak_flops())
        if config.publish is not None:
            self._publisher = WeightPublisher(config.publish, self.engine)
        if self.checkpoints is not None and is_lead():
            self.checkpoints.parts["guard"] = self._guard
        self._memory: Memory = build_memory(config, self.engine, models=self._scorer)
        self._switched: dict[str, float] = {}

    def start(self) -> TrainState:
        """The state to go on from: the newest whole checkpoint's, or a fresh one."""
        self._began = time.monotonic()
        saved = self.checkpoints.resume() if self.checkpoints else None
        state = TrainState(**saved) if saved is not None else TrainState()
        if is_lead():
            c = self.config
            values: dict[str, Any] = {
                "steps": c.steps,
                "algorithm": c.algorithm.name,
                "world_size": c.parallel.world_size,
            }
            values |= {"parameters": self.shape.parameters, "step": state.step, "data": summary(self._dataset)}
            self._metrics.write("start", values)
            if self.faults is not None and self.faults.restarted_because:
                reason = self.faults.restarted_because
                self._metrics.write("restart", {"attempt": self.faults.attempt, "reason": reason})
        if saved is None and self.config.faults.on_diverged == "rollback":
            self.checkpoint(state)  # there must be one to go back to
        return state

    def may_leave(self, state: TrainState) -> None:
        """Between two steps: raises Preempted, with everything saved, if a rank was sent SIGTERM."""
        progress("begin", state.step + 1)
        if self.faults is None or not self.faults.leaving():
            return
        self.checkpoint(state)
        self._wait_for_checkpoint()
        saved = f"saved at step {state.step}; run it again to go on" if self.checkpoints else "nothing saved"
        raise Preempted(f"stopped by SIGTERM: {saved}.")

    def train(self, batch: StepBatch) -> StepStats:
        """One step. Raises Diverged when its numbers are not sane; the weights are not to be used then."""
        stats = self.engine.step(batch.fields)
        if self.config.faults.spike_sigma and stats.grad_norm:  # it is 0 while only a critic warms up
            found = self._guard.problem(loss=stats.loss, grad_norm=stats.grad_norm) if is_lead() else ""
            problem, self._suspicious = broadcast_json([found, self._guard.suspicious])
            judged(problem, stats)
        return stats

    def due(self, what: Literal["publish", "eval", "checkpoint"], state: TrainState) -> bool:
        """Whether a phase runs after this step: every so many steps, and after the last."""
        section = getattr(self.config, what)
        return section is not None and (state.step % section.every == 0 or state.step == self.config.steps)

    def sample(self, state: TrainState, watch: Stopwatch) -> StepBatch:
        """The next step's tensors: records, and what the schedule has sampled for them if the algorithm wants it.

        While rollouts are still under way, the models already look at those that fill a forward pass; unless the two
        share a device by turns.
        """
        steps_left = self.config.steps - state.step
        if self.algorithm.samples_per_prompt:
            self._enter("rollout", watch)
        self._experience(lambda e: e.begin(state.version, state.consumed, steps_left))
        if self.config.memory is not None and self.algorithm.samples_per_prompt:
            with watch("rollout"):
                self._experience(lambda e: e.wait())
            if self.algorithm.needs:
                self._enter("inference", watch)
        while part := self._part(watch):
            with watch("inference"):
                self._prefill(part)
        fields = broadcast_tensors(self._experience(lambda e: e.batch()))
        self._enter("train", watch)
        metrics = (self._experience(lambda e: e.metrics()) or {}) | self._switched
        self._switched = {}
        return StepBatch(fields, self.drawn - state.consumed, metrics)

    def publish(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Publish the current weights. A failure is reported and, within `publish.max_failures` in a row, survived."""
        if self._publisher is None or self.config.publish is None:
            return state, {}
        try:
            published = self._publisher.publish(state.step)
        except (PublishError, RankFailed) as error:
            self._failed_publishes += 1
            final = broadcast_json(getattr(error, "final", False))
            if final or self._failed_publishes > self.config.publish.max_failures:
                raise
            if is_lead():
                self._metrics.write("publish_failed", {"step": state.step, "message": str(error)})
            return state, {}
        self._failed_publishes = 0
        return dataclasses.replace(state, version=published.version), {
            "swap_ms": published.swap_ms,
            "write_ms": published.write_ms,
        }

    def publish_again(self, state: TrainState) -> TrainState:
        """Publish the weights that `state` has, under whatever number they get now: at the start, or after going back.
        What was sampled from them, and is still to be trained on, is as old as it was."""
        published, _ = self.publish(state)
        by = published.version - state.version
        self._experience(lambda e: e.schedule.renumber(by) if e.schedule is not None else None)
        return published

    def evaluate(self, state: TrainState) -> None:
        """Greedy answers to the held-out records through the gateway."""
        if self.config.eval is not None:
            progress("eval", state.step)
            self._enter("rollout")
            lead(lambda: self._evaluate(state))

    def checkpoint(self, state: TrainState) -> None:
        """Save everything a resumed run needs to go on exactly."""
        if self.checkpoints is not None and not self._suspicious:
            progress("checkpoint", state.step)
            self._enter("train")
            self.checkpoints.save(state.step, dataclasses.asdict(state), self._score(state))

    def report(
        self, state: TrainState, batch: StepBatch, stats: StepStats, published: dict[str, float], watch: Stopwatch
    ) -> None:
        """One `step` event."""
        if not is_lead():
            return
        self._report_checkpoints()
        numbers = {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr, "tokens": stats.tokens}
        step_ms = watch.elapsed_ms
        rate = {"tokens_per_s": round(stats.tokens / step_ms * 1e3, 1), "version": state.version, "step_ms": step_ms}
        rate |= self._throughput.metrics(batch.fields, watch.ms["train_ms"], self.algorithm.epochs)
        values = {"step": state.step, **numbers, **rate, **watch.ms, **batch.metrics, **published, **stats.metrics}
        self._metrics.write("step", values)

    def finish(self, state: TrainState) -> None:
        """Write the Hugging Face checkpoint, if one is wanted, and the last event."""
        self._wait_for_checkpoint()
        self._enter("train")
        if self.config.save_to is not None:
            self.save_hf(self.config.save_to)
        if is_lead():
            seconds = round(time.monotonic() - self._began, 3)
            self._metrics.write("done", {"step": state.step, "version": state.version, "seconds": seconds})

    def save_hf(self, directory: str) -> None:
        """The current weights as a Hugging Face checkpoint directory; every rank writes what it holds."""
        lead(lambda: Path(directory).mkdir(parents=True, exist_ok=True))
        part = self.engine.part
        written = gather_json(write_shards(directory, self.engine.export(self.config.model.dtype), part))
        model = self.config.model
        lead(lambda: finish_checkpoint(directory, [w for share in written for w in share], model.path, model.dtype))

    @property
    def drawn(self) -> int:
        """How many records have been drawn. Collective."""
        count: int = broadcast_json(self._experience(lambda e: e.feed.drawn))
        return count

    def skip_to(self, drawn: int) -> None:
        """Use no record before number `drawn` any more, nor what was sampled for one. On rank 0."""
        self._learned_from.feed.drawn = drawn
        if (schedule := self._learned_from.schedule) is not None:
            schedule.load_state_dict({"drawn": drawn, "pending": []})

    def write(self, event: str, values: dict[str, Any]) -> None:
        """An event to whoever watches. On rank 0."""
        self._metrics.write(event, values)

    def close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
        if self._publisher is not None:
            self._publisher.close()
        self._memory.close()

    def _open_lead(self) -> None:
        c = self.config
        self._tokenizer = Tokenizer(c.model.path)
        if self._tokenizer.size > self.shape.vocab:
            problem = f"the tokenizer has {self._tokenizer.size} tokens, the model {self.shape.vocab}"
            raise DataError(f"{c.model.path}: {problem}. Put the model's own tokenizer.json there.")
        self._dataset = build_dataset(c.data, self._tokenizer, c.seed)
        if c.eval is not None and not self._dataset.held_out:
            raise ConfigError("eval", "there are no held-out records", "Set data.eval_path or data.held_out")
        if c.gateway is not None:
            self._scorer = build_scorer(c.rewards, c.gateway)
            self._rollouts = Rollouts(c.gateway, c.rollout, self._scorer, self._tokenizer, c.seed)
        longest = self.shape.max_positions
        self._learned_from = Experience(c, self.algorithm, self._dataset, self._rollouts, longest)
        if self.checkpoints is not None:
            self.checkpoints.parts["data"] = self._learned_from.feed
            if self._learned_from.schedule is not None:
                self.checkpoints.parts["rollouts"] = self._learned_from.schedule

    def _experience(self, ask: Callable[[Experience], T]) -> T | None:
        """What rank 0's experience answers; None on the other ranks. See `lead` for errors."""
        return lead(lambda: ask(self._learned_from))

    def _enter(self, phase: Phase, watch: Stopwatch | None = None) -> None:
        """Have in memory what the phase needs; what the switch took counts as the step's."""
        if watch is None:
            self._memory.enter(phase)
        elif self.config.memory is not None:
            with watch("memory"):
                took = self._memory.enter(phase)
            self._switched |= {name: ms for name, ms in took.items() if "/" in name}

    def _part(self, watch: Stopwatch) -> Fields:
        with watch("rollout"):
            return broadcast_tensors(self._experience(lambda e: e.part()))

    def _prefill(self, part: Fields) -> None:
        filled = self.engine.prefill_fields(part)
        found = {name: from_last(filled[name]) for name in sorted(filled.keys() - part.keys())}
        self._experience(lambda e: e.fill(found))

    def _evaluate(self, state: TrainState) -> None:
        assert self.config.eval is not None
        assert self._rollouts is not None
        values = evaluate(self._rollouts, self._dataset.held_out, self.config.eval)
        self._evaluated = (state.step, values["accuracy"])
        self._metrics.write("eval", {"step": state.step, "version": state.version, **values})

    def _wait_for_checkpoint(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._report_checkpoints()

    def _report_checkpoints(self) -> None:
        for event, values in self.checkpoints.events() if self.checkpoints is not None else []:
            self._metrics.write(event, values)

    def _score(self, state: TrainState) -> float | None:
        """The accuracy of an evaluation at this very step, if there was one."""
        step, accuracy = self._evaluated
        return accuracy if step == state.step else None

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        c = self.config
        shape = {k: v for k, v in dataclasses.asdict(self.shape).items() if k != "max_positions"}
        return {"seed": c.seed, "algorithm": c.algorithm.name, "data": identity(c.data), "model": shape}
