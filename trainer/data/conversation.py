"""Conversations as the model's chat template writes them: the prompts, and the answers that are learned behind them.

An answer is learned as the model is asked for it, behind the prompt that the template makes of the messages before it.
A row is refused if the template leaves out a part of it: the model would learn the rest, and no user would see that.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson
from jinja2 import TemplateSyntaxError

from trainer.errors import DataError

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
TOOLS = "tools"  # the key of a row for the tools that the assistant may call
MARK = "[[an answer]]"  # stands for an answer where a template is asked what it writes around one
OPENED, CLOSE = re.compile(r"<think>\s*\Z"), "\n</think>\n\n"
THINK = re.compile(r"</?think>")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names that templates read a message's thoughts by
_ASKED = {"role": "user", "content": "-"}


def text_of(message: Mapping[str, Any]) -> str | None:
    """A message's content; "" where a message that calls tools or thinks has none, None where it is no text."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            return None
        return "".join(part["text"] for part in content)
    if content is None and any(message.get(name) for name in ("tool_calls", *THOUGHTS)):
        return ""
    return content if isinstance(content, str) else None


def normal(message: Mapping[str, Any]) -> Message:
    """As chat templates read a message, and as vLLM gives it to them: the content a text, arguments of calls objects,
    thoughts by each of their names, no nulls. Raises ValueError for what is no message."""
    content = text_of(message)
    if content is None or not isinstance(message.get("role"), str):
        raise ValueError("a message has no role, or a content that is no text")
    found = {name: value for name, value in message.items() if value is not None and name != "weight"}
    found["content"] = content
    if thoughts := next((str(found[name]) for name in THOUGHTS if found.get(name)), ""):
        found |= dict.fromkeys(THOUGHTS, thoughts)
    if calls := found.pop("tool_calls", None):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: Any) -> Message:
    try:
        arguments = call["function"].get("arguments") or {}
        arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(call["function"]["name"], str) or not isinstance(arguments, dict):
            raise TypeError
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError("a call of a tool has no name, or arguments that are no JSON object") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


class ChatTemplate:
    """`source` is Jinja; `variables` are what it may name besides the messages (bos_token, eos_token). Each method
    raises ValueError for messages that the template refuses or leaves out, DataError if it is no template."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self.source, self.variables = source, variables

    def render(self, messages: Sequence[Message], tools: Tools = None, *, go_on: bool = True) -> str:
        """The messages as transformers renders them, and if it is to `go_on` the beginning of the next answer."""
        from transformers.utils.chat_template_utils import render_jinja_template  # takes a second, and few need it

        options = {"chat_template": self.source, "add_generation_prompt": go_on, **self.variables}
        try:
            texts, _ = render_jinja_template([list(messages)], tools=tools, **options)
        except TemplateSyntaxError as error:
            raise DataError(f"the model's chat template cannot be used ({error}). Correct it.") from None
        except Exception as error:  # a template may do anything with what it is given
            raise ValueError(f"the chat template refuses it ({error})") from None
        return str(texts[0])

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Normal messages, up to the beginning of the next answer."""
        text = self._write(messages, tools, go_on=True)
        for place, message in enumerate(messages):
            if message["role"] == "assistant" or message["content"].strip() in text:
                continue
            if self._same(text, [*messages[:place], {**message, "content": MARK}, *messages[place + 1 :]], tools):
                raise ValueError(f"the chat template leaves out messages of {message['role']!r}: use another role")
        names = [str(tool.get("function", tool).get("name")) for tool in tools or ()]
        if not all(name in text for name in names) and self._same(text, messages, None):
            raise ValueError("the chat template leaves out the tools: describe them in a message")
        return text

    def answer(self, before: Sequence[Message], message: Message, tools: Tools = None) -> tuple[str, str]:
        """The prompt of the messages `before`, and what the template writes behind it for the assistant's `message`."""
        prompt = self.prompt(before, tools)
        if not any(message.get(name) for name in ("content", "tool_calls", "reasoning_content")):
            raise ValueError("the assistant's message is empty")
        whole = self._write([*before, message], tools, go_on=False)
        written = whole[len(prompt) :]
        if not whole.startswith(prompt):
            written = self._behind(prompt, whole, [*before, {"role": "assistant", "content": MARK}], tools)
        content, thoughts = message["content"], message.get(THOUGHTS[0], "")
        if not whole.startswith(prompt) and OPENED.search(prompt) and CLOSE.strip() not in written + content:
            written = thoughts.strip("\n") + CLOSE + written
        if thoughts.strip() not in written:
            raise ValueError(f"the chat template leaves out {THOUGHTS[0]}: write it into the content, or leave it out")
        if all(piece.strip() in written for piece in THINK.split(content)):
            return prompt, written
        if "tool_calls" in message:
            raise ValueError("the chat template leaves out what is said beside a call of tools: leave it out")
        return prompt, (re.sub(r"\A\s*<think>\s*", "", content) if OPENED.search(prompt) else content) + self.tail

    def _behind(self, prompt: str, whole: str, marked: Sequence[Message], tools: Tools) -> str:
        """The last message in `whole` where the prompt goes on otherwise than a finished answer begins: with an opened
        block of thoughts, say."""
        opened = OPENED.search(prompt)
        head = prompt[: opened.start()] if opened else self._write(marked, tools, go_on=False).partition(MARK)[0]
        if not (prompt.startswith(head) and whole.startswith(head)):
            raise ValueError("the chat template writes the answer elsewhere than behind its prompt: use another one")
        return re.sub(r"\A\s*<think>\s*", "", whole[len(head) :]) if opened else whole[len(head) :]

    def follow(self, messages: Sequence[Message]) -> str:
        """The text behind an answer: the end of its turn, the normal messages, the beginning of the next."""
        _, found, text = self.prompt([_ASKED, {"role": "assistant", "content": MARK}, *messages]).partition(MARK)
        if not found:
            raise ValueError("the chat template leaves out earlier answers, so that none can be gone on from")
        return text

    @functools.cached_property
    def tail(self) -> str:
        """The text behind the last answer."""
        said = [_ASKED, {"role": "assistant", "content": MARK}]
        try:
            return self.render(said, go_on=False).partition(MARK)[2]
        except ValueError:
            return ""

    def _write(self, messages: Sequence[Message], tools: Tools, *, go_on: bool) -> str:
        """In the first form that has the calls: templates want arguments as objects or as texts, and beside calls an
        empty content or none."""
        if not any("tool_calls" in message for message in messages):
            return self.render(messages, tools, go_on=go_on)
        refused: list[ValueError] = []
        for form in _forms(messages):
            try:
                text = self.render(form, tools, go_on=go_on)
            except ValueError as error:
                refused.append(error)
                continue
            without = [{name: value for name, value in message.items() if name != "tool_calls"} for message in form]
            if not self._same(text, without, tools, go_on=go_on):
                return text
            refused.insert(0, ValueError("the chat template leaves out calls of tools: use another template"))
        raise refused[0]

    def _same(self, text: str, messages: Sequence[Message], tools: Tools, *, go_on: bool = True) -> bool:
        try:
            return self.render(messages, tools, go_on=go_on) == text
        except ValueError:
            return False


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    for empty in ("", None):
        for as_text in (False, True):
            yield [_formed(message, empty, as_text) if "tool_calls" in message else message for message in messages]


def _formed(message: Message, empty: str | None, as_text: bool) -> Message:
    calls = message["tool_calls"]
    if as_text:
        calls = [{**call, "function": {**call["function"], "arguments": _json(call)}} for call in calls]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def _json(call: Message) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


Ids = tuple[int, ...]


def joined(turns: Iterable[tuple[Ids, Ids]]) -> list[tuple[Ids, Ids, tuple[int, ...]]]:
    """(prompt, answer) of each turn as sequences (prompt, rest, mask of what is learned of the rest): one goes on for
    as long as the next prompt begins with it."""
    found: list[tuple[Ids, Ids, tuple[int, ...]]] = []
    for prompt, answer in turns:
        learned = (1,) * len(answer)
        if found and prompt[: len(found[-1][0]) + len(found[-1][1])] == found[-1][0] + found[-1][1]:
            first, rest, mask = found.pop()
            between = prompt[len(first) + len(rest) :]
            found.append((first, rest + between + answer, mask + (0,) * len(between) + learned))
        else:
            found.append((prompt, answer, learned))
    return found
