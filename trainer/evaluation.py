"""The sets of prompts that a run is judged by: where each one's records come from, who scores them, and its numbers.

On rank 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config import EvalConfig, TrainerConfig
from trainer.data import build_dataset
from trainer.data.records import Dataset, Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.metrics.rollouts import evaluation_metrics
from trainer.rewards import Scorer, build_scorer
from trainer.rollouts.sampling import RolloutSampler


class EvalSet:
    """One entry of `eval`, opened. Close it at the end."""

    def __init__(self, entry: EvalConfig, config: TrainerConfig, trained: Dataset, tokenizer: Tokenizer) -> None:
        """`trained` is the run's own data. Raises ConfigError, DataError, RewardError."""
        self.config = entry
        self.scorer: Scorer | None = None  # the run's
        self.records = _records(entry, config, trained, tokenizer)
        if entry.rewards is not None:
            self.scorer = build_scorer(entry.rewards, config.gateway)

    def __call__(self, rollouts: RolloutSampler) -> dict[str, Any]:
        """Ask for the answers, and what an `eval` event says of them. Raises RolloutError."""
        groups = rollouts.evaluate(self.records, self.config, self.scorer)
        versions = sorted({span.version for g in groups for t in g.trajectories for span in t.versions})
        about = {"set": self.config.name, "served_versions": versions, "prompts": len(groups)}
        return about | evaluation_metrics(groups, self.config.passes)

    def close(self) -> None:
        """End its own rewards."""
        if self.scorer is not None:
            self.scorer.close()


def _records(entry: EvalConfig, config: TrainerConfig, trained: Dataset, tokenizer: Tokenizer) -> Sequence[Record]:
    if entry.data is None:
        if not trained.held_out:
            advice = "Set data.eval_path or data.held_out, or give the set its own data"
            raise ConfigError("eval", f"there are no held-out records for {entry.name}", advice)
        return trained.held_out[: entry.prompts]
    source = build_dataset(entry.data, tokenizer, config.seed)
    if source.held_out:
        return source.held_out[: entry.prompts]
    return [source[i] for i in range(min(entry.prompts, len(source)))]
