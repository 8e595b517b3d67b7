"""The gradient of a job's loss by log-probs, and which examples its steps take."""

from __future__ import annotations

import pytest
import torch

from trainer.algorithms.base import REFERENCE_LOGPROBS
from trainer.algorithms.offline import Dpo, Sft
from trainer.api.finetuning.steps import Plan, derivatives
from trainer.batch import MASK, Sequence, collate
from trainer.config import DpoConfig, SftConfig


def test_the_gradient_of_supervised_is_one_by_the_learned_tokens() -> None:
    fields = collate([Sequence((1, 2), (3, 4, 5), mask=(1.0, 0.0, 1.0)), Sequence((1,), (2,))])
    measured, weights_BT = derivatives(Sft(SftConfig()), torch.full_like(fields[MASK], -2.0), fields)
    assert measured["loss"] == pytest.approx(2.0)
    assert torch.equal(weights_BT, torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]) / 3)


def test_the_gradient_of_preferences_is_the_losss() -> None:
    """Two pairs of other lengths, against finite differences."""
    pairs = [Sequence((1, 2), (3,) * n, together=pair) for pair, n in ((0, 2), (0, 4), (1, 3), (1, 1))]
    draw, fields, dpo = torch.Generator().manual_seed(1), collate(pairs), Dpo(DpoConfig(beta=0.7))
    fields = {name: values.double() for name, values in fields.items()}
    policy_BT, fields[REFERENCE_LOGPROBS] = (-torch.rand(4, 5, generator=draw, dtype=torch.double) for _ in range(2))
    measured, weights_BT = derivatives(dpo, policy_BT, fields)
    assert set(measured) >= {"loss", "preference_accuracy", "reward_margin"}
    for place in range(policy_BT.numel()):
        nudged = policy_BT.clone()
        nudged.view(-1)[place] += 1e-6
        slope = (derivatives(dpo, nudged, fields)[0]["loss"] - measured["loss"]) / 1e-6
        assert -slope == pytest.approx(float(weights_BT.reshape(-1)[place]), abs=1e-5)
    assert weights_BT[fields[MASK] == 0].abs().max() == 0


def test_each_epoch_takes_every_example_once_in_an_order_of_its_own() -> None:
    plan = Plan(rows=7, epochs=3, batch=3, learning_rate=0.9, seed=4)
    assert (plan.steps_per_epoch, plan.steps) == (3, 9)
    taken = [plan.of_step(step) for step in range(plan.steps)]
    epochs = [[row for rows, _ in taken[first : first + 3] for row in rows] for first in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [rate for _, rate in taken] == pytest.approx([0.1 * left for left in range(9, 0, -1)])
