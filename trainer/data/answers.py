"""The log of answers that a gateway keeps (docs/feedback.md), as records of a data set.

A line that gives nothing to learn is left out in silence: it is feedback, or no filter lets it through, or nobody has
said anything of it. One that would, and cannot be used, is a bad record. Feedback, and the other answers to a prompt,
may be in any segment of the log, so a worker reads all of them once before it reads its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

from trainer.config import AnswersData, FileData
from trainer.data.formats import Bad, Format, Raw, Unit
from trainer.data.parse import BadRecord
from trainer.data.storage import File, find_files, opened
from trainer.errors import DataError

FORMAT = 1  # of the log's records
CUT = frozenset({"length", "max_tokens", "max_output_tokens"})  # finish reasons of answers that reached their limit
Key = tuple[str, str, str]  # id of an answer, and name and id of the key that got it
Said = str | list[dict[str, Any]]  # an answer: its text, or where it calls tools its message


class AnswerLog(Format):
    """The format."""

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        """Raises DataError for a file of something else."""
        assert isinstance(config, AnswersData)
        files = find_files(config.pattern(unit.url.rpartition("/")[0]))
        index = _index(tuple(files), config)
        for record in _lines(unit.url):
            yield index.learnt(record) if record["record"] == "answer" else None


@dataclass
class _Index:
    """The feedback of the whole log. `liked`: of each prompt, the score of the answer that was liked best, and the
    answer. `first`: of each prompt, the first answer."""

    config: AnswersData
    said: dict[Key, dict[str, Any]] = field(default_factory=dict)
    liked: dict[int, tuple[float, Said]] = field(default_factory=dict)
    first: dict[int, Key] = field(default_factory=dict)

    def learnt(self, record: dict[str, Any]) -> Raw:
        """The record of a data set that this answer gives, None if it gives none."""
        said = self.said.get(_key(record))
        if not self._wanted(record, said):
            return None
        try:
            found = self._learnt(record, said)
        except BadRecord as error:
            return Bad(str(error))
        if found is None:
            return None
        about = record["about"]
        extra = {
            "answer_id": record["id"],
            "weight_version": about["first_version"],
            "score": (said or {}).get("score"),
        }
        return {**found, "metadata": record["metadata"], "extra": extra}

    def _learnt(self, record: dict[str, Any], said: dict[str, Any] | None) -> dict[str, Any] | None:
        if self.config.learn == "prompts":
            asked = _asked(record, 0)
            return asked if self.first[_digest(asked)] == _key(record) else None
        if said is None:
            return None
        correction = said.get("correction")
        if self.config.learn == "corrections":
            return {**_asked(record, said["choice"]), "target": _corrected(correction)} if correction else None
        chosen: Said
        asked = _asked(record, said["choice"])
        if correction:
            chosen = _corrected(correction)
        elif _is_down(said):
            _, chosen = self.liked.get(_digest(asked), (0.0, ""))
        else:
            return None
        rejected = _said(_choice(record, said))
        if not chosen or chosen == rejected:
            return None
        return {**asked, "chosen": chosen, "rejected": rejected}

    def take(self, record: dict[str, Any]) -> None:
        """Notes an answer, after all feedback is known."""
        said = self.said.get(_key(record))
        if not self._wanted(record, said, of_pair=True):
            return
        try:
            if self.config.learn == "prompts" and self._wanted(record, said):
                self.first.setdefault(_digest(_asked(record, 0)), _key(record))
            elif self.config.learn == "preferences" and said is not None and _is_up(said):
                choice, prompt = _choice(record, said), _digest(_asked(record, said["choice"]))
                whole = choice["finish_reason"] is not None and choice["finish_reason"] not in CUT
                if whole and said["score"] > self.liked.get(prompt, (0.0, ""))[0]:
                    self.liked[prompt] = (said["score"], _said(choice))
        except BadRecord:
            return  # it is named where it is read

    def _wanted(self, record: dict[str, Any], said: dict[str, Any] | None, *, of_pair: bool = False) -> bool:
        """`of_pair`: it may be the other half of a pair, whatever its rating."""
        c, about = self.config, record["about"]
        low, high = c.min_version or 0, c.max_version
        if c.keys and not {about["key"], about["key_id"]} & set(c.keys):
            return False
        if not ((c.since or 0.0) <= about["ended"] and (c.until is None or about["ended"] < c.until)):
            return False
        if (c.min_version, high) != (None, None) and not any(
            low <= version and (high is None or version <= high) for version in _versions(record)
        ):
            return False
        if c.rating is None or of_pair:
            return True
        return said is not None and (_is_down(said) if c.rating == "down" else _is_up(said))


@functools.lru_cache(maxsize=2)
def _index(files: tuple[File, ...], config: AnswersData) -> _Index:
    index = _Index(config)
    for file in files:
        for record in _lines(file.url):
            if record["record"] == "feedback":
                at = _key(record)
                if at not in index.said or index.said[at]["time"] <= record["time"]:
                    index.said[at] = record
    if config.learn != "corrections":
        for file in files:
            for record in _lines(file.url):
                if record["record"] == "answer":
                    index.take(record)
    return index


def _lines(url: str) -> Iterator[dict[str, Any]]:
    """The records. Raises DataError for what is none."""
    with opened(url) as stream:
        for number, line in enumerate(stream, 1):
            try:
                record = orjson.loads(line)
                kind, version = record["record"], record["format"]
            except (ValueError, TypeError, LookupError):
                kind, version = None, None
            if kind not in ("answer", "feedback"):
                raise DataError(f"{url}, line {number}: no record of a gateway's log of answers. Name such a log.")
            if version != FORMAT:
                raise DataError(
                    f"{url}, line {number}: format {version} of the log, and {FORMAT} is known here. Use one release."
                )
            yield record


def _key(record: dict[str, Any]) -> Key:
    owner = record.get("about") or record
    return record["id"], owner["key"], owner["key_id"]


def _versions(record: dict[str, Any]) -> set[int]:
    found = {span["version"] for choice in record["choices"] for span in choice["weight_versions"]}
    about = record["about"]
    return found | {version for version in (about["first_version"], about["last_version"]) if version is not None}


def _is_up(said: dict[str, Any]) -> bool:
    return said["score"] is not None and said["score"] > 0.5


def _is_down(said: dict[str, Any]) -> bool:
    return said["score"] is not None and said["score"] < 0.5


def _choice(record: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    for choice in record["choices"]:
        if choice["index"] == said["choice"]:
            found: dict[str, Any] = choice
            return found
    raise BadRecord(f"it was rated in choice {said['choice']}, and has no such choice")


def _said(choice: dict[str, Any]) -> Said:
    """An answer, as the log has it."""
    calls = choice["tool_calls"]
    return [{"role": "assistant", "content": choice["text"], "tool_calls": calls}] if calls else str(choice["text"])


def _corrected(correction: Any) -> Said:
    given = correction if isinstance(correction, dict) else {"content": correction}
    text = given.get("content") or ""
    if not isinstance(text, str) or not (text or given.get("tool_calls")):
        raise BadRecord("the correction has no text, and calls no tool")
    return _said({"text": text, "tool_calls": given.get("tool_calls") or []})


def _asked(record: dict[str, Any], choice: int) -> dict[str, Any]:
    """The prompt of a choice, a text or messages, and the tools that the answer could call."""
    tools = {"tools": [_tool(tool) for tool in record["tools"]]} if record["tools"] else {}
    if record["messages"]:
        return {"prompt": [part for message in record["messages"] for part in _messages(message)], **tools}
    prompt = record["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        samples = record["parameters"].get("n") or 1
        prompt = prompt[min(choice // samples, len(prompt) - 1)]
    if not isinstance(prompt, str):
        raise BadRecord("the prompt is token ids, of which the log has no text")
    return {"prompt": prompt, **tools}


def _tool(tool: Any) -> dict[str, Any]:
    """A function in OpenAI's form, out of that of any route: /v1/responses has its fields in the tool itself, and
    /v1/messages names its parameters `input_schema`."""
    given = tool.get("function", tool) if isinstance(tool, dict) else {}
    if not isinstance(given.get("name"), str) or tool.get("type", "function") not in ("function", "custom"):
        raise BadRecord("the request has a tool that is no function, and no chat template describes it")
    schema = given.get("parameters") or given.get("input_schema") or {"type": "object", "properties": {}}
    about = {"description": given["description"]} if given.get("description") else {}
    return {"type": "function", "function": {"name": given["name"], **about, "parameters": schema}}


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as a data set has it. One of /v1/messages may bring results of tools, which come before its text."""
    content, calls = message.get("content"), list(message.get("tool_calls") or ())
    texts, results = [content] if isinstance(content, str) else [], list[dict[str, Any]]()
    for part in content if isinstance(content, list) else ():
        if part.get("type") == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif part.get("type") == "tool_result":
            (result,) = _messages({"role": "tool", "content": part.get("content") or ""})
            results.append({**result, "tool_call_id": part.get("tool_use_id")})
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise BadRecord("a message has more than text and calls of tools (images), which a run does not render")
    if not (texts or calls or results):
        raise BadRecord("a message has no text, and calls no tool")
    known = {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    said = {"role": message["role"], "content": "".join(texts), **known, **({"tool_calls": calls} if calls else {})}
    return [*results, said] if texts or calls else results


def _digest(asked: dict[str, Any]) -> int:
    return xxhash.xxh3_64_intdigest(orjson.dumps(asked))
