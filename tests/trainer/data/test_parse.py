"""Parts that are made of a record: keys, chat messages, preferences, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.conftest import Open
from tests.trainer.data.writing import LLAMA, byte_tokenizer, jsonl, problems, published
from trainer.config import JsonlData
from trainer.data.parse import ANY, BadRecord, Needs, Parser
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.tiny_model import write_tiny_model

USER = {"role": "user", "content": "1+2="}
TEMPLATE = (
    "{{ eos_token }}{% for message in messages %}\n    {% if message.role == 'user' %}"
    "\nu:{{ message['content'] | trim }}\n{% else %}a:{{ message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a template of its own, whose every character is a token."""
    path = tmp_path_factory.mktemp("models") / "chatty"
    write_tiny_model(path, characters="0123456789+=ua:\n ", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(path)


def test_a_template_is_another_one_when_what_it_names_is(tmp_path: Path) -> None:
    """Records that were tokenised with the old end of a turn must not be trained on with the new one."""
    write_tiny_model(tmp_path, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    found = []
    for token in ("0", "1"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        tokenizer = Tokenizer(tmp_path)
        found.append((tokenizer.chat([USER])[1], tokenizer.digest))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PHI = ("<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>")
ENDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str | None, str | None, str]] = {
    "llama3": (LLAMA, (LLAMA[1], LLAMA[5]), LLAMA[5], "llama3", "<|eot_id|>"),
    "llama3, its first tokenizer": (LLAMA, (LLAMA[1], LLAMA[5]), LLAMA[1], "llama3", "<|eot_id|>"),
    "llama3.2": (LLAMA, (LLAMA[1], LLAMA[4], LLAMA[5]), LLAMA[5], "llama3_2", "<|eot_id|>"),
    "llama3, the tokenizer's alone": (LLAMA, (LLAMA[1],), LLAMA[5], "llama3", "<|eot_id|>"),
    "llama3, the base model": (LLAMA, (LLAMA[1],), LLAMA[1], None, "<|end_of_text|>"),
    "qwen2.5": (CHATML, (CHATML[2], CHATML[0]), CHATML[2], "qwen2_5", "<|im_end|>"),
    "qwen3": (CHATML, (CHATML[2], CHATML[0]), CHATML[2], "qwen3", "<|im_end|>"),
    "qwen2.5, the base model": (CHATML, (CHATML[0],), CHATML[0], "qwen2_5", "<|endoftext|>"),
    "phi3": (PHI, (PHI[0], PHI[1], PHI[3]), PHI[0], "phi3", "<|end|>"),
    "without a tokenizer's own": ((*CHATML, "None"), (CHATML[2], CHATML[0]), None, None, "<|im_end|>"),
}


@pytest.mark.parametrize("model", ENDS)
def test_an_answer_ends_as_the_template_ends_it_where_an_engine_stops(tmp_path: Path, model: str) -> None:
    """At base models engines do not stop where their templates end a turn: these would never end an answer."""
    special, stops, eos, template, expected = ENDS[model]
    byte_tokenizer(tmp_path, special, stops, eos, template and published(template))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_id == tokenizer.vocabulary[expected]


def test_llama_learns_what_its_template_writes(tmp_path: Path) -> None:
    stops = (LLAMA[1], LLAMA[5])
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, LLAMA, stops, LLAMA[5], published("llama3")))
    answers = [{"role": "assistant", "content": text} for text in ("3", "12")]
    _, before = tokenizer.chat([USER])
    for given, name in (
        ({"prompt": [USER, answers[0]]}, "target_ids"),
        ({"prompt": [USER], "target": "3"}, "target_ids"),
        ({"chosen": [USER, answers[0]], "rejected": [USER, answers[1]]}, "chosen_ids"),
        ({"chosen": [USER, answers[1]], "rejected": [USER, answers[0]]}, "rejected_ids"),
    ):
        _, history = tokenizer.chat([USER, answers[0], USER])
        learned = before + getattr(parse(given, tokenizer), name)
        assert history[: len(learned)] == learned, "the next turn goes on from it"


def parse(value: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> Record:
    (found,) = Parser(JsonlData(path="unused", **options), tokenizer, ANY)(value)
    return found.record(0)


NAMED = {"q": "1+1=", "a": "3", "truth": {"text": 2}, "tests": ["x"], "other": 1, "extra": {"n": None}}
KEYS = {"prompt_key": "q", "target_key": "a", "answer_key": "truth.text", "extra_keys": ("tests",)}


@pytest.mark.parametrize(
    ("value", "options", "answer", "learnt", "more"),
    [
        ({"prompt": "1+1="}, {}, "", {}, {}),
        ({"prompt": "1+1=", "target": "2"}, {}, "2", {"target_ids": "2"}, {}),
        ({"prompt": "1+1=", "target": "3", "answer": "2"}, {}, "2", {"target_ids": "3"}, {}),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "11"}, {}, "", {"chosen_ids": "2", "rejected_ids": "11"}, {}),
        (NAMED, KEYS, "2", {"target_ids": "3"}, {"extra": {"tests": ["x"], "n": None}}),
    ],
    ids=["prompt", "target", "answer", "preference", "keys"],
)
def test_a_record_of_texts(
    tokenizer: Tokenizer, value: Any, options: Any, answer: str, learnt: dict[str, str], more: dict[str, Any]
) -> None:
    """Text that is to be learnt ends as an answer does."""
    ids: dict[str, Any] = {part: tokenizer.continuation(text) for part, text in learnt.items()}
    expected = Record(0, "1+1=", answer, tokenizer.prompt("1+1="), **{"target_ids": (), **ids, **more})
    assert parse(value, tokenizer, **options) == expected


def test_messages_become_what_transformers_makes_of_them(chatty: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(chatty.directory)
    for messages in ([USER], [USER, {"role": "assistant", "content": "3"}, USER]):
        text, ids = chatty.chat(messages)
        assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(ids) == expected
    assert text.startswith("<eos>")
    assert ids[0] == chatty.eos_id


def test_each_answer_of_a_list_is_right(tokenizer: Tokenizer) -> None:
    record = parse({"prompt": "1+1=", "answer": ["2", 2.5]}, tokenizer)
    assert (record.answer, record.alternatives) == ("2", ("2.5",))


def test_the_last_answer_of_a_conversation_is_what_is_learnt(chatty: Tokenizer) -> None:
    good, bad = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "12"}
    record = parse({"messages": [USER, good]}, chatty, prompt_key="messages")
    assert (record.prompt, record.prompt_ids) == chatty.chat([USER])
    assert record.target_ids == chatty.continuation("3")
    asked = parse({"messages": [USER], "answer": "3"}, chatty, prompt_key="messages")
    assert (asked.prompt_ids, asked.target_ids, asked.answer) == (record.prompt_ids, (), "3")
    assert parse({"prompt": "1+2="}, chatty, chat_template=True).prompt_ids == record.prompt_ids
    preference = parse({"chosen": [USER, good], "rejected": [USER, bad]}, chatty)
    assert preference.prompt == record.prompt
    assert (preference.chosen_ids, preference.rejected_ids) == (record.target_ids, chatty.continuation("12"))
    with pytest.raises(BadRecord, match="do not begin with the same messages"):
        parse({"chosen": [USER, good], "rejected": [good, bad]}, chatty)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([1], "not an object"),
        ({}, "it has no 'prompt'"),
        ({"prompt": 3}, "'prompt' is not a text"),
        ({"prompt": None, "q": "1"}, r"it has no 'prompt', but prompt, q: name the prompt's key in data\.prompt_key"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "1", "target": 2}, "'target' is not a text"),
        ({"prompt": "1", "answer": ["2", None]}, "'answer' is not a text, nor a list of texts"),
        ({"prompt": "1", "answer": []}, "'answer' is not a text, nor a list of texts"),
        ({"prompt": "1", "chosen": "2"}, "only one of 'chosen' and 'rejected'"),
        ({"prompt": "1", "extra": [1]}, "'extra' is not an object"),
        ({"prompt": [{"role": "user"}]}, "not a list of messages"),
        ({"prompt": []}, "not a list of messages"),
        ({"prompt": [{"role": "assistant", "content": "1"}]}, "no messages"),
    ],
)
def test_what_cannot_be_used_is_said(tokenizer: Tokenizer, value: Any, complaint: str) -> None:
    with pytest.raises(BadRecord, match=complaint):
        parse(value, tokenizer)


def test_a_missing_extra_key_is_said(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRecord, match=r"'a\.b' is missing"):
        parse({"prompt": "1", "a": {}}, tokenizer, extra_keys=("a.b",))


def test_a_model_without_a_template_is_the_users_to_correct(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja"):
        parse({"prompt": [USER]}, Tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(BadRecord, match="no system messages"):
        parse({"prompt": [USER]}, Tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(BadRecord, match="refuses it"):
        parse({"prompt": [USER]}, Tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(DataError, match="chat template cannot be used"):
        Tokenizer(tmp_path)


def test_bad_records_are_left_out_within_a_limit_and_named(open_data: Open, tmp_path: Path) -> None:
    records: list[object] = [*problems(4), [1], {"prompt": 3}, *problems(3), {"target": "1"}]
    path = jsonl(tmp_path / "a.jsonl", records)
    with path.open("a") as stream:
        stream.write("\n{\n")
    for allowed, complaint in ((0, r"^\S+a\.jsonl, line 5: .* data\.max_bad"), (3, "more than data.max_bad = 3")):
        with pytest.raises(DataError, match=complaint):
            open_data(path, max_bad=allowed)
    data = open_data(path, max_bad=4)
    assert len(data) == 7
    said = data.summary()
    assert said["bad_records"] == 4
    assert [name.split(":")[0].split(", ")[1] for name in said["bad"]] == ["line 5", "line 6", "line 10", "line 12"]
    with pytest.raises(DataError, match="max_bad = 2"):  # though they are in the cache now
        open_data(path, max_bad=2)


ANSWERED = {"prompt": "1+2=", "target": "3", "chosen": "3", "rejected": "12"}  # 4 tokens, then 2 and 3
UNUSABLE: dict[str, tuple[Needs, dict[str, Any], str]] = {
    "empty target": (Needs("target"), {"prompt": "1", "target": ""}, "it has no target to learn"),
    "no answer": (Needs("target"), {"prompt": [USER]}, "it has no target to learn"),
    "no preference": (Needs("preference"), {"prompt": "1", "target": "1"}, "it has no preference to learn"),
    "long target": (Needs("target", longest=6), ANSWERED | {"target": "13"}, "7 tokens, and the model takes 6"),
    "long rejected": (Needs("preference", longest=7), ANSWERED | {"rejected": "123"}, "8 tokens, and the model takes"),
    "long pair": (Needs("preference", 7, 13), ANSWERED | {"chosen": "13"}, "14 tokens, and a row takes 13"),
    "long prompt": (Needs(longest=5), {"prompt": "11+2="}, "6 tokens, and the model takes 5"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_record_that_a_run_cannot_learn_is_a_bad_one(open_data: Open, tmp_path: Path, case: str) -> None:
    """Named by its line, and within the limit left out; another run may have use for it."""
    needs, record, complaint = UNUSABLE[case]
    path = jsonl(tmp_path / "a.jsonl", [ANSWERED, record, ANSWERED])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{complaint}.*data\.max_bad"):
        open_data(path, needs=needs)
    data = open_data(path, needs=needs, max_bad=1)
    assert (len(data), data.summary()["bad_records"]) == (2, 1)
    assert len(open_data(path, eval_path=str(path)).held_out) == 3


def test_processes_that_tokenise_know_what_a_run_needs(open_data: Open, tmp_path: Path) -> None:
    for name in ("a", "b"):
        jsonl(tmp_path / f"{name}.jsonl", [ANSWERED, {"prompt": "1"}])
    data = open_data(tmp_path / "*.jsonl", needs=Needs("target", 6, 6), max_bad=2, workers=2)
    assert (len(data), data.summary()["bad_records"]) == (2, 2)


def test_lines_are_numbered_through_all_parts_of_a_file(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", 37)
    text = "".join(json.dumps(r) + "\n\n" for r in problems(20)) + "[]\n" + json.dumps(problems(1)[0]) + "\nno\n"
    (tmp_path / "a.jsonl").write_text(text)
    bad = open_data(tmp_path / "a.jsonl", max_bad=2, workers=1).summary()["bad"]
    assert [name.split(": ")[0] for name in bad] == [f"{tmp_path}/a.jsonl, line {n}" for n in (41, 43)]


def test_only_the_first_bad_records_are_named(open_data: Open, tmp_path: Path) -> None:
    said = open_data(jsonl(tmp_path / "a.jsonl", [{}] * 1000 + problems(1)), max_bad=1000).summary()
    assert said["bad_records"] == 1000
    assert len(said["bad"]) == 20


def test_records_that_are_too_long_by_the_configuration_are_left_out_and_are_no_bad_ones(
    open_data: Open, tmp_path: Path
) -> None:
    records = [{"prompt": "1" * n, "target": "2" * n} for n in range(1, 11)]
    data = open_data(jsonl(tmp_path / "a.jsonl", records), needs=Needs("target", longest=9), max_length=9)
    assert len(data) == 4
    said = data.summary()
    assert (said["too_long"], said["bad_records"], said["tokens"]) == (6, 0, 3 + 5 + 7 + 9)
