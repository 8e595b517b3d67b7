"""Rewards: rules, users' functions, weighted sums."""

from __future__ import annotations

import asyncio

import pytest

from trainer.config import CallableReward, ExactMatchReward, RegexReward
from trainer.errors import ConfigError, RewardError
from trainer.rewards import Score, build_scorer


def score(configs: list[ExactMatchReward | RegexReward | CallableReward], answer: str, expected: str = "07") -> Score:
    return asyncio.run(build_scorer(configs)("3+4=", answer, expected))


def length_reward(prompt: str, answer: str, expected: str) -> float:
    return float(len(answer))


async def async_reward(prompt: str, answer: str, expected: str) -> float:
    await asyncio.sleep(0)
    return float(prompt == "3+4=")


def not_a_number(prompt: str, answer: str, expected: str) -> float:
    return float("nan")


@pytest.mark.parametrize(("answer", "value"), [("07", 1.0), (" 07\n", 1.0), ("7", 0.0), ("", 0.0), ("077", 0.0)])
def test_exact_match(answer: str, value: float) -> None:
    assert score([ExactMatchReward()], answer).total == value


@pytest.mark.parametrize(
    ("pattern", "answer", "value"),
    [
        (r"^\d\d$", "99", 1.0),
        (r"^\d\d$", "9", 0.0),
        (r"<a>(?P<answer>.*)</a>", "so <a> 07 </a>", 1.0),
        (r"<a>(?P<answer>.*)</a>", "so <a>08</a>", 0.0),
        (r"(?P<answer>x)?y", "y", 0.0),
    ],
)
def test_regex(pattern: str, answer: str, value: float) -> None:
    assert score([RegexReward(pattern=pattern)], answer).total == value


def test_a_weighted_sum_keeps_its_parts() -> None:
    configs = [
        ExactMatchReward(weight=2.0),
        RegexReward(pattern=r"^\d\d$", weight=0.5),
        RegexReward(pattern="7"),
        CallableReward(target=f"{__name__}:length_reward", weight=0.1),
        CallableReward(target=f"{__name__}:async_reward"),
    ]
    result = score(configs, "07")
    assert result.parts == {"exact_match": 1, "regex": 1, "regex_2": 1, "callable": 2, "callable_2": 1}
    assert result.total == pytest.approx(2 + 0.5 + 1 + 0.2 + 1)
    assert result.full
    assert not score(configs, "08").full


def test_a_broken_pattern_or_name_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="Correct the expression"):
        build_scorer([RegexReward(pattern="(")])
    with pytest.raises(ConfigError, match="cannot import"):
        build_scorer([CallableReward(target="no.such.module:f")])


def test_a_reward_must_be_a_finite_number() -> None:
    with pytest.raises(RewardError, match="finite"):
        score([CallableReward(target=f"{__name__}:not_a_number")], "07")
