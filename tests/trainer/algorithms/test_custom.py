"""Settings that algorithms refuse, by key; losses of one's own: the tensors they get, and what is done around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.algorithms.batches import BATCH, LONGEST, trial
from trainer.algorithms import build_algorithm
from trainer.algorithms.base import OLD_LOGPROBS, REFERENCE_LOGPROBS
from trainer.algorithms.policy import Grpo
from trainer.config import AlgorithmConfig, CorrectionConfig, CustomConfig, DistillConfig, GrpoConfig
from trainer.config.strict import convert
from trainer.errors import ConfigError

LOSSES = "tests.trainer.algorithms.losses"
TEACHER = {"url": "http://teacher:8000", "model": "wise"}
NEEDED = {"custom": {"loss": f"{LOSSES}:clipped"}, "distill": {"teacher": TEACHER}}


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("dpo", {"beta": 0.0}, "beta"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing"),
        ("dpo", {"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ("rloo", {"samples_per_prompt": 1}, "samples_per_prompt"),
        ("grpo", {"dual_clip": 1.2}, "dual_clip"),
        ("grpo", {"objective": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ("reinforce++", {"baseline": True}, "baseline"),
        ("reinforce++", {"drop_zero_std": True}, "drop_zero_std"),
        ("reinforce++", {"length_weight": 0.1}, "length_weight"),
        ("ppo", {"lam": 1.5}, "lam"),
        ("ppo", {"value_clip": 0.0}, "value_clip"),
        ("grpo", {"kl_unbiased": True}, "kl_unbiased"),
        ("rloo", {"kl_unbiased": True, "kl_coef": 0.1}, "kl_unbiased"),
        ("ppo", {"kl_unbiased": True, "kl_coef": 0.1}, "kl_unbiased"),
        ("reinforce++", {"kl_unbiased": True, "kl_coef": 0.1}, "kl_unbiased"),
        ("grpo", {"correction": {"high": 0.5}}, "correction.high"),
        ("grpo", {"correction": {"max_lag": -1}}, "correction.max_lag"),
        ("custom", {"loss": "nameless"}, "loss"),
        ("custom", {"clip_low": 0.1}, "clip_low"),
        ("custom", {"dual_clip": 3.0}, "dual_clip"),
        ("custom", {"samples_per_prompt": 1}, "samples_per_prompt"),
        ("custom", {"advantages": "best"}, "advantages"),
        ("kimi", {"clip_low": 0.1}, "clip_low"),
        ("kimi", {"normalize": "length"}, "normalize"),
        ("kimi", {"ratio": "sequence"}, "ratio"),
        ("kimi", {"minibatches": 1}, "reset_optimizer"),
        ("distill", {"teacher": None}, "teacher"),
        ("distill", {"teacher": {"url": "http://teacher:8000"}}, "teacher.model"),
        ("distill", {"teacher": TEACHER | {"url": "teacher"}}, "teacher.url"),
        ("distill", {"teacher": TEACHER | {"min_logprob": 0.0}}, "teacher.min_logprob"),
        ("distill", {"teacher": TEACHER | {"form": "chat"}}, "teacher.form"),
        ("distill", {"reward_weight": 0.5}, "samples_per_prompt"),
        ("distill", {"reward_weight": -1.0}, "reward_weight"),
        ("distill", {"drop_zero_std": True, "samples_per_prompt": 4}, "drop_zero_std"),
        ("distill", {"overlong_buffer": 4}, "overlong_buffer"),
    ],
)
def test_an_option_that_cannot_be_is_named(name: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        convert(AlgorithmConfig, {"name": name} | NEEDED.get(name, {}) | changes, "algorithm")
    assert error.value.key == f"algorithm.{key}"


def test_what_an_algorithm_needs_is_enough() -> None:
    found = [convert(AlgorithmConfig, {"name": name} | needed, "algorithm") for name, needed in NEEDED.items()]
    assert [type(config) for config in found] == [CustomConfig, DistillConfig]


@pytest.mark.parametrize(
    ("changes", "longest", "key"),
    [
        ({"normalize": "length"}, None, "rollout.max_tokens"),
        ({"overlong_buffer": 4}, None, "rollout.max_tokens"),
        ({"overlong_buffer": LONGEST + 1}, LONGEST, "algorithm.overlong_buffer"),
    ],
)
def test_what_counts_on_the_answers_limit_must_know_it(changes: dict[str, Any], longest: int | None, key: str) -> None:
    assert Grpo(GrpoConfig(overlong_buffer=LONGEST), LONGEST)
    with pytest.raises(ConfigError) as error:
        Grpo(GrpoConfig(**changes), longest)
    assert error.value.key == key


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
    """Rewards as they are compare with no other sample's: one is enough."""
    config = CustomConfig(loss=f"{LOSSES}:by_answer", kl_coef=1e-9, advantages="reward", samples_per_prompt=1)
    t = trial(config, packed=packed)
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


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("mean", "not a tensor of"),
        ("detached", "no gradient"),
        ("chatty", "a Tensor to report"),
        ("reporting_a_mean", "loss, which it reports, is float"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_by_name(function: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        trial(CustomConfig(loss=f"{LOSSES}:{function}")).loss()
    assert error.value.key == "algorithm.loss"
    assert f"{LOSSES}:{function}" in error.value.problem


@pytest.mark.parametrize("loss", [f"{LOSSES}:missing", "no.such.module:loss", f"{LOSSES}:NUMBER"])
def test_a_function_that_is_none_is_refused_before_the_run(loss: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_algorithm(CustomConfig(loss=loss))
    assert error.value.key == "algorithm.loss"
