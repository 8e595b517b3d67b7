"""Cases about trajectories with tools in them, for the ranks of tests/trainer/ranks.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.cases import engine
from trainer.algorithms.base import ENTROPY
from trainer.batch import MASK, Fields, assemble
from trainer.config import PackingConfig
from trainer.megatron import passes
from trainer.rewards.scorer import Score
from trainer.trajectory import Trajectory, TrajectoryGroup, Turn


def gradients(path: str, algorithm: dict[str, Any], packed: bool) -> dict[str, float]:
    """The largest difference that other targets make to a step's gradient: at the tools' tokens, and at the policy's.
    And the largest gradient that reaches a log-prob or an entropy at a tool's token, and at a policy's."""
    plain, reached = _gradient(path, algorithm, packed, None)
    tools, _ = _gradient(path, algorithm, packed, 0.0)
    policy, _ = _gradient(path, algorithm, packed, 1.0)
    return {
        "largest": max(g.abs().max().item() for g in plain.values()),
        "tools": max((tools[name] - g).abs().max().item() for name, g in plain.items()),
        "policy": max((policy[name] - g).abs().max().item() for name, g in plain.items()),
        "reaches_tools": reached[0],
        "reaches_policy": reached[1],
    }


def _gradient(
    path: str, algorithm: dict[str, Any], packed: bool, change: float | None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """By parameter; the targets where the mask is `change` are others. And what reaches tokens of mask 0 and 1."""
    sections = {"algorithm": algorithm, "gateway": {"url": "http://unused"}, "micro_batch": 2}
    with engine({"model": {"path": path}} | sections) as built, pytest.MonkeyPatch.context() as patched:
        loss, inputs, vocabulary = built.algorithm.loss, passes.inputs, built.shape.vocab
        reached, changed = [0.0, 0.0], 0

        def other(batch: Fields, config: Any) -> passes.Inputs:
            nonlocal changed
            given = inputs(batch, config)
            where = batch[MASK] == (-1.0 if change is None else change)
            changed += int(where.sum())
            return given._replace(labels=torch.where(where, (given.labels + 1) % vocabulary, given.labels))

        def watched(logprobs_BT: torch.Tensor, fields: Fields) -> Any:
            for tensor in (logprobs_BT, fields[ENTROPY]):
                tensor.register_hook(lambda gradient: _note(gradient, fields[MASK], reached))
            return loss(logprobs_BT, fields)

        patched.setattr(passes, "inputs", other)
        patched.setattr(built.algorithm, "loss", watched)
        packing = PackingConfig(max_tokens=64) if packed else None
        built.step(assemble(built.algorithm.sequences([], _groups(built.shape.vocab), 0), packing))
        assert (changed > 0) == (change is not None)
        (chunk,) = built.model
        return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}, reached


def _note(gradient: torch.Tensor, mask: torch.Tensor, reached: list[float]) -> None:
    for value in (0, 1):
        here = gradient[mask == value].abs()
        reached[value] = max(reached[value], here.max().item() if here.numel() else 0.0)


def _groups(vocabulary: int) -> list[TrajectoryGroup]:
    """Two groups of three trajectories: a call, what the tool says, and an answer, of random lengths."""
    rng = np.random.default_rng(0)

    def ids() -> tuple[int, ...]:
        return tuple(rng.integers(0, vocabulary, rng.integers(2, 9)).tolist())

    def of_policy() -> Turn:
        written = ids()
        return Turn(written, tuple((-3 + 0.3 * rng.normal(size=len(written))).tolist()))

    def group() -> TrajectoryGroup:
        trajectories = tuple(Trajectory((of_policy(), Turn(ids()), of_policy()), "stop") for _ in range(3))
        return TrajectoryGroup(ids(), trajectories, tuple(Score(reward) for reward in (0.0, 1.0, 0.5)))

    return [group(), group()]
