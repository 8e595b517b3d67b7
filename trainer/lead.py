"""The parts of a run that only rank 0 has: the data set, the rewards, the rollouts, and the batches made of them."""

from __future__ import annotations

from typing import Any

from trainer.algorithms.base import Algorithm
from trainer.checkpoint.parts import Part
from trainer.config import DistillConfig, TrainerConfig
from trainer.data import build_dataset
from trainer.data.records import summary
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.evaluation import EvalSet
from trainer.megatron.hf_config import ModelShape
from trainer.rewards import Scorer, build_scorer
from trainer.rollouts.experience import Experience
from trainer.rollouts.sampling import Rollouts


class Lead:
    """Opened on rank 0; close it at the end. The models that its rewards hold rest and wake together (`Models` in
    trainer/memory/build.py), those of evaluation sets too."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, algorithm: Algorithm) -> None:
        """Raises ConfigError, DataError, SandboxUnavailable for what the user must correct."""
        self._config = config
        tokenizer = Tokenizer(config.model.path)
        if tokenizer.size > shape.vocab:
            problem = f"the tokenizer has {tokenizer.size} tokens, the model {shape.vocab}"
            raise DataError(f"{config.model.path}: {problem}. Put the model's own tokenizer.json there.")
        self._dataset = build_dataset(config.data, tokenizer, config.seed)
        self._scorers: list[Scorer] = []
        self._rollouts: Rollouts | None = None
        self._sets: dict[str, EvalSet] = {}
        if config.gateway is not None:
            scorer = build_scorer(config.rewards, config.gateway)
            about = (config.gateway, config.rollout, scorer, tokenizer, config.seed)
            more: dict[str, Any] = {"environment": config.environment, "model": config.served_name}
            if isinstance(config.algorithm, DistillConfig):
                more["teacher"] = config.algorithm.teacher
            self._rollouts = Rollouts(*about, **more)
            for entry in config.eval:
                self._sets[entry.name] = EvalSet(entry, config, self._dataset, tokenizer)
            self._scorers = [scorer, *(s.scorer for s in self._sets.values() if s.scorer is not None)]
        self.experience = Experience(config, algorithm, self._dataset, self._rollouts, shape.max_positions)

    @property
    def parts(self) -> dict[str, Part]:
        """What a checkpoint keeps of the run, beside the engine."""
        kept: dict[str, Part] = {"data": self.experience.feed}
        return kept if self.experience.schedule is None else kept | {"rollouts": self.experience.schedule}

    def summary(self) -> dict[str, Any]:
        """What the `start` event says about the data set."""
        return summary(self._dataset)

    def evaluate(self, name: str) -> dict[str, Any]:
        """What an `eval` event says of the set of that name. Raises RolloutError."""
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
