"""reasoning-gym: records that are a function of the seed, held-out problems, and what their verifiers say."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from typing import Any

import pytest

from tests.lacking import lacking
from trainer.config import GymReward, GymTask, ReasoningGymData
from trainer.data import build_dataset
from trainer.data.records import Dataset
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.rewards import RewardRequest, build_scorer

SUMS = GymTask("chain_sum", {"max_terms": 2, "max_digits": 1})
LEGS = GymTask("leg_counting", weight=3.0)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        lacking("no reasoning-gym: install the extra `gym`")


def data(tokenizer: Tokenizer, *tasks: GymTask, seed: int = 0, **options: Any) -> Dataset:
    return build_dataset(ReasoningGymData(tasks=tasks, **{"held_out": 8, **options}), tokenizer, seed)


def test_records_are_a_function_of_the_seed(tokenizer: Tokenizer) -> None:
    one, again, other = (data(tokenizer, SUMS, LEGS, seed=seed) for seed in (1, 1, 2))
    assert [one[i] for i in (0, 5, 70_000)] == [again[i] for i in (0, 5, 70_000)]
    assert [one[i].prompt for i in range(20)] != [other[i].prompt for i in range(20)]
    assert one.held_out == other.held_out
    names = [one[i].extra["reasoning_gym"]["name"] for i in range(200)]
    assert 0.6 < names.count("leg_counting") / 200 < 0.9


def test_what_is_held_out_is_not_trained_on(tokenizer: Tokenizer) -> None:
    found = data(tokenizer, SUMS, held_out=60, records=400)
    tested = {record.prompt for record in found.held_out}
    assert not tested & {found[i].prompt for i in range(400)}


def test_a_task_with_too_few_problems_says_so(tokenizer: Tokenizer) -> None:
    few = GymTask("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    found = data(tokenizer, few, held_out=3000)
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        _ = [found[i] for i in range(400)]


@pytest.mark.parametrize(
    "task", [GymTask("no_such_task"), GymTask("chain_sum", {"max_term": 3}), GymTask("chain_sum", {"min_terms": 0})]
)
def test_a_task_that_cannot_be_made_is_named(tokenizer: Tokenizer, task: GymTask) -> None:
    with pytest.raises(ConfigError, match=task.name):
        data(tokenizer, task)


def test_the_verifier_reads_the_last_answer(tokenizer: Tokenizer) -> None:
    record = data(tokenizer, SUMS)[3]
    answers = (f"<answer>1</answer> no, <answer> {record.answer} </answer>", record.answer, "<answer></answer>")
    asked = [RewardRequest(record.prompt, text, record.answer, record.extra) for text in answers]
    with contextlib.closing(build_scorer([GymReward(workers=1, timeout_s=60.0, deadline_s=300.0)])) as scorer:
        totals = [asyncio.run(scorer(request)).total for request in asked]
        lost = asyncio.run(scorer(RewardRequest("", "<answer>1</answer>", "1", {})))
    assert totals == [1.0, 0.0, 0.0]
    assert "no reasoning-gym task" in lost.failures["reasoning_gym"]
