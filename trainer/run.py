"""One run's components on one rank, and the phases that the loop strings together.

Rank 0 alone has a data set, a connection to the gateway, a metrics writer; what it finds is broadcast as tensors.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.algorithms import build_algorithm
from trainer.batch import Fields, collate
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.config import TrainerConfig
from trainer.data import Tokenizer, build_dataset, take
from trainer.errors import ConfigError, DataError, PublishError, RankFailed
from trainer.evaluation import evaluate
from trainer.megatron.engine import Engine, StepStats
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import finish_checkpoint, write_shards
from trainer.megatron.parallel import broadcast_json, broadcast_tensors, gather_json, is_lead, lead
from trainer.metrics import MetricsWriter, Stopwatch, rollout_metrics
from trainer.publish import WeightPublisher
from trainer.rewards import build_scorer
from trainer.rollout import Group, Rollouts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """Where a run stands: optimizer steps done, records used, the last version published (0: none)."""

    step: int = 0
    consumed: int = 0
    version: int = 0

    def after_step(self, records: int) -> TrainState:
        return dataclasses.replace(self, step=self.step + 1, consumed=self.consumed + records)


@dataclass(frozen=True)
class StepBatch:
    """A step's tensors (on every rank) and what is known about its rollouts (on rank 0)."""

    fields: Fields
    metrics: dict[str, float]


class Run:
    """Everything the loop needs. Built after `parallel.distributed`, on every rank; close it at the end."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, metrics: MetricsWriter) -> None:
        self.config, self.shape = config, shape
        self.algorithm = build_algorithm(config.algorithm)
        self.engine = Engine(config, shape, self.algorithm)
        self._metrics = metrics
        self.checkpoints = Checkpoints(config.checkpoint, self.engine, self._identity()) if config.checkpoint else None
        self._publisher: WeightPublisher | None = None
        self._failed_publishes = 0
        self._evaluated = (-1, 0.0)
        self._rollouts: Rollouts | None = None
        lead(self._open_lead)
        if config.publish is not None:
            self._publisher = WeightPublisher(config.publish, self.engine)

    def start(self) -> TrainState:
        """The state to go on from: the newest whole checkpoint's, or a fresh one."""
        self._began = time.monotonic()
        saved = self.checkpoints.resume() if self.checkpoints else None
        state = TrainState(**saved) if saved is not None else TrainState()
        if is_lead():
            c = self.config
            values = {"steps": c.steps, "algorithm": c.algorithm.name, "world_size": c.parallel.world_size}
            self._metrics.write("start", values | {"parameters": self.shape.parameters, "step": state.step})
        return state

    def due(self, what: Literal["publish", "eval", "checkpoint"], state: TrainState) -> bool:
        """Whether a phase runs after this step: every so many steps, and after the last."""
        section = getattr(self.config, what)
        return section is not None and (state.step % section.every == 0 or state.step == self.config.steps)

    def sample(self, state: TrainState) -> StepBatch:
        """The next records, their scored rollouts if the algorithm wants any, and the tensors to train on."""
        sampled: tuple[Fields, dict[str, float]] | None = lead(lambda: self._sample(state))
        fields, metrics = sampled or (None, {})
        return StepBatch(broadcast_tensors(fields), metrics)

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

    def evaluate(self, state: TrainState) -> None:
        """Greedy answers to the held-out records through the gateway."""
        if self.config.eval is not None:
            lead(lambda: self._evaluate(state))

    def checkpoint(self, state: TrainState) -> None:
        """Save everything a resumed run needs to go on exactly."""
        if self.checkpoints is not None:
            self.checkpoints.save(state.step, dataclasses.asdict(state), self._score(state))

    def report(self, state: TrainState, stats: StepStats, extra: dict[str, float], watch: Stopwatch) -> None:
        """One `step` event."""
        if not is_lead():
            return
        self._report_checkpoints()
        numbers = {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr, "tokens": stats.tokens}
        seconds = sum(watch.ms.values()) / 1e3
        rate = {"tokens_per_s": round(stats.tokens / seconds, 1), "version": state.version}
        self._metrics.write("step", {"step": state.step, **numbers, **rate, **watch.ms, **extra, **stats.metrics})

    def finish(self, state: TrainState) -> None:
        """Write the Hugging Face checkpoint, if one is wanted, and the last event."""
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._report_checkpoints()
        if self.config.save_to is not None:
            self.save_hf(self.config.save_to)
        if is_lead():
            seconds = round(time.monotonic() - self._began, 3)
            self._metrics.write("done", {"step": state.step, "version": state.version, "seconds": seconds})

    def save_hf(self, directory: str) -> None:
        """The current weights as a Hugging Face checkpoint directory; each pipeline stage writes its own shard."""
        lead(lambda: Path(directory).mkdir(parents=True, exist_ok=True))
        part = self.engine.pipeline_rank
        written = gather_json(write_shards(directory, self.engine.export(self.config.model.dtype), part))
        model = self.config.model
        lead(lambda: finish_checkpoint(directory, [w for share in written for w in share], model.path, model.dtype))

    def close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
        if self._publisher is not None:
            self._publisher.close()

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
            self._rollouts = Rollouts(c.gateway, c.rollout, build_scorer(c.rewards), self._tokenizer, c.seed)

    def _sample(self, state: TrainState) -> tuple[Fields, dict[str, float]]:
        indices = take(len(self._dataset), self.config.seed, state.consumed, self.config.batch)
        records = [self._dataset[i] for i in indices]
        groups: list[Group] = []
        if self.algorithm.samples_per_prompt:
            assert self._rollouts is not None  # the configuration insists on a gateway
            n, rollouts = self.algorithm.samples_per_prompt, self._rollouts
            running = [rollouts.submit(record, n, state.consumed + i) for i, record in enumerate(records)]
            groups = [future.result() for future in running]
        sequences = self.algorithm.sequences(records, groups)
        for sequence in sequences:
            if sequence.length > self.shape.max_positions:
                problem = f"a sequence has {sequence.length} tokens, the model takes {self.shape.max_positions}"
                raise DataError(f"{problem}. Shorten the records or rollout.max_tokens.")
        return collate(sequences), rollout_metrics(groups, state.version)

    def _evaluate(self, state: TrainState) -> None:
        assert self.config.eval is not None
        assert self._rollouts is not None
        values = evaluate(self._rollouts, self._dataset.held_out, self.config.eval)
        self._evaluated = (state.step, values["accuracy"])
        self._metrics.write("eval", {"step": state.step, "version": state.version, **values})

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
        return {"seed": c.seed, "algorithm": c.algorithm.name, "data": dataclasses.asdict(c.data), "model": shape}
