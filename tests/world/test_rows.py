"""Rows of others' data sets through the data reader: learned as transformers renders them, or refused in one sentence.

Each row is one shape out of LLaMA-Factory's demo sets (facts.py). Texts in them are invented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.trainer.data.writing import CHATML, LLAMA, byte_tokenizer, published
from tests.world import REPOSITORY, facts, rows
from trainer.config import JsonlData
from trainer.data.cache import FileDataset
from trainer.data.parse import BadRecord, Needs, Parser, Tokenised
from trainer.data.records import Learns
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

TEMPLATES = {"qwen2_5": CHATML, "qwen3": CHATML, "llama3_1": LLAMA}
SETS = [row.path for row in rows() if row.package == f"{REPOSITORY}hiyouga/LLaMA-Factory"]
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    special = TEMPLATES[request.param]
    end = "<|eot_id|>" if special is LLAMA else "<|im_end|>"
    directory = tmp_path_factory.mktemp(request.param)
    return Tokenizer(byte_tokenizer(directory, special, (end,), end, published(request.param)))


def told(name: str) -> list[dict[str, Any]]:
    text = facts(name).read_text()
    found: list[dict[str, Any]] = (
        json.loads(text) if name.endswith(".json") else list(map(json.loads, text.splitlines()))
    )
    return found


def parse(tokenizer: Tokenizer, row: Any, learns: Learns = "target", **options: Any) -> list[Tokenised]:
    return Parser(JsonlData(path="unused", **options), tokenizer, Needs(learns))(row)


def said(row: dict[str, Any], key: str) -> Messages:
    """A row's messages in OpenAI's form, by the documentation of LLaMA-Factory."""
    if "instruction" in row:
        asked = row["instruction"] + (f"\n{row['input']}" if row["input"] else "")
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    found = row[key]
    return [_message(message) for message in (found if isinstance(found, list) else [found])]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if "from" in message:
        roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
        calls = message["from"] == "function_call"
        parts = [{"type": "tool_call" if calls else "text", "value": message["value"]}]
        message = {"role": roles.get(message["from"], message["from"]), "content": parts}
    content = message["content"]
    if isinstance(content, str):
        return message
    found = {kind: [p["value"] for p in content if p["type"] == kind] for kind in ("text", "reasoning", "tool_call")}
    more: dict[str, Any] = {"reasoning_content": "".join(found["reasoning"])} if found["reasoning"] else {}
    if found["tool_call"]:
        more["tool_calls"] = [{"type": "function", "function": json.loads(call)} for call in found["tool_call"]]
    return {"role": message["role"], "content": "".join(found["text"]), **more}


def tools_of(row: dict[str, Any]) -> Any:
    tools = json.loads(row.get("tools", "[]"))
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def rendered(tokenizer: Tokenizer, messages: Messages, tools: Any) -> list[tuple[str, str]]:
    """By transformers, of each of the assistant's messages: the prompt, and what stands behind it."""
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer.directory)
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = (
                str(theirs.apply_chat_template(part, tools=tools, add_generation_prompt=go_on, tokenize=False))
                for part, go_on in ((messages[:place], True), (messages[: place + 1], False))
            )
            assert after.startswith(before)
            found.append((before, after.removeprefix(before).removesuffix("\n")))
    return found


def learned(tokenizer: Tokenizer, record: Tokenised) -> list[tuple[str, str]]:
    """Of each answer in a sequence: all that is before it, and what is learned."""
    found: list[tuple[str, str]] = []
    ids, start = list(record.prompt_ids), 0
    marks = [*(record.mask or (1,) * len(record.target_ids)), 0]
    for place, (token, mark) in enumerate(zip((*record.target_ids, -1), marks, strict=True)):
        if mark and not (place and marks[place - 1]):
            start = len(ids)
        if not mark and place and marks[place - 1]:
            found.append((tokenizer.decode(ids[:start], special=True), tokenizer.decode(ids[start:], special=True)))
        ids.append(token)
    return found


CONVERSATIONS = [
    ("alpaca_en_demo.json", "", {"chat_template": True}),
    ("identity.json", "", {"chat_template": True}),
    ("glaive_toolcall_en_demo.json", "conversations", {}),
    ("kto_en_demo.json", "messages", {}),
    ("reason_tool_use_demo_50.jsonl", "messages", {}),
    ("v1_sft_demo.jsonl", "messages", {}),
]


def usable(name: str, row: dict[str, Any], template: str) -> str:
    """Why a row is refused, or nothing."""
    if row.get("label") is False:
        return "its 'label' is false, and SFT would learn the bad answer"
    if name.startswith("reason") and "qwen3" not in template:
        return "the chat template (leaves out reasoning_content|refuses it .*only supports single tool-calls)"
    return ""


@pytest.mark.parametrize(("name", "key", "options"), CONVERSATIONS, ids=[name for name, _, _ in CONVERSATIONS])
def test_each_answer_of_a_row_is_learned_as_transformers_renders_it(
    tokenizer: Tokenizer, name: str, key: str, options: Any
) -> None:
    for row in told(name):
        if why := usable(name, row, tokenizer.directory.name):
            with pytest.raises(BadRecord, match=why):
                parse(tokenizer, row, **options)
            continue
        found = [part for record in parse(tokenizer, row, **options) for part in learned(tokenizer, record)]
        assert found == rendered(tokenizer, said(row, key), tools_of(row))


PREFERENCES: dict[str, tuple[Any, dict[str, str]]] = {
    "dpo_en_demo.json": (("conversations", "chosen", "rejected"), {}),
    "v1_dpo_demo.jsonl": (
        ("", "chosen_messages", "rejected_messages"),
        {"chosen_key": "chosen_messages", "rejected_key": "rejected_messages"},
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_both_answers_of_a_preference_are_what_transformers_renders(tokenizer: Tokenizer, name: str) -> None:
    (before, *keys), options = PREFERENCES[name]
    for row in told(name):
        (record,) = parse(tokenizer, row, "preference", **options)
        asked = said(row, before) if before else []
        for key, ids in zip(keys, (record.chosen_ids, record.rejected_ids), strict=True):
            prompt, answer = rendered(tokenizer, [*asked, *said(row, key)], None)[-1]
            assert (record.prompt, tokenizer.decode(list(ids), special=True)) == (prompt, answer)


def test_sft_learns_the_chosen_answer_where_it_is_named(tokenizer: Tokenizer) -> None:
    for row in told("dpo_en_demo.json"):
        with pytest.raises(BadRecord, match=r"no target to learn: data.target_key names its key"):
            parse(tokenizer, row)
        (record,) = parse(tokenizer, row, target_key="chosen")
        last = [*said(row, "conversations"), *said(row, "chosen")]
        assert learned(tokenizer, record) == rendered(tokenizer, last, None)[-1:]


@pytest.mark.parametrize("options", [{}, {"prompt_key": "text"}, {"target_key": "text"}])
def test_a_text_alone_is_learned_behind_its_first_token(tokenizer: Tokenizer, options: Any) -> None:
    (row,) = told("c4_demo.jsonl")
    (record,) = parse(tokenizer, row, **options)
    assert record.prompt_ids + record.target_ids == tokenizer.continuation(row["text"])
    assert (len(record.prompt_ids), record.mask) == (1, ())
    with pytest.raises(BadRecord, match="it has no 'prompt', but text"):
        parse(tokenizer, row, "samples")


def test_images_are_refused_unless_the_texts_are_named(tokenizer: Tokenizer) -> None:
    for row in told("mllm_demo.json"):
        with pytest.raises(BadRecord, match="it has 'images', and a run reads texts alone"):
            parse(tokenizer, row)
        parse(tokenizer, row, prompt_key="messages")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"from": "function_call", "value": "add(3, 5)"}, "a call of a tool is not .* as JSON in a text"),
        ({"from": "function_call", "value": '{"name": "add"}'}, "a call of a tool is not .* as JSON in a text"),
        ({"from": "function_call", "value": '{"name": "add", "arguments": [3]}'}, "arguments that are no JSON object"),
        ({"from": "bing", "value": "It is 8."}, "a message is from 'bing': write a role"),
        ({"role": "assistant", "content": [{"type": "image_url", "value": "x.png"}]}, "a part of type 'image_url'"),
        ({"role": "assistant", "content": [{"type": "tool_call", "value": "add"}]}, "a call of a tool is not"),
    ],
)
def test_a_message_that_cannot_be_read_is_told_why(tokenizer: Tokenizer, said: dict[str, Any], problem: str) -> None:
    asked = {"from": "human", "value": "3+5?"} if "from" in said else {"role": "user", "content": "3+5?"}
    with pytest.raises(BadRecord, match=problem):
        parse(tokenizer, {"conversations": [asked, said]})


def _read(path: str, tmp_path: Path, tokenizer: Tokenizer) -> str:
    config = JsonlData(path=str(facts(path)), cache_dir=str(tmp_path), max_bad=0)
    try:
        data = FileDataset(config, tokenizer, Needs("target"))
    except DataError as error:
        return str(error)
    return f"{len(data)} sequences"


REFUSED: dict[str, Sequence[str]] = {
    "dpo_en_demo.json": ("record 1", "no target to learn"),
    "kto_en_demo.json": ("record 3", "'label' is false"),
    "mllm_demo.json": ("record 1", "'images'"),
    "v1_dpo_demo.jsonl": ("line 1", "it has no 'prompt', but chosen_messages, rejected_messages"),
    "wiki_demo.txt": ("line 1", "it is not JSON"),
}


@pytest.mark.parametrize("path", SETS, ids=[path.rpartition("/")[2] for path in SETS])
def test_each_file_is_read_by_its_name_alone_or_refused_with_its_place(
    path: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = byte_tokenizer(tmp_path_factory.mktemp("qwen3"), CHATML, CHATML[1:2], CHATML[1], published("qwen3"))
    found = _read(path, tmp_path, Tokenizer(directory))
    name = path.rpartition("/")[2]
    assert found.endswith("sequences") == (name not in REFUSED), found
    for part in REFUSED.get(name, ()):
        assert part in found
    assert name not in REFUSED or str(facts(path)) in found
