"""Small programs to write: what the records say is true of the programs themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from trainer.config import ArithmeticData, CodeReward, CodeTasksData
from trainer.data.problems import CHARACTERS, COPIES, Arithmetic, CodeTasks, all_problems, program
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.rewards import RewardRequest, build_scorer
from trainer.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("models") / "coder"
    write_tiny_model(path, characters=CHARACTERS, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    return Tokenizer(path)


def passes(source: str, tests: list[str]) -> bool:
    names: dict[str, Any] = {}
    exec(source, names)
    try:
        for test in tests:
            exec(test, names)
    except AssertionError:
        return False
    return True


def test_every_problem_tells_the_mistake_from_the_right_program(tokenizer: Tokenizer) -> None:
    data = CodeTasks(CodeTasksData(), tokenizer, seed=0)
    problems = all_problems()
    assert len(data) == COPIES * len(problems)
    for i, _ in enumerate(problems):
        record = data[i]
        assert passes(record.answer, record.extra["tests"])
        assert not passes(tokenizer.decode(record.rejected_ids), record.extra["tests"])


def test_texts_survive_the_tokenizer_and_end(tokenizer: Tokenizer) -> None:
    record = CodeTasks(CodeTasksData(), tokenizer, seed=0)[5]
    assert tokenizer.decode(record.prompt_ids) == record.prompt
    assert tokenizer.decode(record.chosen_ids) == record.answer
    assert record.chosen_ids[-1] == record.rejected_ids[-1] == tokenizer.eos_id
    problem = (("add", 3), ("mul", 2))
    assert program(problem, parentheses=True) == "f=lambda x:(x+3)*2"
    assert program(problem, parentheses=False) == "f=lambda x:x+3*2"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_engine_has_the_same_tokenizer(family: str, tmp_path: Path) -> None:
    """vLLM takes what transformers makes of the files, which for a Qwen2 is a tokenizer of its own."""
    written = "\n" + CHARACTERS
    write_tiny_model(tmp_path, family, characters=written, hidden_size=24, intermediate_size=16, num_hidden_layers=1)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (written, "add 3,  mul 2:\n\nf=lambda x:(x+3)*2\n ", " 1 \n"):
        assert list(ours.plain(text)) == [3 + written.index(character) for character in text]
        assert theirs.encode(text, add_special_tokens=False) == list(ours.plain(text))
        assert theirs.decode(ours.plain(text)) == ours.decode(ours.plain(text)) == text
    with pytest.raises(ValueError, match="outside ASCII"):
        write_tiny_model(tmp_path, characters="é")


def test_noise_is_a_share_of_the_targets_and_depends_on_the_seed_alone(tokenizer: Tokenizer) -> None:
    def wrong(seed: int) -> list[bool]:
        data = CodeTasks(CodeTasksData(noise=0.3), tokenizer, seed)
        return [data[i].target_ids == data[i].rejected_ids for i in range(600)]

    assert 0.2 < sum(wrong(1)) / 600 < 0.4
    assert wrong(1) == wrong(1)
    assert wrong(1) != wrong(2)


def test_held_out_problems_are_never_trained_on_and_right(tokenizer: Tokenizer) -> None:
    data = CodeTasks(CodeTasksData(noise=1.0, held_out=50), tokenizer, seed=3)
    trained = {data[i].prompt for i in range(len(data) // COPIES)}
    assert not trained & {record.prompt for record in data.held_out}
    assert len(trained) + len(data.held_out) == len(all_problems())
    assert all(record.target_ids == record.chosen_ids for record in data.held_out)
    with pytest.raises(msgspec.ValidationError, match="held_out"):
        msgspec.convert({"kind": "code_tasks", "held_out": 10_000}, CodeTasksData)


def test_every_record_of_the_arithmetic_task_is_a_preference_too(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    tokenizer = Tokenizer(tmp_path)
    for mistake in ("random", "off_by_one", "carry"):
        config = ArithmeticData(operands=3, largest=5, mistake=mistake, noise=0.5, held_out=10)  # type: ignore[arg-type]
        data = Arithmetic(config, tokenizer, seed=0)
        for record in (*data.held_out, *(data[i] for i in range(300))):
            assert tokenizer.decode(record.chosen_ids) == record.answer
            assert record.rejected_ids != record.chosen_ids
            assert record.target_ids in (record.chosen_ids, record.rejected_ids)


def test_the_sandbox_tells_the_mistake_from_the_right_program(tokenizer: Tokenizer) -> None:
    scorer = build_scorer([CodeReward(timeout_s=60.0, case_timeout_s=30.0)])
    scorer.open()
    data = CodeTasks(CodeTasksData(), tokenizer, seed=0)

    async def scores() -> list[tuple[float, float]]:
        async def score(record: Record, answer: str) -> float:
            return (await scorer(RewardRequest(record.prompt, answer, record.answer, record.extra))).total

        records = [data[i] for i in range(4)]
        return [(await score(r, r.answer), await score(r, tokenizer.decode(r.rejected_ids))) for r in records]

    try:
        assert asyncio.run(scores()) == [(1.0, 0.0)] * 4
        assert scorer.stats()["reward_failures/code"] == 0
    finally:
        scorer.close()
