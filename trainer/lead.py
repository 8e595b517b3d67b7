"""The parts of a run that only rank 0 has: the data set, the rewards, the rollouts, and the batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.algorithms.base import Algorithm
from trainer.checkpoint.parts import Part
from trainer.config import DistillConfig, EvalConfig, TrainerConfig
from trainer.data import build_dataset
from trainer.data.records import Record, summary
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError
from trainer.megatron.hf_config import ModelShape
from trainer.metrics.rollouts import evaluation_metrics
from trainer.rewards import Scorer, build_scorer
from trainer.rollouts.experience import Experience
from trainer.rollouts.sampling import Rollouts
from trainer.trajectory import Group

FIRST_NUMBER = 2**40  # evaluations use no seed of the training


class Lead:
    """Opened on rank 0; close it at the end. `scorer` is None for a run that samples nothing."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> None:
        """Raises ConfigError, DataError, SandboxUnavailable for what the user must correct."""
        self._config = config
        tokenizer = Tokenizer(config.model.path)
        if tokenizer.size > shape.vocab:
            problem = f"the tokenizer has {tokenizer.size} tokens, the model {shape.vocab}"
            raise DataError(f"{config.model.path}: {problem}. Put the model's own tokenizer.json there.")
        self._dataset = build_dataset(config.data, tokenizer, config.seed)
        if config.eval is not None and not self._dataset.held_out:
            raise ConfigError("eval", "there are no held-out records", "Set data.eval_path or data.held_out")
        self.scorer: Scorer | None = None
        self._rollouts: Rollouts | None = None
        if config.gateway is not None:
            self.scorer = build_scorer(config.rewards, config.gateway)
            about = (config.gateway, config.rollout, self.scorer, tokenizer, config.seed)
            more: dict[str, Any] = {"environment": config.environment, "model": config.served_name}
            if isinstance(config.algorithm, DistillConfig):
                more["teacher"] = config.algorithm.teacher
            self._rollouts = Rollouts(*about, **more)
        self.experience = Experience(config, algorithm, self._dataset, self._rollouts, shape.max_positions)

    @property
    def parts(self) -> dict[str, Part]:
        """What a checkpoint keeps of the run, beside the engine."""
        kept: dict[str, Part] = {"data": self.experience.feed}
        return kept if self.experience.schedule is None else kept | {"rollouts": self.experience.schedule}

    def summary(self) -> dict[str, Any]:
        """What the `start` event says about the data set."""
        return summary(self._dataset)

    def evaluate(self) -> dict[str, Any]:
        """Answers to the held-out records, for an `eval` event. The configuration has a section `eval`."""
        assert self._config.eval is not None
        assert self._rollouts is not None
        return evaluate(self._rollouts, self._dataset.held_out, self._config.eval)

    def close(self) -> None:
        """End what is being sampled, and the rewards."""
        if self._rollouts is not None:
            self._rollouts.close()


def answers(rollouts: Rollouts, records: Sequence[Record], samples: int) -> list[Group]:
    """The greedy answer to each record, or `samples` sampled ones: the same seeds at every evaluation."""
    if samples == 1:
        return rollouts.greedy(records)
    running = [rollouts.submit(record, samples, FIRST_NUMBER + i) for i, record in enumerate(records)]
    return [future.result() for future in running]


def evaluate(rollouts: Rollouts, held_out: Sequence[Record], config: EvalConfig) -> dict[str, Any]:
    """What an `eval` event says of the first `config.prompts` held-out records. Raises RolloutError."""
    groups = answers(rollouts, held_out[: config.prompts], config.samples)
    versions = sorted({span.version for g in groups for t in g.trajectories for span in t.versions})
    return {"served_versions": versions, "prompts": len(groups), **evaluation_metrics(groups)}
