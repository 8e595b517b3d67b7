"""One raw record, as it is in a file, to token ids."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from trainer.config import FileData
from trainer.config.datasets import PROMPT, TARGET
from trainer.data import layouts
from trainer.data.conversation import TOOLS, Message, joined, normal, text_of
from trainer.data.records import Learns, Record
from trainer.data.tokenizer import Tokenizer

_MISSING = object()
Answer = str | list[Message] | None


class BadRecord(ValueError):
    """A record that cannot be used; the message says why."""


class Needs(msgspec.Struct, frozen=True):
    """The needs of a run in each record that it trains on: what it `learns`, in sequences of at most `longest`
    tokens, which together fill at most a `row`."""

    learns: Learns = "samples"
    longest: int | None = None
    row: int | None = None

    def check(self, record: Tokenised) -> None:
        """Raises BadRecord."""
        wanted = {"target": [record.target_ids], "preference": [record.chosen_ids, record.rejected_ids]}
        answers = wanted.get(self.learns)
        if answers is not None and not all(answers):
            keys = "data.target_key names its key" if self.learns == "target" else "it needs two answers"
            raise BadRecord(f"it has no {self.learns} to learn: {keys}")
        lengths = [len(record.prompt_ids) + len(ids) for ids in answers or [(0,)]]  # a sample has a token at least
        if self.longest is not None and max(lengths) > self.longest:
            raise BadRecord(f"it has {max(lengths)} tokens, and the model takes {self.longest}")
        if self.row is not None and sum(lengths) > self.row:
            raise BadRecord(f"it has {sum(lengths)} tokens, and a row takes {self.row} (packing.max_tokens)")


ANY = Needs()


class Tokenised(msgspec.Struct, array_like=True):
    """A record as the cache keeps it: the fields of Record behind its index, in their order."""

    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    extra: dict[str, Any]
    messages: tuple[dict[str, Any], ...] = ()
    mask: tuple[int, ...] = ()
    alternatives: tuple[str, ...] = ()
    chosen_mask: tuple[int, ...] = ()
    rejected_mask: tuple[int, ...] = ()

    def record(self, index: int) -> Record:
        return Record(index, *msgspec.structs.astuple(self))

    @property
    def tokens(self) -> int:
        """How many tokens the prompt has with its longest continuation."""
        return len(self.prompt_ids) + max(len(self.target_ids), len(self.chosen_ids), len(self.rejected_ids))


class Parser:
    """Reads records by the configuration's keys. Raises BadRecord for one that cannot be used."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs) -> None:
        self._config, self._tokenizer, self._needs = config, tokenizer, needs

    def __call__(self, value: Any) -> list[Tokenised]:
        """One; of a conversation that is learned as many as there are sequences in it. None of a record of more tokens
        than `max_length`: left out on request, so no fault of the data."""
        if not isinstance(value, dict):
            raise BadRecord("it is not an object")
        try:
            found = self._records(value)
        except ValueError as error:
            raise BadRecord(str(error)) from None
        for record in found:
            if not record.prompt_ids:
                raise BadRecord("the prompt has no tokens")
            if self._config.max_length is not None and record.tokens > self._config.max_length:
                return []
            self._needs.check(record)
        return found

    def _records(self, value: dict[str, Any]) -> list[Tokenised]:
        c, learned = self._config, self._needs.learns == "target"
        key, target_key = layouts.keys(value, c)
        if c.prompt_key == PROMPT:
            layouts.check(value, learned=learned and c.target_key == TARGET)
        prompt = layouts.instruction(value) if key == layouts.INSTRUCTION else find(value, key)
        target, chosen, rejected = (self._answer(value, name) for name in (target_key, c.chosen_key, c.rejected_key))
        if (chosen is None) != (rejected is None):
            raise BadRecord(f"it has only one of {c.chosen_key!r} and {c.rejected_key!r}")
        absent = prompt is _MISSING or prompt is None
        text = value.get(layouts.TEXT)
        alone = (absent and key == PROMPT) or key == layouts.TEXT
        if learned and alone and (target is None or target_key == layouts.TEXT) and isinstance(text, str):
            return [self._of_text(value, text)]
        if chosen and rejected and (absent or not (layouts.is_answer(chosen) and layouts.is_answer(rejected))):
            prompt, chosen, rejected = self._implied(chosen, rejected)
        elif absent:
            keys = f", but {', '.join(value)}: name the prompt's key in data.prompt_key" if value else ""
            raise BadRecord(f"it has no {key!r}{keys}")
        before = layouts.before(value, prompt if isinstance(prompt, list) else []) if key in layouts.PROMPTS else []
        if isinstance(prompt, list):
            messages = _messages([*before, *prompt], key)
        elif not isinstance(prompt, str):
            raise BadRecord(f"{key!r} is not a text")
        elif c.chat_template or before or any(isinstance(answer, list) for answer in (target, chosen, rejected)):
            messages = _messages([*before, {"role": "user", "content": prompt}], key)
        else:
            return [self._of_texts(value, prompt, *(_last(answer) for answer in (target or None, chosen, rejected)))]
        start = len(messages) if target else 0
        if not target and messages and messages[-1].get("role") == "assistant":
            messages, target = messages[:-1], messages[-1:]
        if not messages:
            raise BadRecord("the prompt has no messages")
        return self._of_messages(value, messages, start, target, chosen, rejected)

    def _implied(self, *answers: str | list[Message]) -> tuple[str | list[Message], ...]:
        """The prompt that two answers begin with, and what follows it in each."""
        names = f"{self._config.chosen_key!r} and {self._config.rejected_key!r}"
        found = layouts.parted(*answers)
        if not found[0] or len({type(answer) for answer in answers}) > 1:
            raise BadRecord(f"{names} do not begin with the same messages")
        if not all(layouts.is_answer(answer) for answer in found[1:]):
            raise BadRecord(f"{names} part at a message that is not the assistant's")
        return found

    def _of_text(self, value: dict[str, Any], text: str) -> Tokenised:
        """All of it is learned behind its first token: the tokenizer's BOS, where it has one."""
        ids = (*self._tokenizer.prompt(text), self._tokenizer.eos_id)
        return Tokenised("", "", ids[:1], ids[1:], (), (), self._extra(value))

    def _of_texts(self, value: dict[str, Any], prompt: str, *answers: str | None) -> Tokenised:
        target, chosen, rejected = (() if text is None else self._tokenizer.continuation(text) for text in answers)
        (expected, *others), ids = self._expected(value, answers[0] or ""), self._tokenizer.prompt(prompt)
        extra = self._extra(value)
        return Tokenised(prompt, expected, ids, target, chosen, rejected, extra, alternatives=tuple(others))

    def _of_messages(
        self,
        value: dict[str, Any],
        messages: list[Message],
        start: int,
        target: Answer,
        chosen: Answer,
        rejected: Answer,
    ) -> list[Tokenised]:
        """`start` is the place of the first message that may be learned."""
        tools, turn = self._tools(value), self._tokenizer.turn
        whole = [*messages, *_said(target)]
        text, ids = self._tokenizer.chat(whole[:-1] if target else messages, tools)
        (expected, *others), extra = self._expected(value, _last(target) or ""), self._extra(value)
        said = tuple(normal(m) for m in messages)
        found = Tokenised(text, expected, ids, (), (), (), extra, said, alternatives=tuple(others))
        if chosen and rejected and self._needs.learns != "target":
            found.chosen_ids, found.chosen_mask = self._of_answer(messages, _said(chosen), tools)
            found.rejected_ids, found.rejected_mask = self._of_answer(messages, _said(rejected), tools)
        elif target and self._needs.learns != "target":
            found.target_ids = turn(whole[:-1], whole[-1], tools)[1]
        elif target:
            sequences = joined(self._tokenizer.turns(whole, tools, start))
            return [
                msgspec.structs.replace(found, prompt_ids=prompt, target_ids=rest, mask=mask if 0 in mask else ())
                for prompt, rest, mask in sequences
            ] or [found]
        return [found]

    def _of_answer(
        self, messages: list[Message], answer: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its tokens, of one turn or several, and which of them are learned, empty for all."""
        sequences = joined(self._tokenizer.turns([*messages, *answer], tools, len(messages)))
        if len(sequences) != 1:
            raise BadRecord("the chat template writes the turns of an answer apart: give answers of one turn")
        _, ids, mask = sequences[0]
        return ids, mask if 0 in mask else ()

    def _answer(self, value: dict[str, Any], key: str) -> Answer:
        found = find(value, key)
        if found is _MISSING or found is None:
            return None
        if isinstance(found, list | dict):
            return _messages(found if isinstance(found, list) else [found], key)
        if not isinstance(found, str):
            raise BadRecord(f"{key!r} is not a text")
        return found

    def _tools(self, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        found = value.get(TOOLS)
        try:
            tools = orjson.loads(found) if isinstance(found, str) and found else found
        except ValueError:
            tools = found
        if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise BadRecord(f"{TOOLS!r} is not a list of objects, nor one as JSON in a text")
        named = [{"type": "function", "function": t} if "name" in t and "type" not in t else t for t in tools or ()]
        return named or None

    def _expected(self, value: dict[str, Any], target: str) -> list[str]:
        """All that are right, at least one."""
        key = layouts.GROUND_TRUTH if layouts.of_verl(value, self._config) else self._config.answer_key
        found = find(value, key)
        if found is _MISSING or found is None:
            return [target]
        answers = found if isinstance(found, list) else [found]
        texts = [a for a in answers if isinstance(a, str | int | float) and not isinstance(a, bool) and a == a]
        if not texts or len(texts) < len(answers):  # NaN is none
            raise BadRecord(f"{key!r} is not a text, nor a list of texts")
        return list(map(str, texts))

    def _extra(self, value: dict[str, Any]) -> dict[str, Any]:
        extra = value.get("extra") or {}
        if not isinstance(extra, dict):
            raise BadRecord("'extra' is not an object")
        named = {key: find(value, key) for key in self._config.extra_keys}
        if absent := [key for key, found in named.items() if found is _MISSING]:
            raise BadRecord(f"{absent[0]!r} is missing")
        if layouts.of_verl(value, self._config):
            extra = {key: value[key] for key in layouts.OF_VERL if key in value} | extra
        return {**extra, **named}


def find(value: dict[str, Any], key: str) -> Any:
    """The value under a key, or under a path of keys `a.b`."""
    if key in value:
        return value[key]
    found: Any = value
    for part in key.split("."):
        found = found.get(part, _MISSING) if isinstance(found, dict) else _MISSING
    return found


def _messages(value: list[Any], key: str) -> list[Message]:
    value = [layouts.message(m) for m in value]
    good = all(isinstance(m, dict) and text_of(m) is not None and isinstance(m.get("role"), str) for m in value)
    if not value or not good:
        raise BadRecord(f"{key!r} is not a list of messages with a role and a content")
    return value


def _said(answer: Answer) -> list[Message]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) and answer else list(answer or ())


def _last(answer: Answer) -> str | None:
    return text_of(answer[-1]) if isinstance(answer, list) else answer
