"""The log read again: records, answers joined with what was said of them, and rows of JSON lines or Parquet.

A reader sees closed segments alone. Feedback is joined by the answer's id and key; the last one counts.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import fsspec
import msgspec

from server.answers.feedback import Feedback
from server.answers.log import Folder
from server.answers.parse import FORMAT, Answer, Choice
from server.errors import ConfigError

BATCH_ROWS = 256
Rating = Literal["up", "down", "none"]


@dataclass(frozen=True)
class Wanted:
    """A choice of answers; None leaves a field open. Times are unix seconds, `key` is a name or an id, and a version
    counts where it wrote any of the answer. A `rating` is up above a score of one half and down below it."""

    key: str | None = None
    since: float | None = None
    until: float | None = None
    min_version: int | None = None
    max_version: int | None = None
    rating: Rating | None = None

    def allows(self, answer: Answer, said: Feedback | None) -> bool:
        """Whether this one is wanted."""
        about = answer.about
        if self.key is not None and self.key not in (about.key, about.key_id):
            return False
        if (self.since is not None and about.ended < self.since) or (
            self.until is not None and about.ended >= self.until
        ):
            return False
        if self.min_version is not None or self.max_version is not None:
            low, high = self.min_version or 0, self.max_version
            if not any(low <= v and (high is None or v <= high) for v in versions(answer)):
                return False
        return self.rating is None or self.rating == rating_of(said)


def versions(answer: Answer) -> list[int]:
    """Those that wrote some of it, in ascending order."""
    found = {span.version for choice in answer.choices for span in choice.weight_versions}
    return sorted(found | {v for v in (answer.about.first_version, answer.about.last_version) if v is not None})


def rating_of(said: Feedback | None) -> Rating | None:
    """None for a score of exactly one half, and for a correction alone."""
    if said is None:
        return "none"
    return None if said.score is None or said.score == 0.5 else "up" if said.score > 0.5 else "down"


def records(folder: Folder) -> Iterator[Answer | Feedback]:
    """All of them, in the order of the log. Raises ConfigError."""
    decoder = msgspec.json.Decoder(Answer | Feedback)
    for path, _ in folder.segments():
        for number, line in enumerate(folder.read(path).splitlines(), 1):
            try:
                record = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: no record of an answer ({error}); name a log.") from error
            if record.format > FORMAT:
                raise ConfigError(f"{path}, line {number}: a later release wrote it; read it with that one.")
            yield record


def joined(url: str, wanted: Wanted) -> Iterator[tuple[Answer, Feedback | None]]:
    """The answers that are wanted, each with the last that was said of it. Feedback is held in memory, answers are not.

    Raises ConfigError.
    """
    folder = Folder(url)
    said: dict[tuple[str, str, str], Feedback] = {}
    for record in records(folder):
        if isinstance(record, Feedback):
            at = (record.id, record.key, record.key_id)
            if at not in said or said[at].time <= record.time:
                said[at] = record
    for record in records(folder):
        if isinstance(record, Answer):
            feedback = said.get((record.id, record.about.key, record.about.key_id))
            if wanted.allows(record, feedback):
                yield record, feedback


def rows(url: str, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """A row for each choice of the answers, with what was said of it."""
    for answer, said in joined(url, wanted):
        for choice in answer.choices:
            yield _row(answer, choice, said if said is None or said.choice == choice.index else None)


def _row(answer: Answer, choice: Choice, said: Feedback | None) -> dict[str, Any]:
    about = answer.about
    return {
        "id": answer.id, "request_id": about.request_id, "time": about.ended, "key": about.key, "key_id": about.key_id,
        "model": answer.model, "route": about.route, "instance": about.instance, "status": about.status,
        "duration_s": about.duration_s, "first_byte_s": about.first_byte_s, "messages": answer.messages,
        "prompt": answer.prompt, "tools": answer.tools, "parameters": answer.parameters, "metadata": answer.metadata,
        "choice": choice.index, "text": choice.text, "reasoning": choice.reasoning, "tool_calls": choice.tool_calls,
        "finish_reason": choice.finish_reason, "token_ids": choice.token_ids, "logprobs": choice.logprobs,
        "weight_versions": msgspec.to_builtins(choice.weight_versions),
        "prompt_weight_versions": msgspec.to_builtins(choice.prompt_weight_versions),
        "first_version": about.first_version, "last_version": about.last_version,
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens,
        "score": said.score if said is not None else None,
        "correction": msgspec.to_builtins(said.correction) if said is not None else None,
        "comment": said.comment if said is not None else None,
        "feedback_metadata": said.metadata if said is not None else None,
    }  # fmt: skip


def export_jsonl(url: str, wanted: Wanted, target: str) -> int:
    """Writes the rows as JSON lines to an fsspec URL: how many."""
    count = 0
    with fsspec.open(target, "wb") as file:
        for row in rows(url, wanted):
            file.write(msgspec.json.encode(row) + b"\n")
            count += 1
    return count


_AS_JSON = ("messages", "prompt", "tools", "parameters", "metadata", "tool_calls", "correction", "feedback_metadata")


def export_parquet(url: str, wanted: Wanted, target: str) -> int:
    """The same as Parquet; what has no fixed form is JSON in a text column. Raises ConfigError."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("The package pyarrow is not installed; `pip install 'hotswap[data]'` brings it.")
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, count = _schema(pa), 0
    with fsspec.open(target, "wb") as file, pq.ParquetWriter(file, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows(url, wanted):
            count += 1
            batch.append(row | {name: None if row[name] is None else json.dumps(row[name]) for name in _AS_JSON})
            if len(batch) == BATCH_ROWS:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch.clear()
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return count


def _schema(pa: Any) -> Any:
    spans = pa.list_(pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())]))
    texts = ("id", "request_id", "key", "key_id", "model", "route", "instance", "text", "reasoning", "finish_reason")
    floats = ("time", "duration_s", "first_byte_s", "score")
    whole = ("status", "choice", "first_version", "last_version", "prompt_tokens", "completion_tokens")
    return pa.schema(
        [
            *((name, pa.string()) for name in (*texts, *_AS_JSON, "comment")),
            *((name, pa.float64()) for name in floats),
            *((name, pa.int64()) for name in whole),
            ("token_ids", pa.list_(pa.int64())),
            ("logprobs", pa.list_(pa.float64())),
            ("weight_versions", spans),
            ("prompt_weight_versions", spans),
        ]
    )
