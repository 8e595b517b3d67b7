"""Conversations as published chat templates write them: what is learned of a row, and what an episode reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.conftest import Open, prompts
from tests.trainer.data.writing import CHATML, R1, byte_tokenizer, jsonl, parquet, published
from tests.world.kinds import ANSWERED, ASKED, CALL, KINDS, TOOL, says
from trainer.algorithms.offline import Sft
from trainer.config import JsonlData, SftConfig
from trainer.config.sections import ModelConfig
from trainer.data.parse import Needs, Parser, Tokenised
from trainer.data.tokenizer import Tokenizer, model_tokenizer
from trainer.errors import ConfigError, DataError

CLOSED = "<think>\n\n</think>\n\n"
WRITTEN = {**CALL, "function": {**CALL["function"], "arguments": '{"a": 3, "b": 5}'}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 5}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3", "deepseek_r1_distill"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return model(tmp_path_factory.mktemp("model"), request.param)


def model(directory: Path, template: str) -> Tokenizer:
    special = R1 if template.startswith("deepseek") else CHATML
    return Tokenizer(byte_tokenizer(directory, special, (special[1],), special[1], published(template)))


def learned(tokenizer: Tokenizer, value: Any, needs: str = "target", **options: Any) -> list[tuple[str, str]]:
    """Of each sequence what is read before the first learned token, and what is learned."""
    found = []
    for record in parse(tokenizer, value, needs, **options):
        mask = record.mask or (1,) * len(record.target_ids)
        ids = [token for token, on in zip(record.target_ids, mask, strict=True) if on]
        found.append((text(tokenizer, record.prompt_ids), text(tokenizer, ids)))
    return found


def parse(tokenizer: Tokenizer, value: Any, needs: Any = "target", **options: Any) -> list[Tokenised]:
    return Parser(JsonlData(path="unused", **options), tokenizer, Needs(needs))(value)


def text(tokenizer: Tokenizer, ids: Any) -> str:
    return tokenizer.decode(list(ids), special=True)


def test_every_answer_of_a_conversation_is_learned(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, "qwen2_5")
    messages, _ = KINDS["turns"]
    ((prompt, found),) = learned(tokenizer, {"prompt": messages})
    assert (prompt, found) == (tokenizer.chat([ASKED])[0], "It is 8.<|im_end|>10.<|im_end|>")
    ((_, last),) = learned(tokenizer, {"prompt": [ASKED, {**ANSWERED, "weight": 0}, *messages[2:]]})
    assert last == "10.<|im_end|>"
    ((_, target),) = learned(tokenizer, {"prompt": messages[:3], "target": messages[3:]})
    assert target == "10.<|im_end|>", "the prompt of a record with a target is read"
    (sampled,) = parse(tokenizer, {"prompt": messages}, "samples")
    assert sampled.prompt == tokenizer.chat(messages[:3])[0]


def test_where_a_template_drops_earlier_thoughts_each_answer_has_its_own_prompt(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, "qwen3")
    messages, _ = KINDS["turns"]
    found = learned(tokenizer, {"prompt": messages})
    assert found == [
        (tokenizer.chat([ASKED])[0], f"{CLOSED}It is 8.<|im_end|>"),
        (tokenizer.chat(messages[:3])[0], f"{CLOSED}10.<|im_end|>"),
    ]


def test_the_loss_is_on_the_answers_alone(tmp_path: Path) -> None:
    (record,) = parse(model(tmp_path, "qwen2_5"), {"prompt": KINDS["turns"][0]})
    (sequence,) = Sft(SftConfig()).sequences([record.record(0)], [])
    assert sequence.mask == record.mask
    assert 0 in record.mask
    (whole,) = Sft(SftConfig(on_prompt=True)).sequences([record.record(0)], [])
    assert (whole.train_on_prompt, whole.mask) == (True, None)


@pytest.mark.parametrize("call", [CALL, WRITTEN], ids=["object", "text"])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_and_calls_of_a_row_are_written(tmp_path: Path, call: Any, tools: Any) -> None:
    tokenizer = model(tmp_path, "qwen2_5")
    messages = [ASKED, says("assistant", None, tool_calls=[call]), says("tool", "8"), ANSWERED]
    ((prompt, found),) = learned(tokenizer, {"prompt": messages, "tools": tools})
    assert '"name": "add"' in prompt
    assert found == f"{CALLED}It is 8.<|im_end|>"
    (sampled,) = parse(tokenizer, {"prompt": messages[:1], "tools": tools}, "samples")
    assert text(tokenizer, sampled.prompt_ids) == prompt


def test_columns_of_a_table_have_nulls(open_data: Open, tmp_path: Path) -> None:
    """Where a message lacks what another has; the column of tools is read."""
    tokenizer = model(tmp_path, "qwen2_5")
    rows = [{"messages": [ASKED, says("assistant", None, tool_calls=[WRITTEN])], "tools": json.dumps([TOOL])}]
    path = parquet(tmp_path / "a.parquet", rows)
    data = open_data(path, "parquet", Needs("target"), tokenizer=tokenizer, prompt_key="messages")
    assert text(tokenizer, data[0].target_ids) == CALLED
    assert "add" in text(tokenizer, data[0].prompt_ids)


def test_a_thinking_model_learns_what_it_would_have_sampled(tmp_path: Path) -> None:
    """The prompt has opened the block of thoughts, or not: an answer opens and closes it once."""
    r1 = model(tmp_path, "deepseek_r1_distill")
    end = "<｜end▁of▁sentence｜>"
    sampled = "Count on\nfrom 5.\n\n</think>\nIt is 8."
    for content in (sampled, f"<think>{sampled}", f"<think>\n{sampled}"):
        assert [found for _, found in learned(r1, {"prompt": [ASKED], "target": content})] == [sampled + end]
    assert parse(r1, {"prompt": [ASKED], "chosen": sampled, "rejected": "9"}, "preference")[0].chosen_ids == r1.plain(
        sampled + end
    )
    qwen3 = model(tmp_path, "qwen3")
    said = {"prompt": [ASKED], "target": "<think>\nCount on.\n</think>\n\nIt is 8."}
    assert [found for _, found in learned(qwen3, said)] == ["<think>\nCount on.\n</think>\n\nIt is 8.<|im_end|>"]


REFUSED = {
    "developer": ({"prompt": KINDS["developer"][0]}, "leaves out messages of 'developer'"),
    "reasoning": ({"prompt": KINDS["reasoning"][0]}, "leaves out reasoning_content"),
    "arguments": (
        {"prompt": [ASKED, says("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]},
        "arguments that are no JSON object",
    ),
    "tools": ({"prompt": KINDS["plain"][0], "tools": "add"}, "'tools' is not a list"),
    "empty": ({"prompt": [ASKED, says("assistant", ""), ASKED, ANSWERED]}, "message is empty"),
    "parts": ({"prompt": [says("user", [{"type": "image"}]), ANSWERED]}, "not a list of messages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_vanish_is_refused_with_its_line(open_data: Open, tmp_path: Path, case: str) -> None:
    value, complaint = REFUSED[case]
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": KINDS["plain"][0]}, value])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{complaint}"):
        open_data(path, needs=Needs("target"), tokenizer=model(tmp_path, "qwen2_5"))


def test_conversations_of_a_preference_have_one_prompt(tmp_path: Path) -> None:
    """Of which a text prompt is the beginning; turns between the prompt and the answers do not vanish."""
    tokenizer = model(tmp_path, "qwen2_5")
    messages = KINDS["turns"][0]
    pair = {"chosen": messages, "rejected": [*messages[:3], says("assistant", "11.")]}
    for more in ({}, {"prompt": ASKED["content"]}, {"prompt": messages[:3]}):
        (record,) = parse(tokenizer, pair | more, "preference")
        assert record.prompt == tokenizer.chat(messages[:3])[0]
        assert text(tokenizer, record.rejected_ids) == "11.<|im_end|>"


def test_an_episode_goes_on_from_what_was_sampled(any_model: Tokenizer) -> None:
    """Also where the template writes earlier answers anew: these stay as they were sampled."""
    end = text(any_model, [any_model.eos_id])
    for role in ("user", "tool"):
        after = any_model.plain(f"<think>\nAnything.\n</think>\n\nGuess 4.{end}")
        read = text(any_model, any_model.reply([says(role, "Higher.")], after))
        assert "Higher." in read
        assert not read.startswith(end)
        assert "an answer" not in read
        cut = text(any_model, any_model.reply([says(role, "Higher.")], after[:-1]))
        assert cut == end + read


def test_a_run_chooses_the_template_and_what_it_is_given(open_data: Open, tmp_path: Path) -> None:
    """A prompt of RL is what the engine gets, as ids; so are those that other processes tokenise."""
    path = byte_tokenizer(tmp_path, CHATML, (CHATML[1],), CHATML[1], published("qwen3"))
    config = ModelConfig(str(path), chat_template_kwargs={"enable_thinking": False})
    tokenizer = model_tokenizer(config)
    assert tokenizer.chat([ASKED])[0].endswith(CLOSED)
    assert learned(tokenizer, {"prompt": [ASKED], "target": "8"}) == [(tokenizer.chat([ASKED])[0], "8<|im_end|>")]
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}")
    other = model_tokenizer(ModelConfig(str(path), chat_template=str(own), chat_template_kwargs={"end": "."}))
    assert other.chat([ASKED])[0] == "What is 3+5?."
    assert len({tokenizer.digest, other.digest, Tokenizer(path).digest}) == 3
    for name in ("a", "b"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": [ASKED]}])
    data = open_data(tmp_path / "*.jsonl", tokenizer=other, workers=2)
    assert prompts(data) == ["What is 3+5?."] * 2


@pytest.mark.parametrize(("name", "complaint"), [("tools", "which a run gives itself"), ("messages", "Leave it out")])
def test_a_template_is_given_nothing_that_a_run_gives(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelConfig("unused", chat_template_kwargs={name: []})


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, CHATML, (CHATML[1],), CHATML[1], None)
    with pytest.raises(DataError, match=r"cannot read the chat template \S+absent\.jinja .*Name a Jinja file"):
        Tokenizer(tmp_path, str(tmp_path / "absent.jinja"))
