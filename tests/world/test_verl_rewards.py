"""verl's own reward functions, out of its wheel, called for records in the layout of its data sets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.packages import unpacked
from trainer.config import CallableReward
from trainer.rewards import RewardRequest, build_scorer

RELEASE = ("verl", "0.9.1")
CASES = [  # a module of verl's, what is right, an answer that is, one that is not, and what verl gives for both
    ("gsm8k", "72", "48 / 2 = 24, and 48 + 24 = 72.\n#### 72", "#### 71", (1.0, 0.0)),
    ("gsm8k", "1450", "#### 1,450", "The answer is 1450.", (1.0, 0.0)),
    ("math_reward", "\\frac{1}{2}", "So it is $\\boxed{\\frac12}$.", "$\\boxed{\\frac13}$", (1.0, 0.0)),
    ("math_dapo", "34", "Thus\nAnswer: $34$", "Answer: 33", (1.0, -1.0)),
]


@pytest.mark.parametrize(("module", "gold", "right", "wrong", "scores"), CASES, ids=["gsm8k", "comma", "math", "dapo"])
def test_a_function_of_verl_is_called_as_verl_calls_it(
    module: str, gold: str, right: str, wrong: str, scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked(*RELEASE) / "verl" / "utils" / "reward_score"
    monkeypatch.syspath_prepend(str(folder))  # which workers inherit; the modules import nothing of verl's
    extra = {"data_source": module, "extra_info": {"index": 0}}

    async def both() -> list[float]:
        asked = [RewardRequest("?", answer, gold, extra) for answer in (right, wrong)]
        return [score.total for score in await asyncio.gather(*map(scorer, asked))]

    with contextlib.closing(build_scorer([CallableReward(target=f"{module}:compute_score")])) as scorer:
        assert tuple(asyncio.run(both())) == scores
