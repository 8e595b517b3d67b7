"""Generated records, those of reasoning-gym and what its verifiers say, the order in which records are used, and how a
run finds its place again; the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lacking import lacking
from tests.trainer.data.conftest import Open
from tests.trainer.data.writing import as_samples, jsonl, problems, shard
from trainer.config import ArithmeticData, GymReward, GymTask, ReasoningGymData
from trainer.data import build_dataset, records
from trainer.data.problems import Arithmetic
from trainer.data.records import Contents, Dataset, take
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError, ResumeError
from trainer.rewards import RewardRequest, build_scorer


def test_text_goes_there_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.continuation("12+3=15")
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids) == "12+3=15"
    assert tokenizer.prompt("12") == ids[:2]


def test_a_missing_tokenizer_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_held_out_problems_are_never_trained_on(tokenizer: Tokenizer) -> None:
    config = ArithmeticData(operands=3, largest=5, held_out=40)
    data = Arithmetic(config, tokenizer, seed=0)
    held_out = {record.prompt for record in data.held_out}
    assert len(held_out) == 40
    assert held_out.isdisjoint({data[i].prompt for i in range(len(data))})
    assert data.held_out == Arithmetic(config, tokenizer, seed=9).held_out
    assert all(record.answer == f"{sum(map(int, record.prompt[:-1].split('+'))):02d}" for record in data.held_out)


@pytest.mark.parametrize(("mistake", "wrong"), [("off_by_one", lambda s: s + 1), ("carry", lambda s: s % 10)])
def test_mistakes_are_made_as_often_as_asked(tokenizer: Tokenizer, mistake: str, wrong: object) -> None:
    assert callable(wrong)
    data = Arithmetic(ArithmeticData(mistake=mistake, noise=0.6), tokenizer, seed=0)  # type: ignore[arg-type]
    hard = [r for r in (data[i] for i in range(len(data))) if wrong(int(r.answer)) != int(r.answer)]
    said = Counter(tokenizer.decode(r.target_ids) == f"{wrong(int(r.answer)):02d}" for r in hard)
    assert 0.57 < said[True] / len(hard) < 0.63
    assert all(tokenizer.decode(r.target_ids) in (r.answer, f"{wrong(int(r.answer)):02d}") for r in hard)


def test_a_record_depends_on_seed_and_index_only(tokenizer: Tokenizer) -> None:
    config = ArithmeticData(noise=0.5)
    data = Arithmetic(config, tokenizer, seed=4)
    assert [data[i] for i in range(50)] == [Arithmetic(config, tokenizer, seed=4)[i] for i in range(50)]
    assert [data[i] for i in range(50)] != [Arithmetic(config, tokenizer, seed=5)[i] for i in range(50)]


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 4097])
def test_each_epoch_has_every_record_once_in_an_order_of_the_seed(
    size: int, table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a shuffle that is too large for a table."""
    if not table:
        monkeypatch.setattr(records, "LARGEST_TABLE", 0)
    whole = take(size, seed=1, start=0, count=3 * size)
    epochs = [whole[:size], whole[size : 2 * size], whole[2 * size :]]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert [i for start in range(0, 3 * size, 7) for i in take(size, 1, start, 7)][: 3 * size] == whole
    if size >= 10:
        assert epochs[0] != epochs[1] != epochs[2]
        assert whole != take(size, seed=2, start=0, count=3 * size)
    if size >= 1000:
        # Neighbours are no likelier to stay near each other than in numpy's shuffle, whose mean distance is size / 3.
        assert np.abs(np.diff(epochs[0])).mean() == pytest.approx(size / 3, rel=0.1)


def test_a_large_shuffle_reaches_every_place_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_TABLE", 0)
    firsts = Counter(take(8, seed, 0, 1)[0] for seed in range(2000))
    assert all(190 < firsts[i] < 310 for i in range(8))


def test_the_order_of_ten_billion_records_is_at_hand() -> None:
    size = 10**10
    found = take(size, seed=3, start=size - 5, count=10)
    assert all(0 <= i < size for i in found)
    assert found[:5] == take(size, 3, size - 5, 5)
    assert found[5:] == take(size, 3, size, 5)


def test_a_cursor_into_other_records_is_refused(open_data: Open, tmp_path: Path) -> None:
    records = problems(20)
    saved = Contents(open_data(jsonl(tmp_path / "a.jsonl", records))).state_dict()
    assert saved["records"] == 20
    shard(tmp_path / "0.tar", as_samples(records[:13]))
    shard(tmp_path / "1.tar", as_samples(records[13:]))
    for path, kind in ((jsonl(tmp_path / "copy.jsonl", records), "jsonl"), (tmp_path / "{0,1}.tar", "webdataset")):
        Contents(open_data(path, kind, workers=2)).load_state_dict(saved)
    records[3]["target"] = "0"
    for name, changed in (("changed", records), ("shorter", records[:-1])):
        other = Contents(open_data(jsonl(tmp_path / f"{name}.jsonl", changed)))
        with pytest.raises(ResumeError, match="Restore its files"):
            other.load_state_dict(saved)


def test_generated_records_are_known_by_their_number(tokenizer: Tokenizer) -> None:
    saved = Contents(Arithmetic(ArithmeticData(), tokenizer, seed=0)).state_dict()
    Contents(Arithmetic(ArithmeticData(), tokenizer, seed=0)).load_state_dict(saved)
    with pytest.raises(ResumeError, match="records"):
        Contents(Arithmetic(ArithmeticData(held_out=5), tokenizer, seed=0)).load_state_dict(saved)


SUMS = GymTask("chain_sum", {"max_terms": 2, "max_digits": 1})
LEGS = GymTask("leg_counting", weight=3.0)
Gym = Callable[..., Dataset]


@pytest.fixture
def gym(tokenizer: Tokenizer) -> Gym:
    """The records of tasks of reasoning-gym."""
    if importlib.util.find_spec("reasoning_gym") is None:
        lacking("no reasoning-gym: install the extra `gym`")

    def made(*tasks: GymTask, seed: int = 0, **options: Any) -> Dataset:
        return build_dataset(ReasoningGymData(tasks=tasks, **{"held_out": 8, **options}), tokenizer, seed)

    return made


def test_records_of_a_gym_are_a_function_of_the_seed(gym: Gym) -> None:
    one, again, other = (gym(SUMS, LEGS, seed=seed) for seed in (1, 1, 2))
    assert [one[i] for i in (0, 5, 70_000)] == [again[i] for i in (0, 5, 70_000)]
    assert [one[i].prompt for i in range(20)] != [other[i].prompt for i in range(20)]
    assert one.held_out == other.held_out
    names = [one[i].extra["reasoning_gym"]["name"] for i in range(200)]
    assert 0.6 < names.count("leg_counting") / 200 < 0.9


def test_what_is_held_out_is_not_trained_on(gym: Gym) -> None:
    found = gym(SUMS, held_out=60, records=400)
    tested = {record.prompt for record in found.held_out}
    assert not tested & {found[i].prompt for i in range(400)}


def test_a_task_with_too_few_problems_says_so(gym: Gym) -> None:
    few = GymTask("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    found = gym(few, held_out=3000)
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        _ = [found[i] for i in range(400)]


@pytest.mark.parametrize(
    "task", [GymTask("no_such_task"), GymTask("chain_sum", {"max_term": 3}), GymTask("chain_sum", {"min_terms": 0})]
)
def test_a_task_that_cannot_be_made_is_named(gym: Gym, task: GymTask) -> None:
    with pytest.raises(ConfigError, match=task.name):
        gym(task)


def test_the_verifier_reads_the_last_answer(gym: Gym) -> None:
    record = gym(SUMS)[3]
    answers = (f"<answer>1</answer> no, <answer> {record.answer} </answer>", record.answer, "<answer></answer>")
    asked = [RewardRequest(record.prompt, text, record.answer, record.extra) for text in answers]
    with contextlib.closing(build_scorer([GymReward(workers=1, timeout_s=300.0, deadline_s=600.0)])) as scorer:
        totals = [asyncio.run(scorer(request)).total for request in asked]
        lost = asyncio.run(scorer(RewardRequest("", "<answer>1</answer>", "1", {})))
    assert totals == [1.0, 0.0, 0.0]
    assert "no reasoning-gym task" in lost.failures["reasoning_gym"]


def test_the_verifier_imports_the_package_before_an_answer_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that takes longer than `timeout_s` must not give an answer the reward 0."""
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the package reasoning-gym is missing"):
        build_scorer([GymReward(workers=1)]).close()
