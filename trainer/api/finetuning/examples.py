"""The lines of a training file: which of OpenAI's formats they have, what is wrong with them, and their tokens.

    chat          {"messages": [...], "tools": [...]}, for supervised fine-tuning; the assistant's messages are
                  learned, except those of weight 0
    completion    {"prompt": TEXT, "completion": TEXT}, for supervised fine-tuning of models without a chat template
    preference    {"input": {"messages": [...], "tools": [...]}, "preferred_output": [MESSAGE],
                  "non_preferred_output": [MESSAGE]}, for dpo

trainer/data/conversation.py says what is learned of a conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from trainer.algorithms.offline import Dpo
from trainer.api.errors import ApiError
from trainer.batch import Sequence
from trainer.config import DpoConfig
from trainer.data.conversation import joined, text_of
from trainer.data.formats import parsed
from trainer.data.parse import BadRecord
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer

SUPERVISED, PREFERENCE = "supervised", "dpo"  # the methods that read them, by OpenAI's names
NAMED: Final = 20  # bad lines that are named; all are counted
LONGEST_LINE: Final = 1 << 24
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_INPUT: Final = {"messages", "tools", "parallel_tool_calls"}
_OUTPUTS: Final = ("preferred_output", "non_preferred_output")


class Lines:
    """A file's lines by number, without those that are empty. Only where they begin is in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.numbers: list[int] = []  # of each in the file, from 1
        starts, position = [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self.numbers.append(number)
                    starts.append(position)
                position += len(line)
        self._starts = np.array(starts, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> Any:
        """The JSON value of a line. Raises BadRecord."""
        with self._path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return parse(file.readline())


def parse(line: bytes) -> Any:
    """Raises BadRecord when it is no JSON."""
    if len(line) > LONGEST_LINE:
        raise BadRecord(f"it has more than {LONGEST_LINE >> 20} MB: shorten it")
    try:
        return parsed(line)
    except ValueError as error:
        raise BadRecord(f"it is not JSON ({error}): write one object a line") from None


def check_file(path: Path) -> str:
    """The method that all its lines are for. Raises ApiError (400), which names the bad ones."""
    found: dict[str, int] = {}  # the first line of each method
    bad = Bad("the file")
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            count += 1
            try:
                found.setdefault(method_of(parse(line)), number)
            except BadRecord as error:
                bad.add(number, error)
    bad.refuse()
    if not count:
        raise ApiError(400, "the file is empty: write one example a line, as JSON", "invalid_file", "file")
    if len(found) > 1:
        said = ", ".join(f"line {number} is for {method}" for method, number in found.items())
        raise ApiError(400, f"a file has examples of one method alone, but {said}: part them", "invalid_file", "file")
    return next(iter(found))


class Bad:
    """The bad lines of a file: `what` it is called, and the parameter of the request that named it."""

    def __init__(self, what: str, param: str = "file", code: str = "invalid_file") -> None:
        self._what, self._param, self._code = what, param, code
        self._said: list[str] = []
        self.count = 0

    def add(self, number: int, error: BadRecord) -> None:
        self.count += 1
        if len(self._said) < NAMED:
            self._said.append(f"Line {number}: {error}.")

    def refuse(self) -> None:
        """Raises ApiError (400) if there is one."""
        if not self.count:
            return
        more = f" ... and {self.count - NAMED} more." if self.count > NAMED else ""
        lines = "1 line" if self.count == 1 else f"{self.count} lines"
        raise ApiError(
            400, f"{lines} of {self._what} cannot be used. {' '.join(self._said)}{more}", self._code, self._param
        )


def method_of(value: Any) -> str:
    """The method that a line is for. Raises BadRecord."""
    if not isinstance(value, dict):
        raise BadRecord("it is no object: write {...}")
    if "input" in value or any(name in value for name in _OUTPUTS):
        _check_preference(value)
        return PREFERENCE
    if "prompt" in value or "completion" in value:
        _only(value, {"prompt", "completion"})
        for name in ("prompt", "completion"):
            if not isinstance(value.get(name), str) or not value[name]:
                raise BadRecord(f"{name!r} is no text: give one")
        return SUPERVISED
    if "messages" not in value:
        raise BadRecord("it has no 'messages': write {\"messages\": [...]}, or an input with two outputs for dpo")
    _check_input(value)
    messages = value["messages"]
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        raise BadRecord("it has no assistant's message to learn: add one, whose weight is not 0")
    if messages[0]["role"] == "assistant":
        raise BadRecord("it begins with the assistant's message: put the user's before it")
    return SUPERVISED


def _check_preference(value: dict[str, Any]) -> None:
    _only(value, {"input", *_OUTPUTS})
    if not isinstance(value.get("input"), dict):
        raise BadRecord("'input' is no object: write {\"messages\": [...]}")
    _check_input(value["input"])
    for name in _OUTPUTS:
        output = value.get(name)
        if not isinstance(output, list) or len(output) != 1:
            raise BadRecord(f"{name!r} is no list of one message: give one of the assistant")
        _check_message(output[0], name)
        if output[0]["role"] != "assistant":
            raise BadRecord(f"{name!r} is a message of {output[0]['role']!r}: give one of the assistant")
    if text_of(value[_OUTPUTS[0]][0]) == text_of(value[_OUTPUTS[1]][0]) and not value[_OUTPUTS[0]][0].get("tool_calls"):
        raise BadRecord("both outputs are the same: leave the line out")


def _check_input(value: dict[str, Any]) -> None:
    _only(value, _INPUT)
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRecord("'messages' is no list with a message in it: give one")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    tools = value.get("tools")
    if tools is None:
        return
    good = isinstance(tools, list) and all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
        for t in tools
    )
    if not good:
        raise BadRecord('\'tools\' is no list of {"type": "function", "function": {"name": ...}}')


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise BadRecord(f"{where} is no object: write a role and a content")
    role = message.get("role")
    if role not in _ROLES:
        raise BadRecord(f"{where} has the role {role!r}: use one of {', '.join(_ROLES)}")
    if message.get("function_call") is not None:
        raise BadRecord(f"{where} has a function_call: write tool_calls")
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise BadRecord(f"{where} has tool_calls, which the assistant's messages alone may have")
        _check_calls(calls, where)
    if not isinstance(text_of(message), str):
        raise BadRecord(f"{where} has no text: give a content, a text or parts of type text")
    if not text_of(message) and not calls:
        raise BadRecord(f"{where} is empty: give it a content")
    if "weight" in message:
        if role != "assistant":
            raise BadRecord(f"{where} has a weight, which the assistant's messages alone may have: leave it out")
        if isinstance(message["weight"], bool) or message["weight"] not in (0, 1):
            raise BadRecord(f"{where} has the weight {message['weight']!r}: use 0 or 1")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list) or not calls:
        raise BadRecord(f"{where} has tool_calls that are no list of calls")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f"{where} calls a tool without a function and its name")
        try:
            given = function.get("arguments", "")
            good = isinstance(given if isinstance(given, dict) else orjson.loads(given), dict)
        except (ValueError, TypeError):
            good = False
        if not good:
            raise BadRecord(f"{where} calls {function['name']!r} with arguments that are no JSON object in a text")


def _only(value: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(value.keys() - known):
        raise BadRecord(f"it has {unknown[0]!r}, which nothing reads: leave it out")


class Reader:
    """A line to sequences of tokens, at most `longest` each."""

    def __init__(self, tokenizer: Tokenizer, longest: int) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        self._pairs = Dpo(DpoConfig())

    def sequences(self, value: Any) -> list[Sequence]:
        """One or more of a conversation; of a preference two, the preferred one first. Raises BadRecord, DataError."""
        method_of(value)
        try:
            found = self._sequences(value)
        except ValueError as error:
            raise BadRecord(str(error)) from None
        if (most := max(sequence.length for sequence in found)) > self._longest:
            raise BadRecord(f"it has {most} tokens, and the model takes {self._longest}: shorten it")
        return found

    def _sequences(self, value: dict[str, Any]) -> list[Sequence]:
        tokenizer = self._tokenizer
        if "input" in value:
            messages, tools = value["input"]["messages"], value["input"].get("tools")
            (prompt, chosen), (_, rejected) = (tokenizer.turn(messages, value[name][0], tools) for name in _OUTPUTS)
            return self._pairs.sequences([Record(0, "", "", prompt, (), chosen, rejected)], [])
        if "prompt" in value:
            return [Sequence(tokenizer.prompt(value["prompt"]), tokenizer.continuation(value["completion"]))]
        turns = tokenizer.turns(value["messages"], value.get("tools"))
        return [Sequence(prompt, rest, mask=mask) for prompt, rest, mask in joined(turns)]
