"""The log read again: joined with feedback, filtered, exported; and the command that does so."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from server.answers import reading
from server.answers.feedback import Correction, Feedback
from server.answers.log import Folder, Writer
from server.answers.parse import FORMAT, Answer, Choice, Span
from server.answers.reading import Wanted, joined, records, rows
from server.cli.app import app
from server.errors import ConfigError
from server.gateway.config import AnswerSettings
from tests.server.answers.test_parse import about

NOW = 1_000_000.0


def answer(name: str, versions: list[int], *, key: str = "ada", ended: float = NOW) -> Answer:
    spans = [Span(version, at, at + 1) for at, version in enumerate(versions)]
    known = about(
        "/v1/chat/completions", key=key, key_id=f"id-{key}", ended=ended, first_version=versions[0],
        last_version=versions[-1],
    )  # fmt: skip
    choice = Choice(0, name, finish_reason="stop", weight_versions=spans, token_ids=[1] * len(spans))
    messages = [{"role": "user", "content": "Hello"}]
    return Answer(FORMAT, name, known, messages=messages, choices=[choice], completion_tokens=len(spans))


def said(name: str, at: float, *, key: str = "ada", **more: Any) -> Feedback:
    return Feedback(FORMAT, name, "r", key, f"id-{key}", at, "key", **more)


LOG = [
    answer("a", [1, 2]),
    said("b", NOW + 1, score=1.0),  # before its answer: another worker closed its segment first
    answer("b", [2], ended=NOW + 10),
    said("a", NOW + 3, score=0.0, correction=Correction("better")),
    said("a", NOW + 2, score=1.0),  # later in the log, and said before
    answer("c", [4], key="bob", ended=NOW + 20),
    said("c", NOW + 21, score=0.0),  # ada's, and c is bob's
]


@pytest.fixture
def log(tmp_path: Path) -> str:
    writer = Writer(Folder(str(tmp_path / "log")), AnswerSettings(segment_bytes=1))
    for record in LOG:
        writer.append(msgspec.json.encode(record))
        writer.tick()
    return str(tmp_path / "log")


def test_records_come_as_they_were_written(log: str) -> None:
    assert list(records(Folder(log))) == LOG


def test_the_last_that_its_key_said_of_an_answer_counts(log: str) -> None:
    found = {record.id: feedback for record, feedback in joined(log, Wanted())}
    assert found["a"] == LOG[3]
    assert found["b"] == LOG[1]
    assert found["c"] is None


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(), "abc"), (Wanted(key="bob"), "c"), (Wanted(key="id-ada"), "ab"), (Wanted(since=NOW + 10), "bc"),
        (Wanted(until=NOW + 10), "a"), (Wanted(min_version=2), "abc"), (Wanted(max_version=1), "a"),
        (Wanted(min_version=2, max_version=3), "ab"), (Wanted(min_version=3, max_version=3), ""),
        (Wanted(rating="up"), "b"), (Wanted(rating="down"), "a"), (Wanted(rating="none"), "c"),
    ],
)  # fmt: skip
def test_only_what_is_wanted(log: str, wanted: Wanted, names: str) -> None:
    assert [record.id for record, _ in joined(log, wanted)] == list(names)


def test_exports_hold_the_same(log: str, tmp_path: Path) -> None:
    assert reading.export_jsonl(log, Wanted(), f"file://{tmp_path}/rows.jsonl") == 3
    assert reading.export_parquet(log, Wanted(), f"file://{tmp_path}/rows.parquet") == 3
    lines = [orjson.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert lines == [orjson.loads(msgspec.json.encode(row)) for row in rows(log, Wanted())]
    for row, line in zip(pq.read_table(tmp_path / "rows.parquet").to_pylist(), lines, strict=True):
        parsed = {name: value if value is None else json.loads(value) for name, value in row.items()
                  if name in reading._AS_JSON}  # fmt: skip
        assert row | parsed == line
    assert lines[0]["correction"] == {"content": "better"}


def test_many_rows_are_written_in_batches(tmp_path: Path) -> None:
    writer = Writer(Folder(str(tmp_path / "log")), AnswerSettings())
    for number in range(2 * reading.BATCH_ROWS + 1):
        writer.append(msgspec.json.encode(answer(str(number), [1])))
    writer.close()
    count = reading.export_parquet(str(tmp_path / "log"), Wanted(), str(tmp_path / "rows.parquet"))
    assert count == 2 * reading.BATCH_ROWS + 1
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.column("id").to_pylist() == [str(number) for number in range(count)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{}", "line 1"),
        (b"no json", "line 1"),
        (b'{"record":"else","format":1}', "line 1"),
        (msgspec.json.encode(msgspec.structs.replace(answer("a", [1]), format=FORMAT + 1)), "later release"),
    ],
)
def test_a_file_of_something_else_is_no_log(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "20260101T000000000-w-1.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=said):
        list(joined(str(tmp_path), Wanted()))


def test_parquet_needs_its_package(log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pyarrow"):
        reading.export_parquet(log, Wanted(), str(tmp_path / "rows.parquet"))


# the command


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["answers", *words], env={"COLUMNS": "200"})
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_the_command_lists_exports_and_deletes(log: str, tmp_path: Path) -> None:
    listed = json.loads(run("list", "--answers", log, "--json", "--last", "2")[1])
    assert [row["id"] for row in listed] == ["b", "c"]
    code, shown = run("list", "--answers", log, "--rating", "down")
    assert code == 0
    assert "1 2" in shown
    assert "yes" in shown
    target = str(tmp_path / "out.jsonl")
    assert run("export", target, "--answers", log, "--key", "ada")[0] == 0
    assert len(Path(target).read_bytes().splitlines()) == 2
    assert "6 records of ada" in run("delete", "--answers", log, "--key", "ada")[1]
    assert [row["id"] for row in json.loads(run("list", "--answers", log, "--json")[1])] == ["c"]


def test_the_command_says_what_is_wrong(log: str, tmp_path: Path) -> None:
    for words, told in (
        (("export", str(tmp_path / "x.csv"), "--answers", log), ".parquet or .jsonl"),
        (("list", "--answers", "nowhere://x"), "nowhere"),
        (("list", "--answers", log, "--since", "soon"), "--since soon"),
        (("list", "--state-dir", str(tmp_path)), "no running server"),
    ):
        code, shown = run(*words)
        assert code != 0
        assert told in shown


def test_since_counts_from_now(tmp_path: Path) -> None:
    writer = Writer(Folder(str(tmp_path)), AnswerSettings())
    for name, back in zip("ab", itertools.count(0, 7200), strict=False):
        writer.append(msgspec.json.encode(answer(name, [1], ended=time.time() - back)))
    writer.close()
    found = json.loads(run("list", "--answers", str(tmp_path), "--since", "1h", "--json")[1])
    assert [row["id"] for row in found] == ["a"]
