"""Under which names numbers appear in TensorBoard and W&B: the same in both, grouped by what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.metrics.writers import numbers

_THROUGHPUT = frozenset({"tokens_per_s", "train_tokens_per_s", "train_tflops", "mfu"})
_ROLLOUT = frozenset(
    {"zero_std_groups", "truncated", "rollout_tokens", "versions_per_sample", "answer_tokens_mean", "answer_tokens_max"}
)


def tagged(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation by tag: `eval/accuracy`, `time/rollout_ms`, `reward/mean`, ..."""
    return {tag(event, name): value for name, value in numbers(values).items() if name != "step"}


def tag(event: str, name: str) -> str:
    """`eval/...` for evaluations; a step's numbers by group, `train/...` where no other fits."""
    if event != "step":
        return f"{event}/{name}"
    if name.endswith("_ms"):
        return f"time/{name}"
    if name.startswith(("reward/", "reward_")):
        return "reward/" + name.removeprefix("reward/").removeprefix("reward_")
    if name in _THROUGHPUT:
        return f"throughput/{name}"
    if name in _ROLLOUT or name.startswith("version_lag"):
        return f"rollout/{name}"
    return f"train/{name}"
