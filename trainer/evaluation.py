"""Answers to the held-out records, through the gateway like everybody's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config import EvalConfig
from trainer.data.records import Record
from trainer.metrics import evaluation_metrics
from trainer.rollout import Group, Rollouts

FIRST_NUMBER = 2**40  # seeds of evaluations are none of the training's


def answers(rollouts: Rollouts, records: Sequence[Record], samples: int) -> list[Group]:
    """The greedy answer to each record, or `samples` sampled ones: the same seeds at every evaluation."""
    if samples == 1:
        return rollouts.greedy(records)
    running = [rollouts.submit(record, samples, FIRST_NUMBER + i) for i, record in enumerate(records)]
    return [future.result() for future in running]


def evaluate(rollouts: Rollouts, held_out: Sequence[Record], config: EvalConfig) -> dict[str, Any]:
    """What an `eval` event says of the first `config.prompts` held-out records. Raises RolloutError."""
    groups = answers(rollouts, held_out[: config.prompts], config.samples)
    versions = sorted({span.version for g in groups for s in g.samples for span in s.versions})
    return {"served_versions": versions, "prompts": len(groups), **evaluation_metrics(groups)}
