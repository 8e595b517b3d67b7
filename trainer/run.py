"""One run's components on one rank, and the phases that the loop strings together.

Rank 0 alone has a data set, a connection to the gateway, a metrics writer; what it finds is broadcast as tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from trainer.algorithms import build_algorithm
from trainer.algorithms.base import Algorithm
from trainer.checkpoint.checkpoints import open_checkpoints
from trainer.checkpoint.parts import Part
from trainer.config import DistillConfig, TrainerConfig
from trainer.connection import roll_back_serving
from trainer.data import epoch_steps, run_records
from trainer.data.hub import at_commits
from trainer.data.records import summary
from trainer.data.tokenizer import model_tokenizer
from trainer.errors import DataError, Diverged, Preempted, PublishError, RankFailed
from trainer.evaluation import EvalSet
from trainer.exports import Exports
from trainer.faults.guard import Guard
from trainer.faults.heartbeat import progress
from trainer.faults.supervision import Faults
from trainer.megatron.engine import Engine, StepStats
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.parallel import broadcast_json, device_name, gather_json, is_rank_zero, on_rank_zero
from trainer.memory.build import Serving, build_memory
from trainer.memory.phases import Phases
from trainer.metrics.rollouts import sample_texts
from trainer.metrics.throughput import Stopwatch, Throughput, peak_flops
from trainer.metrics.writers import MetricsWriter
from trainer.publish import WeightPublisher
from trainer.rewards import Scorer, build_scorer
from trainer.rollouts.experience import Experience, ExperienceMaker, StepBatch, TrainState
from trainer.rollouts.sampling import RolloutSampler
from weightsync.bucket.carrier import Outcome

log = logging.getLogger(__name__)


class Run:
    """Everything the loop needs. Built after `parallel.distributed`, on every rank; close it at the end."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, metrics: MetricsWriter, serving: Serving) -> None:
        """`serving` was opened before, so that its server may be asleep when the models are made."""
        self.algorithm = build_algorithm(config.algorithm, config.rollout.max_tokens)
        config = on_rank_zero(lambda: at_commits(config, keep=True)) or config  # the others have no data
        config = in_steps(config, shape, self.algorithm)
        self.config, self.shape = config, shape
        self.engine = Engine(config, shape, self.algorithm)
        self._metrics = metrics
        self.checkpoints = open_checkpoints(config, shape, self.engine)
        self._publisher: WeightPublisher | None = None
        self._failed_publishes = self._failed_carries = 0
        self._evaluated: tuple[int, float | None] = (-1, None)  # step, and how good it was
        self._published_step = -1
        self._exports = Exports(config, shape, self.engine) if config.save_to is not None else None
        self.faults: Faults | None = None
        self._guard, self._suspicious = Guard(config.faults), False
        self.roll_back = Rollback(self)
        # None on the other ranks.
        self._rank_zero = on_rank_zero(lambda: RankZeroComponents(config, shape, self.algorithm))
        peak = config.watch.peak_tflops
        peak_flops_s = peak * 1e12 if peak else peak_flops()
        self._throughput = Throughput(shape, config.parallel.world_size, peak_flops_s, config.lora is not None)
        if config.publish is not None:
            self._publisher = WeightPublisher(config.publish, self.engine)
        if self.checkpoints is not None and self._rank_zero is not None:
            self.checkpoints.parts |= {**self._rank_zero.parts, "guard": self._guard}
        self._phases = Phases(build_memory(config, self.engine, serving.components, self._rank_zero))
        experience = self._rank_zero.experience if self._rank_zero is not None else None
        self.experience = ExperienceMaker(config, self.engine, self._phases, experience)

    def start(self) -> TrainState:
        """The state to go on from: the newest whole checkpoint's, or a fresh one."""
        self._began = time.monotonic()
        saved = self.checkpoints.resume() if self.checkpoints else None
        state = TrainState(**saved) if saved is not None else TrainState()
        devices = gather_json(device_name())
        if self._rank_zero is not None:
            c = self.config
            values: dict[str, Any] = {
                "steps": c.steps,
                "algorithm": c.algorithm.name,
                "world_size": c.parallel.world_size,
                "devices": devices,
            }
            values |= {"parameters": self.shape.parameters, "step": state.step, "data": self._rank_zero.summary()}
            self._metrics.write("start", values)
            if self.faults is not None and self.faults.restarted_because:
                reason = self.faults.restarted_because
                self._metrics.write("restart", {"attempt": self.faults.attempt, "reason": reason})
        if self._exports is not None:
            self._exports.start(resumed=saved is not None)
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
        raise Preempted(f"stopped by SIGTERM: {self._left_behind(state)}.")

    def train(self, batch: StepBatch) -> StepStats:
        """One step. Raises Diverged when its numbers are not sane; the weights are not to be used then."""
        stats = self.engine.step(batch.fields)
        if self.config.faults.spike_sigma and stats.grad_norm:  # it is 0 while only a critic warms up
            found = self._guard.problem(loss=stats.loss, grad_norm=stats.grad_norm) if is_rank_zero() else ""
            problem, self._suspicious = broadcast_json([found, self._guard.suspicious])
            if problem:
                numbers = f"loss {stats.loss:.4g}, gradient norm {stats.grad_norm:.4g}"
                raise Diverged(f"{problem} ({numbers}). Lower optimizer.lr.")
        return stats

    def due(self, what: Literal["publish", "checkpoint"], state: TrainState) -> bool:
        """Whether a phase runs after this step: every so many steps, and after the last."""
        section = getattr(self.config, what)
        return section is not None and self._falls(section.every, state)

    def _falls(self, every: int, state: TrainState) -> bool:
        return state.step % every == 0 or state.step == self.config.steps

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
            if is_rank_zero():
                self._metrics.write("publish_failed", {"step": state.step, "message": str(error)})
            return state, {}
        self._failed_publishes = 0
        self._carried(published.carried, state.step)
        took = {"swap_ms": published.swap_ms, "write_ms": published.write_ms}
        if published.version is None:
            return state, took
        self._published_step = state.step
        self.experience.published(published.version, state.step)
        return dataclasses.replace(state, version=published.version), took

    def _carried(self, outcomes: Sequence[dict[str, Any]], step: int) -> None:
        """Report what became of versions on their way to the bucket; `publish.max_failures` holds for them, too."""
        assert self.config.publish is not None
        for outcome in (Outcome(**outcome) for outcome in outcomes):
            if not outcome.error:
                self._failed_carries = 0
                if is_rank_zero():
                    told = dataclasses.asdict(outcome)
                    values = {name: told[name] for name in ("number", "sent", "full", "seconds", "skipped")}
                    self._metrics.write("carried", {"step": step, **values})
                continue
            self._failed_carries += 1
            if outcome.final or self._failed_carries > self.config.publish.max_failures:
                if not is_rank_zero():
                    raise RankFailed("rank 0 failed; its message says why")
                raise PublishError(outcome.error, final=outcome.final)
            if is_rank_zero():
                self._metrics.write("publish_failed", {"step": step, "message": outcome.error})

    def publish_again(self, state: TrainState) -> TrainState:
        """Publish the weights of `state` again; they get a new number: at the start, or after going back."""
        return self.publish(state)[0]

    def evaluate(self, state: TrainState, *, first: bool = False) -> None:
        """Answers to the sets that are due after this step, through the gateway; to all at the start of the run."""
        due = [entry.name for entry in self.config.eval if first or self._falls(entry.every, state)]
        if not due:
            return
        progress("eval", state.step)
        self._phases.enter("rollout")
        values = broadcast_json(on_rank_zero(lambda: self._evaluate(due, state)))
        name, metric = self.config.best_by
        if name in values and self._published_step == state.step:  # otherwise older weights have answered
            self._evaluated = (state.step, values[name].get(metric))

    def checkpoint(self, state: TrainState) -> None:
        """Save everything a resumed run needs to go on exactly."""
        if self.checkpoints is not None and not self._suspicious:
            progress("checkpoint", state.step)
            self._phases.enter("train")
            self.checkpoints.save(state.step, dataclasses.asdict(state), self._score(state))

    def export(self, state: TrainState) -> None:
        """Write Hugging Face checkpoints of this step, those that are wanted."""
        if self._exports is not None and not self._suspicious and self._exports.due(state.step, self._score(state)):
            progress("export", state.step)
            self._phases.enter("train")
            self._exports.save(state.step, self._score(state))

    def report(
        self, state: TrainState, batch: StepBatch, stats: StepStats, published: dict[str, float], watch: Stopwatch
    ) -> None:
        """One `step` event."""
        if not is_rank_zero():
            return
        self._report_checkpoints()
        numbers = {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr, "tokens": stats.tokens}
        step_ms = watch.elapsed_ms
        rate = {"tokens_per_s": round(stats.tokens / step_ms * 1e3, 1), "version": state.version, "step_ms": step_ms}
        rate |= self._throughput.metrics(batch.fields, watch.ms["train_ms"], self.algorithm.epochs)
        values = {"step": state.step, **numbers, **rate, **watch.ms, **batch.metrics, **published, **stats.metrics}
        self._metrics.write("step", values)
        shown = self.config.watch
        if shown.samples and self._rank_zero is not None and self._falls(shown.samples_every, state):
            samples = self._rank_zero.samples(shown.samples)
            if samples:  # none of an algorithm that learns from records
                self._metrics.write("samples", {"step": state.step, "samples": samples})

    def finish(self, state: TrainState) -> None:
        """Write the Hugging Face checkpoint, if one is wanted, and the last event."""
        self._wait_for_checkpoint()
        self._phases.enter("train")
        if self._exports is not None:
            self._exports.finish()
        if self._publisher is not None:
            self._carried(self._publisher.finish(), state.step)
        if is_rank_zero():
            seconds = round(time.monotonic() - self._began, 3)
            self._metrics.write("done", {"step": state.step, "version": state.version, "seconds": seconds})

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Write a metrics event. On rank 0."""
        self._metrics.write(event, values)

    def close(self) -> None:
        """Close everything, also when a part of it fails to close."""
        with contextlib.ExitStack() as last_first:
            if self._publisher is not None:
                last_first.callback(self._publisher.close)
            if self._rank_zero is not None:
                last_first.callback(self._rank_zero.close)

    def _evaluate(self, names: Sequence[str], state: TrainState) -> dict[str, dict[str, Any]]:
        """The outcome of each set, on rank 0."""
        assert self._rank_zero is not None
        found = {}
        for name in names:
            found[name] = self._rank_zero.evaluate(name)
            self._metrics.write("eval", {"step": state.step, "version": state.version, **found[name]})
        return found

    def _wait_for_checkpoint(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._report_checkpoints()

    def _left_behind(self, state: TrainState) -> str:
        """The message on how a run that leaves now can go on, on rank 0."""
        if self.checkpoints is None:
            return "nothing saved"
        if self.checkpoints.written == state.step:
            return f"saved at step {state.step}; run it again to go on"
        why = "a leap has begun" if self._suspicious else f"the checkpoint of step {state.step} could not be written"
        return f"{why}, so what was saved last stands; run it again to go on from there"

    def _report_checkpoints(self) -> None:
        for event, values in self.checkpoints.events() if self.checkpoints is not None else []:
            self._metrics.write(event, values)

    def _score(self, state: TrainState) -> float | None:
        """How good an evaluation at this very step was, if there was one."""
        step, score = self._evaluated
        return score if step == state.step else None


def in_steps(config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> TrainerConfig:
    """With the steps that its epochs take. Collective; raises DataError, on rank 0."""
    if config.epochs is None:
        return config
    tokenizer, longest = model_tokenizer(config.model), shape.max_positions
    steps: int = broadcast_json(on_rank_zero(lambda: epoch_steps(config, tokenizer, algorithm.learns, longest)))
    return msgspec.structs.replace(config, steps=steps, epochs=None)


class RankZeroComponents:
    """The data set, the rewards, the rollouts, and the batches made of them; what only rank 0 has. Close it at the end.
    The models that its rewards hold rest and wake together (`Models` in trainer/memory/build.py), those of evaluation
    sets too."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> None:
        """Raises ConfigError, DataError, RewardError for what the user must correct."""
        self._config = config
        self._tokenizer = tokenizer = model_tokenizer(config.model)
        if tokenizer.size > shape.vocab:
            problem = f"the tokenizer has {tokenizer.size} tokens, the model {shape.vocab}"
            raise DataError(f"{config.model.path}: {problem}. Put the model's own tokenizer.json there.")
        self._dataset = run_records(config, tokenizer, algorithm.learns, shape.max_positions)
        self._scorers: list[Scorer] = []
        self._rollouts: RolloutSampler | None = None
        self._sets: dict[str, EvalSet] = {}
        if config.gateway is not None:
            scorer = build_scorer(config.rewards, config.gateway)
            about = (config.gateway, config.rollout, scorer, tokenizer, config.seed)
            more: dict[str, Any] = {"environment": config.environment, "model": config.served_name}
            if isinstance(config.algorithm, DistillConfig):
                more["teacher"] = config.algorithm.teacher
            self._rollouts = RolloutSampler(*about, **more)
            for entry in config.eval:
                self._sets[entry.name] = EvalSet(entry, config, self._dataset, tokenizer)
            self._scorers = [scorer, *(s.scorer for s in self._sets.values() if s.scorer is not None)]
        self.experience = Experience(config, algorithm, self._dataset, self._rollouts, shape.max_positions)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts of the run that a checkpoint keeps, beside the engine."""
        kept: dict[str, Part] = {"data": self.experience.feed}
        return kept if self.experience.schedule is None else kept | {"rollouts": self.experience.schedule}

    def summary(self) -> dict[str, Any]:
        """The facts about the data set in the `start` event."""
        return summary(self._dataset)

    def samples(self, most: int) -> list[dict[str, Any]]:
        """The samples of a `samples` event: the step's completions to `most` prompts."""
        return sample_texts(self.experience.groups, most, partial(self._tokenizer.decode, special=True))

    def evaluate(self, name: str) -> dict[str, Any]:
        """The fields of an `eval` event for the set of that name. Raises RolloutError."""
        assert self._rollouts is not None
        return self._sets[name](self._rollouts)

    @property
    def nbytes(self) -> int:
        """Of host memory, what the rewards' models hold while they are awake."""
        return sum(scorer.nbytes for scorer in self._scorers)

    def rest(self) -> None:
        """Give up the rewards' models, when nothing is being scored."""
        for scorer in self._scorers:
            scorer.rest()

    def wake(self) -> None:
        """Have them again. Raises as opening does."""
        for scorer in self._scorers:
            scorer.wake()

    def close(self) -> None:
        """End what is being sampled, and the rewards."""
        if self._rollouts is not None:
            self._rollouts.close()
        for each in self._sets.values():
            each.close()


class Rollback:
    """Goes back to the last checkpoint when a step's numbers are not sane, in training and in serving. Counts what went
    wrong where. Collective."""

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config.faults
        self._done = 0
        self._strikes: Counter[int] = Counter()

    def __call__(self, bad: TrainState, error: Diverged) -> TrainState:
        """The state to go on from, after a step from `bad` went wrong; raises `error` when there is to be no going
        back, or no more of it.

        The first time the steps since the checkpoint are repeated as they were: if memory or a link failed, that was
        all. A step that fails again is not at fault for the hardware: everything drawn up to it is left out then.
        """
        run = self._run
        if self._config.on_diverged == "stop" or run.checkpoints is None:
            raise error
        if self._done == self._config.max_rollbacks:
            raise Diverged(f"{error} It was so after {self._done} rollbacks too (faults.max_rollbacks).") from error
        self._done += 1
        self._strikes[bad.step] += 1
        drawn = run.experience.drawn
        good = dataclasses.replace(bad, **run.checkpoints.restore())
        if skip := self._strikes[bad.step] > 1:
            run.experience.skip_to(drawn)
            good = dataclasses.replace(good, consumed=drawn)
        good = self._serve(good, bad)
        if is_rank_zero():
            values = {"step": bad.step + 1, "to_step": good.step, "version": good.version, "reason": str(error)}
            run.write("rollback", values | {"skipped_to": drawn if skip else None})
        return good

    def _serve(self, good: TrainState, bad: TrainState) -> TrainState:
        """The version of the checkpoint serves again; if it cannot, its weights are published as a new one."""
        run = self._run
        publish = run.config.publish
        if publish is None or not self._config.rollback_serving:
            return good
        if bad.version == good.version and publish.store_url:  # without a store all versions are 0
            return good
        if broadcast_json(on_rank_zero(lambda: self._gateway_went_back(good.version))):
            return good
        return run.publish_again(good)

    def _gateway_went_back(self, version: int) -> bool:
        telemetry, publish = self._run.config.telemetry, self._run.config.publish
        if telemetry is None or publish is None or publish.bucket is not None or version == 0:
            return False  # a bucket has no way back: followers take the newest version
        try:
            roll_back_serving(telemetry, version, publish.timeout_s)
        except PublishError as error:
            log.warning("%s Its weights are published again.", error)
            return False
        return True
