"""Reward functions as people write them for TRL and verl, called as they are; others are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.rewards.worker import _awaited, _callable, _outcome

HERE = "tests.trainer.rewards.test_signatures"
CHAT = ({"role": "user", "content": "2+2="},)


def value(target: str, answer: str = "4", **fields: Any) -> Any:
    """The reply of a worker."""
    request = {"prompt": "2+2=", "answer": answer, "expected": "4", "extra": {}, "turns": [], "messages": []}
    reply = _outcome(_callable(target), {**request, "token_ids": [1] * 90, **fields})
    return reply["value"] if "value" in reply else reply["problem"]


def constant(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0]


def by_columns(prompts, completions, ground_truth, level, **kwargs):  # type: ignore[no-untyped-def]
    assert isinstance(completions[0], str) == isinstance(prompts[0], str) == (level[0] == "text")
    said = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    return [None if kwargs["kind"] == ["code"] else float(said == ground_truth[0])]


async def awaits(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completions[0]))]


def keywords(**kwargs: Any) -> list[float]:
    return [float(kwargs["solution"] == ["4"])]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "acc": data_source == "gsm8k" and extra_info == {"index": 7}}


def gsm8k(solution_str: str, ground_truth: str, method: str = "strict", score: float = 1.0) -> float:
    return score if solution_str == ground_truth and method == "strict" else 0.0


def any_of(solution_str: str, ground_truth: list[str]) -> float:
    return float(ground_truth == ["5", "4"] and solution_str in ground_truth)


def among(completions: list[str], answer: list[list[str]]) -> list[float]:
    return [float(said in right) for said, right in zip(completions, answer, strict=True)]


def one(answer: str) -> float:
    return 0.0


def of_a_trainer(data_source: str, solution_str: str, reward_router: Any) -> float:
    return 0.0


def test_functions_as_for_trl() -> None:
    extra = {"level": "text", "kind": "math"}
    assert value(f"{HERE}:constant") == 1.0
    assert value(f"{HERE}:by_columns", extra=extra) == 1.0
    assert value(f"{HERE}:by_columns", "5", extra=extra) == 0.0
    assert value(f"{HERE}:by_columns", extra=extra | {"kind": "code"}) is None
    assert value(f"{HERE}:by_columns", extra=extra | {"level": "chat"}, messages=CHAT) == 1.0
    assert value(f"{HERE}:keywords") == 1.0
    assert "no column 'level'" in value(f"{HERE}:by_columns")
    request = {"prompt": "", "answer": "four", "expected": "", "extra": {}, "timeout_s": 60}
    assert asyncio.run(_awaited(_callable(f"{HERE}:awaits"), request)) == {"value": 4.0}


def test_several_answers_reach_a_function_as_the_data_has_them() -> None:
    assert value(f"{HERE}:any_of", expected="5", alternatives=["4"]) == 1.0
    assert value(f"{HERE}:among", expected="5", alternatives=["4"]) == 1.0


def test_functions_as_for_verl() -> None:
    assert value(f"{HERE}:compute_score", extra={"data_source": "gsm8k", "extra_info": {"index": 7}}) == 1.0
    assert [value(f"{HERE}:gsm8k", said) for said in ("4", "5")] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["one", "of_a_trainer"])
def test_another_signature_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"f\(prompt, answer, expected\[, extra\]\), f\(completions.*f\(data_source"):
        _callable(f"{HERE}:{name}")


def test_trls_own_functions_run_as_they_are() -> None:
    pytest.importorskip("trl")
    thought = "<think>2 and 2</think>\\boxed{4}"
    assert value("trl.rewards:think_format_reward", thought) == 1.0
    assert value("trl.rewards:think_format_reward", "4") == 0.0
    assert value("trl.rewards:accuracy_reward", thought) == 1.0
    assert value("trl.rewards:accuracy_reward", thought, expected="") is None
    assert value("trl.rewards:accuracy_reward", "\\boxed{5}", messages=CHAT) == 0.0
    assert value(f"{HERE}:overlong") == -0.5


def __getattr__(name: str) -> Any:
    """The beginning of a user's module, made here only where TRL is there."""
    if name != "overlong":
        raise AttributeError(name)
    from trl.rewards import get_soft_overlong_punishment

    return get_soft_overlong_punishment(100, 20)
