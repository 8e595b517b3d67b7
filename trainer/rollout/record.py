"""Groups as JSON values, for checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.rewards.base import Score
from trainer.rollout.samples import Group, Sample, VersionSpan


def group_to_json(group: Group) -> dict[str, Any]:
    """Lists, dictionaries, numbers and text only; floats survive exactly."""
    return dataclasses.asdict(group)


def group_from_json(data: dict[str, Any]) -> Group:
    """The inverse of `group_to_json`, also after a round trip through a file."""
    samples = tuple(_sample(sample) for sample in data["samples"])
    return Group(tuple(data["prompt_ids"]), samples, tuple(Score(**s) for s in data["scores"]))


def _sample(data: dict[str, Any]) -> Sample:
    return Sample(
        token_ids=tuple(data["token_ids"]),
        logprobs=tuple(data["logprobs"]),
        finish_reason=data["finish_reason"],
        versions=tuple(VersionSpan(**span) for span in data["versions"]),
    )
