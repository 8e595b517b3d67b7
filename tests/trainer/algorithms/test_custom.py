"""Losses of one's own: the tensors they get, what is done around them, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.trainer.algorithms.batches import BATCH, trial
from trainer.algorithms import build_algorithm
from trainer.algorithms.base import OLD_LOGPROBS, REFERENCE_LOGPROBS
from trainer.config import CorrectionConfig, CustomConfig, GrpoConfig

LOSSES = "tests.trainer.algorithms.losses"
CORRECTION = CorrectionConfig("masked", "token", 0.5, 2.0)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("normalize", ["token", "sequence", "length"])
def test_all_that_is_around_it_is_the_policy_gradients(normalize: Any, packed: bool) -> None:
    """Written by hand, GRPO's loss gives GRPO: with correction, KL, entropy and every mean."""
    common = {"normalize": normalize, "minibatches": 2, "kl_coef": 0.2, "entropy_coef": 0.3, "correction": CORRECTION}
    mine = trial(CustomConfig(loss=f"{LOSSES}:clipped", options={"clip": [0.2, 0.28]}, **common), packed=packed)
    theirs = trial(GrpoConfig(**common), packed=packed)
    output, expected = mine.loss(), theirs.loss()
    torch.testing.assert_close(output.row()[:3], expected.row()[:3], rtol=1e-12, atol=0)
    torch.testing.assert_close(mine.gradient(output.total), theirs.gradient(expected.total), rtol=1e-12, atol=0)
    shared = expected.sums.keys() - {"clip_ratio", "clip_ratio_low", "clip_ratio_high"}
    assert {n: output.sums[n].item() for n in shared} == {n: expected.sums[n].item() for n in shared}
    ratios = [(new - old).exp().sum() for new, old in zip(mine.logprobs, mine.given[OLD_LOGPROBS], strict=True)]
    assert output.sums["custom/ratio"].item() == pytest.approx(sum(r.item() for r in ratios))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_sums_and_means_over_answers(packed: bool) -> None:
    t = trial(CustomConfig(loss=f"{LOSSES}:by_answer", kl_coef=1e-9, advantages="reward"), packed=packed)
    rewards = torch.tensor([r for g in BATCH for r in g.rewards]).double()
    terms = []
    for reward, new, reference, entropy in zip(
        rewards, t.logprobs, t.given[REFERENCE_LOGPROBS], t.entropies, strict=True
    ):
        terms += [-reward * (new - reference).sum() * entropy.sum() / len(new)] * len(new)
    t.check(torch.stack(terms).mean(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ("normalized", [1.1545, -0.5772, -0.5772]),
        ("centred", [2 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", [1.0, -0.5, -0.5]),
        ("reward", [1.0, 0.0, 0.0]),
    ],
)
def test_what_a_sample_is_worth(advantages: Any, expected: list[float]) -> None:
    algorithm = build_algorithm(CustomConfig(loss=f"{LOSSES}:clipped", advantages=advantages))
    assert algorithm.credit([1.0, 0.0, 0.0]) == pytest.approx(expected, abs=1e-3)  # type: ignore[attr-defined]


def test_one_sample_is_enough_for_rewards_as_they_are() -> None:
    config = CustomConfig(loss=f"{LOSSES}:clipped", advantages="reward", samples_per_prompt=1)
    assert dataclasses.replace(config, epochs=2).updates == 2
