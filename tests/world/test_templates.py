"""Chat templates of others: rendered as transformers renders them, and what is learned by them."""

from __future__ import annotations

import functools

import jinja2
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.world import Row, found, rows, templates
from tests.world.kinds import CALL, KINDS, Message
from trainer.data.conversation import THINK, ChatTemplate, normal

LICENCES = {"Apache-2.0", "Apache 2.0 License", "MIT", "The MIT License"}
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def test_the_table_is_what_the_packages_hold() -> None:
    """After a package changes: `python -m tests.world`, and look at what the other tests say of the new ones."""
    listed = rows()
    assert listed == list(found())
    assert {row.licence for row in listed} <= LICENCES
    assert len(listed) >= 80


@functools.cache
def transformers() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), **TOKENS)


@pytest.mark.parametrize("row", templates(), ids=lambda row: row.name)
def test_a_template_is_rendered_as_by_transformers_or_refused_by_both(row: Row) -> None:
    template = ChatTemplate(row.text, TOKENS)
    for kind, (messages, tools) in KINDS.items():
        for go_on in (True, False):
            theirs: str | None
            try:
                theirs = transformers().apply_chat_template(
                    messages, tools, chat_template=row.text, add_generation_prompt=go_on, tokenize=False
                )
            except (jinja2.TemplateError, TypeError):
                theirs = None
            try:
                mine = template.render(messages, tools, go_on=go_on)
            except ValueError:
                mine = None
            assert mine == theirs, kind


@pytest.mark.parametrize("row", templates(), ids=lambda row: row.name)
def test_an_answer_is_learned_whole_behind_its_prompt_or_refused(row: Row) -> None:
    """No thought, call or text of a row vanishes, and a block of thoughts is opened and closed once."""
    template = ChatTemplate(row.text, TOKENS)
    for kind, (messages, tools) in KINDS.items():
        before: list[Message] = []
        for message in map(normal, messages):
            if message["role"] == "assistant":
                try:
                    prompt, answer = template.answer(before, message, tools)
                except ValueError:
                    continue
                for piece in (message["content"], message.get("reasoning_content", "")):
                    assert piece in answer, kind
                assert "tool_calls" not in message or CALL["function"]["name"] in answer
                for asked in before:
                    assert asked["role"] == "assistant" or asked["content"] in prompt, kind
                blocks = THINK.findall(prompt[prompt.rfind(before[-1]["content"]) :] + answer)
                assert blocks in ([], ["<think>", "</think>"]), kind
            before.append(message)


CLOSED, THOUGHT = "<think>\n\n</think>\n\n", "<think>\nCount on from 5.\n</think>\n\n"
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 5}}\n</tool_call>'
# By template and kind of row: what is learned of the first answer.
LEARNED: dict[tuple[str, str], str] = {
    ("llama3", "plain"): "It is 8.<|eot_id|>",
    ("llama3_1", "null"): '{"name": "add", "parameters": {"a": 3, "b": 5}}<|eot_id|>',
    ("qwen2_5", "null"): QWEN_CALL + "<|im_end|>\n",
    ("qwen3", "plain"): CLOSED + "It is 8.<|im_end|>\n",
    ("qwen3", "turns"): CLOSED + "It is 8.<|im_end|>\n",
    ("qwen3", "reasoning"): THOUGHT + "It is 8.<|im_end|>\n",
    ("qwen3", "tools"): CLOSED + QWEN_CALL + "<|im_end|>\n",
    ("qwen3_5_think", "reasoning"): "Count on from 5.\n</think>\n\nIt is 8.<|im_end|>\n",
    ("deepseek_r1_distill", "plain"): "\n</think>\n\nIt is 8.<｜end▁of▁sentence｜>",
    ("deepseek_r1_distill", "reasoning"): "Count on from 5.\n</think>\n\nIt is 8.<｜end▁of▁sentence｜>",
    ("nemotron_3_nano", "plain"): "</think>It is 8.<|im_end|>\n",
    ("nemotron_3_nano", "reasoning"): "Count on from 5.\n</think>\nIt is 8.<|im_end|>\n",
    ("glm4moe", "reasoning"): "\n<think>Count on from 5.</think>\nIt is 8.",
    ("gptoss", "developer"): "<|channel|>final<|message|>It is 8.<|return|>",
    ("gptoss", "tools"): ' to=functions.add<|channel|>commentary json<|message|>{"a": 3, "b": 5}<|call|>',
    ("gptoss", "reasoning"): "<|channel|>analysis<|message|>Count on from 5.<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is 8.<|return|>",
}


REFUSED = {
    ("llama3", "reasoning"): "leaves out reasoning_content",
    ("llama3", "tools"): "leaves out the tools",
    ("qwen2_5", "developer"): "leaves out messages of 'developer'",
    ("qwen3", "developer"): "leaves out messages of 'developer'",
    ("qwen3", "empty"): "is empty",
    ("qwen3_5_nothink", "reasoning"): "elsewhere",
    ("deepseek_r1_distill", "tools"): "leaves out the tools",
}


def first_answer(name: str, kind: str) -> str:
    messages, tools = KINDS[kind]
    template = next(ChatTemplate(row.text, TOKENS) for row in templates() if row.name == name)
    place = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    before, message = list(map(normal, messages[:place])), normal(messages[place])
    return template.answer(before, message, tools)[1]


@pytest.mark.parametrize(("name", "kind"), LEARNED)
def test_what_is_learned(name: str, kind: str) -> None:
    assert first_answer(name, kind) == LEARNED[name, kind]


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_would_vanish_is_refused(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name, kind]):
        first_answer(name, kind)
