"""One raw record, as it is in a file, to token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.config import FileData
from trainer.data.records import Learns, Record
from trainer.data.tokenizer import Tokenizer

_MISSING = object()


class BadRecord(ValueError):
    """A record that cannot be used; the message says why."""


class TooLong(BadRecord):
    """A record of more tokens than `max_length`: left out on request, so no fault of the data."""


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
            raise BadRecord(f"it has no {self.learns} to learn")
        lengths = [len(record.prompt_ids) + len(ids) for ids in answers or [(0,)]]  # a sample has a token at least
        if self.longest is not None and max(lengths) > self.longest:
            raise BadRecord(f"it has {max(lengths)} tokens, and the model takes {self.longest}")
        if self.row is not None and sum(lengths) > self.row:
            raise BadRecord(f"it has {sum(lengths)} tokens, and a row takes {self.row} (packing.max_tokens)")


ANY = Needs()


class Tokenised(msgspec.Struct, array_like=True):
    """A record as the cache keeps it; see Record."""

    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    extra: dict[str, Any]
    messages: tuple[dict[str, Any], ...] = ()

    def record(self, index: int) -> Record:
        return Record(
            index,
            self.prompt,
            self.answer,
            self.prompt_ids,
            self.target_ids,
            self.chosen_ids,
            self.rejected_ids,
            self.extra,
            self.messages,
        )

    @property
    def tokens(self) -> int:
        """How many tokens the prompt has with its longest continuation."""
        return len(self.prompt_ids) + max(len(self.target_ids), len(self.chosen_ids), len(self.rejected_ids))


class Parser:
    """Reads records by the configuration's keys. Raises BadRecord for one that cannot be used."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs) -> None:
        self._config, self._tokenizer, self._needs = config, tokenizer, needs

    def __call__(self, value: Any) -> Tokenised:
        c = self._config
        if not isinstance(value, dict):
            raise BadRecord("it is not an object")
        prompt, target = self._prompt_and_target(value)
        chosen, rejected = (self._answer_text(value, key) for key in (c.chosen_key, c.rejected_key))
        if (chosen is None) != (rejected is None):
            raise BadRecord(f"it has only one of {c.chosen_key!r} and {c.rejected_key!r}")
        text, ids = self._tokenise_prompt(prompt)
        encode = self._tokenizer.continuation
        result = Tokenised(
            prompt=text,
            answer=self._expected(value, target),
            prompt_ids=ids,
            target_ids=encode(target) if target else (),
            chosen_ids=() if chosen is None else encode(chosen),
            rejected_ids=() if rejected is None else encode(rejected),
            extra=self._extra(value),
            messages=() if isinstance(prompt, str) else tuple(prompt),
        )
        if c.max_length is not None and result.tokens > c.max_length:
            raise TooLong(f"it has {result.tokens} tokens, more than max_length")
        self._needs.check(result)
        return result

    def _prompt_and_target(self, value: dict[str, Any]) -> tuple[str | list[dict[str, Any]], str]:
        c = self._config
        prompt, target = find(value, c.prompt_key), self._answer_text(value, c.target_key) or ""
        if (prompt is _MISSING or prompt is None) and isinstance(chosen := find(value, c.chosen_key), list):
            messages, rejected = _messages(chosen, c.chosen_key), find(value, c.rejected_key)
            if not isinstance(rejected, list) or rejected[:-1] != messages[:-1]:
                raise BadRecord(f"{c.chosen_key!r} and {c.rejected_key!r} do not begin with the same messages")
            return messages[:-1], target
        if isinstance(prompt, list):
            messages = _messages(prompt, c.prompt_key)
            if not target and messages[-1].get("role") == "assistant":
                return messages[:-1], messages[-1]["content"]
            return messages, target
        if not isinstance(prompt, str):
            raise BadRecord(f"{c.prompt_key!r} is not a text")
        return ([{"role": "user", "content": prompt}] if c.chat_template else prompt), target

    def _tokenise_prompt(self, prompt: str | list[dict[str, Any]]) -> tuple[str, tuple[int, ...]]:
        try:
            text, ids = (prompt, self._tokenizer.prompt(prompt)) if isinstance(prompt, str) else self._chat(prompt)
        except ValueError as error:
            raise BadRecord(str(error)) from None
        if not ids:
            raise BadRecord("the prompt has no tokens")
        return text, ids

    def _chat(self, messages: list[dict[str, Any]]) -> tuple[str, tuple[int, ...]]:
        if not messages:
            raise BadRecord("the prompt has no messages")
        return self._tokenizer.chat(messages)

    def _answer_text(self, value: dict[str, Any], key: str) -> str | None:
        found = find(value, key)
        if found is _MISSING or found is None:
            return None
        if isinstance(found, list):
            found = _messages(found, key)[-1]["content"]
        if not isinstance(found, str):
            raise BadRecord(f"{key!r} is not a text")
        return found

    def _expected(self, value: dict[str, Any], target: str) -> str:
        key = self._config.answer_key
        found = find(value, key)
        if found is _MISSING or found is None:
            return target
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            return str(found)
        if not isinstance(found, str):
            raise BadRecord(f"{key!r} is not a text")
        return found

    def _extra(self, value: dict[str, Any]) -> dict[str, Any]:
        extra = value.get("extra") or {}
        if not isinstance(extra, dict):
            raise BadRecord("'extra' is not an object")
        named = {key: find(value, key) for key in self._config.extra_keys}
        if absent := [key for key, found in named.items() if found is _MISSING]:
            raise BadRecord(f"{absent[0]!r} is missing")
        return {**extra, **named}


def find(value: dict[str, Any], key: str) -> Any:
    """The value under a key, or under a path of keys `a.b`."""
    if key in value:
        return value[key]
    found: Any = value
    for part in key.split("."):
        found = found.get(part, _MISSING) if isinstance(found, dict) else _MISSING
    return found


def _messages(value: list[Any], key: str) -> list[dict[str, Any]]:
    good = all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in value)
    if not value or not good:
        raise BadRecord(f"{key!r} is not a list of messages with a role and a content")
    return value
