"""Records in the layouts that data sets commonly have: held against TRL's functions, and refused where TRL guesses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.conftest import Open
from tests.trainer.data.writing import CHATML, byte_tokenizer, parquet, published
from trainer.algorithms.offline import Dpo
from trainer.config import DpoConfig, JsonlData
from trainer.data.parse import BadRecord, Needs, Parser
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

ASKED, AGAIN = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}
RIGHT, WRONG = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


def qwen(directory: Path, template: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer(directory, CHATML, (CHATML[1], CHATML[0]), CHATML[1], published(template)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return qwen(tmp_path_factory.mktemp("qwen"), "qwen2_5")


def parse(value: dict[str, Any], tokenizer: Tokenizer, learns: Any = "samples", **options: Any) -> Record:
    (found,) = Parser(JsonlData(path="unused", **options), tokenizer, Needs(learns))(value)
    return found.record(0)


SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
ALPACA = {"instruction": "2+2?", "input": "", "output": "4"}


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ({"messages": [ASKED, RIGHT]}, {}),
        ({"conversations": SHAREGPT}, {}),
        ({"talk": SHAREGPT}, {"prompt_key": "talk"}),
        ({"prompt": [ASKED], "completion": [RIGHT]}, {}),
        ({"prompt": "2+2?", "completion": [RIGHT]}, {}),
        ({"prompt": "2+2?", "completion": "4"}, {"chat_template": True}),
        (ALPACA, {"chat_template": True}),
        (ALPACA, {"chat_template": True, "prompt_key": "instruction", "target_key": "output"}),
    ],
)
def test_one_conversation_in_every_layout(tokenizer: Tokenizer, value: dict[str, Any], options: Any) -> None:
    expected = parse({"prompt": [ASKED], "target": [RIGHT]}, tokenizer, "target")
    assert parse(value, tokenizer, "target", **options) == expected


@pytest.mark.parametrize("options", [{}, {"prompt_key": "instruction", "target_key": "output"}])
def test_the_input_of_alpaca_is_part_of_the_prompt(tokenizer: Tokenizer, options: Any) -> None:
    found = parse(ALPACA | {"input": "As a word."}, tokenizer, "target", **options)
    assert (found.prompt, found.answer) == ("2+2?\nAs a word.", "4")


SYSTEM, BRIEF = {"role": "system", "content": "Be brief."}, {"system": "Be brief."}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"conversations": SHAREGPT, **BRIEF}, [SYSTEM, ASKED]),
        (ALPACA | BRIEF, [SYSTEM, ASKED]),
        (ALPACA | BRIEF | {"history": [["1+1?", "2"]]}, [SYSTEM, *CHAT, ASKED]),
        (ALPACA | {"history": [["1+1?", "2"]], "system": ""}, [*CHAT, ASKED]),
        ({"messages": [SYSTEM, ASKED, RIGHT], "system": None, "history": []}, [SYSTEM, ASKED]),
    ],
)
def test_what_stands_before_in_columns_of_its_own(tokenizer: Tokenizer, value: dict[str, Any], expected: Any) -> None:
    found = parse(value, tokenizer, "target")
    assert found == parse({"prompt": expected, "target": [RIGHT]}, tokenizer, "target")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"messages": [SYSTEM, ASKED, RIGHT], **BRIEF}, "a system message, and 'system' besides"),
        ({"conversations": SHAREGPT, "system": ["Be brief."]}, "'system' is not a text"),
        (ALPACA | {"history": ["1+1?", "2"]}, "'history' is not a list of"),
        (ALPACA | {"history": [["1+1?", 2]]}, "not a list of messages with a role and a content"),
    ],
)
def test_what_stands_before_and_is_unclear_is_refused(tokenizer: Tokenizer, more: Any, problem: str) -> None:
    with pytest.raises(BadRecord, match=problem):
        parse(more, tokenizer, "target")


def test_keys_that_the_record_has_go_first(tokenizer: Tokenizer) -> None:
    beside = {"messages": [AGAIN], "completion": "5", **ALPACA}
    found = parse({"prompt": "1+1=", "target": "2", **beside}, tokenizer)
    assert (found.prompt, found.answer) == ("1+1=", "2")
    with pytest.raises(BadRecord, match="it has no 'mine', but messages"):
        parse({"messages": [AGAIN]}, tokenizer, prompt_key="mine")


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASKED],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


def test_a_record_of_verl_has_its_answer_and_what_its_functions_take(tokenizer: Tokenizer) -> None:
    found = parse(VERL, tokenizer)
    assert (found.messages, found.answer) == ((ASKED,), "4")
    assert found.extra == {name: VERL[name] for name in ("data_source", "extra_info")}
    several = parse(VERL | {"reward_model": {"ground_truth": ["4", "four"]}}, tokenizer)
    assert (several.answer, several.alternatives) == ("4", ("four",))
    plain = parse(VERL | {"answer": "5"}, tokenizer), parse(VERL, tokenizer, answer_key="extra_info.index")
    assert [(record.answer, record.extra) for record in plain] == [("5", {}), ("7", {})]
    with pytest.raises(BadRecord, match=r"'reward_model.ground_truth' is not a text"):
        parse(VERL | {"reward_model": {"ground_truth": {"target": "4"}}}, tokenizer)


PREFERENCES: dict[str, dict[str, Any]] = {
    "implicit": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
    "parting early": {"chosen": [ASKED, RIGHT, AGAIN, RIGHT], "rejected": [ASKED, WRONG, AGAIN, WRONG]},
    "parting late": {"chosen": [ASKED, RIGHT, AGAIN, RIGHT], "rejected": [ASKED, RIGHT, AGAIN, WRONG]},
    "explicit": {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
    "explicit, several turns": {"prompt": [ASKED], "chosen": [RIGHT, AGAIN, RIGHT], "rejected": [WRONG]},
    "a text prompt beside": {"prompt": "2+2?", "chosen": [ASKED, RIGHT, AGAIN, RIGHT], "rejected": [ASKED, WRONG]},
    "equal": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, RIGHT]},
    "texts": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "texts with a prompt": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "texts, one the other's beginning": {"chosen": "It is blue.", "rejected": "It is blue"},
}


@pytest.mark.parametrize("case", PREFERENCES)
def test_a_preference_is_parted_as_trl_parts_it(tokenizer: Tokenizer, case: str) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    value = PREFERENCES[case]
    theirs = data_utils.maybe_extract_prompt(copy.deepcopy(value))
    found = parse(value, tokenizer, "preference")
    if not isinstance(theirs["prompt"], list):
        assert found.prompt == theirs["prompt"]
        assert found.chosen_ids == tokenizer.continuation(theirs["chosen"])
        assert found.rejected_ids == tokenizer.continuation(theirs["rejected"])
        return
    text = data_utils.apply_chat_template(theirs, transformers_tokenizer(tokenizer))
    assert found.prompt == text["prompt"]
    for name in ("chosen", "rejected"):
        assert tokenizer.decode(getattr(found, f"{name}_ids"), special=True) == text[name].removesuffix("\n")


def test_from_and_value_are_read_as_trl_reads_them(tokenizer: Tokenizer) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    value = {"conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}]}
    theirs = data_utils.maybe_convert_to_chatml(copy.deepcopy(value))
    assert parse(value, tokenizer, "target") == parse(theirs, tokenizer, "target")


def transformers_tokenizer(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer.directory)


def test_the_users_turns_within_an_answer_are_not_learnt(tokenizer: Tokenizer) -> None:
    record = parse(PREFERENCES["explicit, several turns"], tokenizer, "preference")
    chosen, rejected = Dpo(DpoConfig()).sequences([record], [])
    assert chosen.mask is not None
    learnt = [token for token, mask in zip(chosen.continuation, chosen.mask, strict=True) if mask]
    assert tokenizer.decode(learnt, special=True) == "4<|im_end|>4<|im_end|>"
    assert rejected.mask is None


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"text": "2+2=4"}, "it has no 'prompt', but text: name the prompt's key in data.prompt_key"),
        ({"conversations": [{"from": "bing", "value": "4"}]}, "from 'bing': write a role"),
        ({"chosen": [ASKED, RIGHT], "rejected": [AGAIN, WRONG]}, "do not begin with the same messages"),
        ({"chosen": [ASKED, RIGHT], "rejected": "5"}, "do not begin with the same messages"),
        ({"chosen": "4", "rejected": "5"}, "do not begin with the same messages"),
        ({"chosen": [ASKED, RIGHT, AGAIN, RIGHT], "rejected": [ASKED, RIGHT, ASKED, RIGHT]}, "not the assistant's"),
    ],
)
def test_what_is_no_layout_is_told_what_to_write(tokenizer: Tokenizer, value: Any, complaint: str) -> None:
    with pytest.raises(BadRecord, match=complaint):
        parse(value, tokenizer)


def test_a_template_that_writes_turns_apart_takes_answers_of_one_turn(tmp_path: Path) -> None:
    thinking = {"role": "assistant", "content": "<think>2 and 2</think>4"}
    value = {"prompt": [ASKED], "chosen": [thinking, AGAIN, RIGHT], "rejected": [WRONG]}
    with pytest.raises(BadRecord, match="writes the turns of an answer apart: give answers of one turn"):
        parse(value, qwen(tmp_path, "qwen3"))


def test_the_columns_of_every_layout_are_read(open_data: Open, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = parquet(tmp_path / "a.parquet", [ALPACA | {"input": "As a word."}])
    assert open_data(path, "parquet", tokenizer=tokenizer)[0].prompt == "2+2?\nAs a word."
    seen = parquet(tmp_path / "b.parquet", [ALPACA | {"images": ["1.png"]}])
    with pytest.raises(DataError, match="row 1: it has 'images'"):
        open_data(seen, "parquet", tokenizer=tokenizer)
