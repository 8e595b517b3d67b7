"""What algorithms refuse: options before a run, by their key, and losses of one's own that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.algorithms.batches import LONGEST, trial
from trainer.algorithms import build_algorithm
from trainer.algorithms.policy import Grpo
from trainer.config import AlgorithmConfig, CustomConfig, DistillConfig, GrpoConfig
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
