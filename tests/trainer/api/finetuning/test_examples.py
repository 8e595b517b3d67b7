"""Lines of training files: what is learned of them, and what the bad ones are told; which of them the steps of a job
take, and the gradient of its loss by log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.api.finetuning.client import preferences, sums
from tests.trainer.data.writing import LLAMA, byte_tokenizer, published
from trainer.algorithms.base import REFERENCE_LOGPROBS
from trainer.algorithms.offline import Dpo, Sft
from trainer.api.errors import ApiError
from trainer.api.finetuning.examples import Lines, Reader, check_file, method_of
from trainer.api.finetuning.steps import Plan, derivatives
from trainer.batch import MASK, Sequence, collate
from trainer.config import DpoConfig, SftConfig
from trainer.data.parse import BadRecord
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.tiny_model import write_tiny_model

EOS = 1
TURNS = (
    "{% if tools %}{{ tools | length }}={% endif %}{% for m in messages %}{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}{{ call['function']['arguments']['a'] }}-{% endfor %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def reader(directory: Path) -> Reader:
    """The template writes texts end to end, and ends no turns."""
    return Reader(Tokenizer(directory), 12)


@pytest.fixture
def turns(directory: Path, tmp_path: Path) -> Reader:
    """The template ends the assistant's turns, says how many tools there are, and writes calls."""
    for file in directory.iterdir():
        if "json" in file.suffix:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TURNS)
    return Reader(Tokenizer(tmp_path), 64)


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def learned(reader: Reader, value: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Of each sequence its tokens, and those among them that are learned."""
    found = []
    for s in reader.sequences(value):
        mask = s.mask or (1.0,) * len(s.continuation)
        found.append((s.prompt + s.continuation, [t for t, on in zip(s.continuation, mask, strict=True) if on]))
    return found


def test_the_answer_is_learned_and_ends(reader: Reader) -> None:
    assert learned(reader, sums(1)[0]) == [((3, 13, 3, 14, 3, EOS), [3, EOS])]
    parts = chat(says("user", [{"type": "text", "text": "0+"}, {"type": "text", "text": "0="}]), says("assistant", "0"))
    assert learned(reader, parts) == learned(reader, sums(1)[0])
    assert learned(reader, {"prompt": "0+0=", "completion": "0"}) == learned(reader, sums(1)[0])


def test_a_conversation_is_one_sequence_where_the_prompts_continue_each_other(turns: Reader, reader: Reader) -> None:
    """Where the template writes it anew, each answer is learned behind its own prompt."""
    value = chat(says("user", "1"), says("assistant", "2"), says("user", "3"), says("assistant", "4"))
    assert learned(turns, value) == [((4, 5, EOS, 6, 7, EOS), [5, EOS, 7, EOS])]
    assert learned(reader, value) == [((4, 5, EOS), [5, EOS]), ((4, 5, 6, 7, EOS), [7, EOS])]


def test_messages_of_weight_0_are_read_and_not_learned(turns: Reader) -> None:
    value = chat(
        says("user", "1"), says("assistant", "2", weight=0), says("user", "3"), says("assistant", "4", weight=1)
    )
    assert learned(turns, value) == [((4, 5, EOS, 6, 7, EOS), [7, EOS])]


@pytest.mark.parametrize("arguments", ['{"a": 7}', {"a": 7}], ids=["text", "object"])
def test_calls_of_tools_are_learned_as_the_template_writes_them(turns: Reader, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    value = chat(
        says("user", "1"),
        {"role": "assistant", "tool_calls": [call], "function_call": None},
        says("tool", "8", tool_call_id="c"),
        says("assistant", "9"),
        tools=[tool],
    )
    assert learned(turns, value) == [((4, 14, 4, 10, 15, EOS, 11, 12, EOS), [10, 15, EOS, 12, EOS])]


def test_a_line_of_which_the_template_leaves_something_out_is_a_bad_one(tmp_path: Path) -> None:
    reader = Reader(Tokenizer(byte_tokenizer(tmp_path, LLAMA, (LLAMA[5],), LLAMA[5], published("llama3"))), 1000)
    for value, complaint in (
        (chat(says("user", "1"), says("assistant", "2", reasoning_content="one more")), "leaves out reasoning_content"),
        (
            chat(says("user", "1"), says("assistant", "2"), tools=[{"function": {"name": "add"}}]),
            "leaves out the tools",
        ),
    ):
        with pytest.raises(BadRecord, match=complaint):
            reader.sequences(value)


def test_a_preference_has_two_answers_to_one_prompt(reader: Reader) -> None:
    chosen, rejected = reader.sequences(preferences()[2])
    assert (chosen.prompt, chosen.continuation, rejected.continuation) == ((5, 13, 4, 14), (6, EOS), (7, EOS))
    assert rejected.prompt == chosen.prompt


def test_a_line_is_as_long_as_the_model_takes(reader: Reader) -> None:
    fits = chat(says("user", "1" * 10), says("assistant", "2"))
    assert reader.sequences(fits)[0].length == 12
    with pytest.raises(BadRecord, match="13 tokens, and the model takes 12: shorten it"):
        reader.sequences(chat(says("user", "1" * 11), says("assistant", "2")))


def test_a_model_without_a_template_takes_prompts(directory: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    plain = Reader(Tokenizer(tmp_path), 64)
    assert plain.sequences({"prompt": "1=", "completion": "1"})
    with pytest.raises(DataError, match=r"Add chat_template.jinja"):
        plain.sequences(sums(1)[0])


BROKEN_CALL = {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ([], "write {...}"),
        ({}, "it has no 'messages'"),
        (chat(), "no list with a message"),
        (chat("hello"), "messages[0] is no object"),
        (chat(says("robot", "1")), "use one of system, developer, user, assistant, tool"),
        (chat(says("user", None), says("assistant", "1")), "messages[0] has no text"),
        (chat(says("user", [{"type": "image_url"}]), says("assistant", "1")), "parts of type text"),
        (chat(says("user", "1"), says("assistant", "")), "messages[1] is empty"),
        (chat(says("user", "1")), "no assistant's message to learn"),
        (chat(says("user", "1"), says("assistant", "2", weight=0)), "whose weight is not 0"),
        (chat(says("user", "1"), says("assistant", "2", weight=0.5)), "use 0 or 1"),
        (chat(says("user", "1", weight=1), says("assistant", "2")), "leave it out"),
        (chat(says("assistant", "2")), "put the user's before it"),
        (chat(says("user", "1"), says("assistant", "2"), extra=1), "'extra', which nothing reads"),
        (chat(says("user", "1"), says("assistant", "2"), tools=["add"]), "'tools' is no list"),
        (chat(says("user", "1"), says("assistant", "2", function_call={})), "write tool_calls"),
        (chat(says("user", "1"), says("assistant", None, tool_calls=[{}])), "without a function"),
        (chat(says("user", "1"), says("assistant", None, tool_calls=[BROKEN_CALL])), "no JSON object in a text"),
        ({"prompt": "1"}, "'completion' is no text"),
        (preferences()[0] | {"input": []}, "'input' is no object"),
        (preferences()[0] | {"preferred_output": []}, "'preferred_output' is no list of one message"),
        (preferences()[0] | {"non_preferred_output": [says("user", "1")]}, "give one of the assistant"),
        (preferences()[0] | {"non_preferred_output": preferences()[0]["preferred_output"]}, "leave the line out"),
    ],
)
def test_a_bad_line_is_told_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(BadRecord) as raised:
        method_of(value)
    assert advice in str(raised.value)


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    return path


def refuses(match: str | None = None) -> pytest.RaisesExc[ApiError]:
    return pytest.raises(ApiError, match=match, check=lambda error: error.status == 400)


def test_a_file_names_its_bad_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "f", [sums(1)[0], "{", "", chat(says("user", "1"))])
    with refuses() as raised:
        check_file(path)
    said = str(raised.value)
    assert said.startswith("2 lines of the file cannot be used. Line 2: it is not JSON")
    assert "Line 4: it has no assistant's message" in said
    assert (raised.value.code, raised.value.param) == ("invalid_file", "file")
    with refuses(match=r"^25 lines .* Line 20: .* \.\.\. and 5 more\.$"):
        check_file(write(tmp_path / "g", ["{"] * 25))


def test_a_file_is_for_one_method(tmp_path: Path) -> None:
    assert check_file(write(tmp_path / "f", sums())) == "supervised"
    assert check_file(write(tmp_path / "f", preferences())) == "dpo"
    with refuses(match="line 1 is for supervised, line 2 is for dpo: part them"):
        check_file(write(tmp_path / "f", [sums()[0], preferences()[0]]))
    with refuses(match="the file is empty"):
        check_file(write(tmp_path / "f", ["", " "]))


def test_lines_are_read_by_their_place_and_named_by_their_number(tmp_path: Path) -> None:
    lines = Lines(write(tmp_path / "f", ["", *sums(2), "", sums(3)[2]]))
    assert [lines.read(i) for i in range(len(lines))] == sums(3)
    assert list(lines.numbers) == [2, 3, 5]


def test_the_gradient_of_supervised_is_one_by_the_learned_tokens() -> None:
    fields = collate([Sequence((1, 2), (3, 4, 5), mask=(1.0, 0.0, 1.0)), Sequence((1,), (2,))])
    measured, weights_BT = derivatives(Sft(SftConfig()), torch.full_like(fields[MASK], -2.0), fields)
    assert measured["loss"] == pytest.approx(2.0)
    assert torch.equal(weights_BT, torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]) / 3)


def test_the_gradient_of_preferences_is_the_losss() -> None:
    """Two pairs of other lengths, against finite differences."""
    pairs = [Sequence((1, 2), (3,) * n, together=pair) for pair, n in ((0, 2), (0, 4), (1, 3), (1, 1))]
    draw, fields, dpo = torch.Generator().manual_seed(1), collate(pairs), Dpo(DpoConfig(beta=0.7))
    fields = {name: values.double() for name, values in fields.items()}
    policy_BT, fields[REFERENCE_LOGPROBS] = (-torch.rand(4, 5, generator=draw, dtype=torch.double) for _ in range(2))
    measured, weights_BT = derivatives(dpo, policy_BT, fields)
    assert set(measured) >= {"loss", "preference_accuracy", "reward_margin"}
    for place in range(policy_BT.numel()):
        nudged = policy_BT.clone()
        nudged.view(-1)[place] += 1e-6
        slope = (derivatives(dpo, nudged, fields)[0]["loss"] - measured["loss"]) / 1e-6
        assert -slope == pytest.approx(float(weights_BT.reshape(-1)[place]), abs=1e-5)
    assert weights_BT[fields[MASK] == 0].abs().max() == 0


def test_each_epoch_takes_every_example_once_in_an_order_of_its_own() -> None:
    plan = Plan(rows=7, epochs=3, batch=3, learning_rate=0.9, seed=4)
    assert (plan.steps_per_epoch, plan.steps) == (3, 9)
    taken = [plan.of_step(step) for step in range(plan.steps)]
    epochs = [[row for rows, _ in taken[first : first + 3] for row in rows] for first in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [rate for _, rate in taken] == pytest.approx([0.1 * left for left in range(9, 0, -1)])


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(sums(1)[0]).encode() + b"\r\n")
    assert check_file(tmp_path / "a.jsonl") == "supervised"
    assert Lines(tmp_path / "a.jsonl").read(0) == sums(1)[0]
