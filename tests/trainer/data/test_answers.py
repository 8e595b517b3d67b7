"""The trainer reads the log that a gateway has written: corrections, preferences, prompts, and what the filters do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.gateway.config import AnswerSettings
from tests.server import continued
from tests.server.gateway.harness import new_key, post, running_gateway
from tests.server.gateway.upstream import Link, Received, upstream
from tests.trainer.data.conftest import Open
from tests.trainer.data.test_conversation import CALLED
from tests.trainer.data.writing import CHATML, byte_tokenizer, published
from tests.world.kinds import ASKED as QUESTION
from tests.world.kinds import CALL, TOOL, says
from trainer.data.cache import FileDataset
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

HEAD = continued.STAMPED % 1


def span(version: int) -> list[dict[str, int]]:
    return [{"version": version, "start": 0, "end": 2}]


async def answer(link: Link, received: Received) -> None:
    """A completion that says the prompt twice, or what `user` says, by the version that the seed says."""
    asked = orjson.loads(received.body)
    version = asked.get("seed", 1)
    choice = {"index": 0, "text": asked.get("user", 2 * asked["prompt"]), "finish_reason": asked.get("suffix", "stop")}
    body = {
        "id": f"cmpl-{received.headers['x-request-id']}", "choices": [choice | {"weight_versions": span(version)}],
        "weight_version": version, "usage": {"prompt_tokens": 1, "total_tokens": 3, "completion_tokens": 2},
    }  # fmt: skip
    await link.json(orjson.dumps(body), extra=b"x-hotswap-weight-version: %d\r\n" % version)


# prompt, fields of the request, what is said of the answer, and by which key
ASKED: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
    ("1", {"seed": 1, "metadata": {"solution": "1"}}, {"correction": "9"}, "ada"),
    ("2", {"seed": 2}, {"rating": "down", "correction": {"content": "8"}}, "ada"),
    ("3", {"seed": 3}, {"rating": "up"}, "bob"),
    ("2", {"seed": 3}, None, "ada"),
    ("4", {"seed": 3}, {"score": 0.2}, "ada"),
    ("4", {"seed": 4, "suffix": "length"}, {"score": 1.0}, "ada"),
    ("5", {"seed": 4}, {"score": 0.5}, "ada"),
]


async def written(directory: Path, asked: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]]) -> str:
    """The directory of a log that a gateway has written about this."""
    with running_gateway(directory, answers=AnswerSettings(segment_bytes=1)) as gateway:
        async with upstream(answer) as instance:
            await asyncio.to_thread(gateway.register, instance)
            keys = {name: (await new_key(gateway, name=name, collect=True))[1] for name in ("ada", "bob")}
            for number, (prompt, fields, said, key) in enumerate(asked):
                line = f"{keys[key]}x-request-id: r{number}\r\n"
                body = {"model": "toy", "prompt": prompt, **fields}
                assert (await gateway.ask(post("/v1/completions", body, line))).status == 200
                if said is not None:
                    taken = await gateway.ask(post("/v1/feedback", {"id": f"cmpl-r{number}", **said}, keys[key]))
                    assert taken.status == 200, taken.body
        return gateway.gateway.config.answers_url


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asyncio.run(written(tmp_path_factory.mktemp("gateway"), ASKED))


Learnt = Callable[..., list[tuple[str, ...]]]


@pytest.fixture
def learnt(open_data: Open, tokenizer: Tokenizer, log: str) -> Learnt:
    """Prompt, and what is to be learnt of it as texts, of each record."""

    def text(ids: tuple[int, ...]) -> str:
        assert ids[-1] == tokenizer.eos_id
        return tokenizer.decode(list(ids[:-1]))

    def read(learn: str, of: str = log, **filters: Any) -> list[tuple[str, ...]]:
        data: FileDataset = open_data(of, kind="answers", learn=learn, **filters)
        found = [data[index] for index in range(len(data))]
        parts = [(r.target_ids, r.chosen_ids, r.rejected_ids) for r in found]
        return [(r.prompt, *(text(ids) for ids in each if ids)) for r, each in zip(found, parts, strict=True)]

    return read


@pytest.mark.parametrize(
    ("learn", "records"),
    [
        ("corrections", [("1", "9"), ("2", "8")]),
        ("preferences", [("1", "9", "11"), ("2", "8", "22")]),  # the correction over the answer
        ("prompts", [("1",), ("2",), ("3",), ("4",), ("5",)]),  # each once
    ],
)
def test_what_is_learnt_of_a_log(learnt: Learnt, learn: str, records: list[tuple[str, ...]]) -> None:
    assert learnt(learn) == records


@pytest.mark.parametrize(
    ("filters", "prompts"),
    [
        ({"keys": ("bob",)}, ["3"]),
        ({"min_version": 2, "max_version": 3}, ["2", "3", "4"]),
        ({"max_version": 1}, ["1"]),
        ({"min_version": 4}, ["4", "5"]),
        ({"rating": "up"}, ["3", "4"]),
        ({"rating": "down"}, ["2", "4"]),
        ({"since": 1.0}, ["1", "2", "3", "4", "5"]),
    ],
)
def test_filters(learnt: Learnt, filters: dict[str, Any], prompts: list[str]) -> None:
    assert [prompt for (prompt,) in learnt("prompts", **filters)] == prompts


@pytest.mark.parametrize("filters", [{"until": 1.0}, {"since": 1e12}, {"keys": ("eve",)}, {"min_version": 9}])
def test_filters_that_leave_nothing_say_so(learnt: Learnt, filters: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no prompts that the filters let through"):
        learnt("prompts", **filters)


async def test_an_answer_that_was_liked_is_preferred_over_one_that_was_not(tmp_path: Path, learnt: Learnt) -> None:
    asked: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
        ("4", {"user": "40"}, {"score": 0.2}, "ada"),
        ("4", {"user": "41", "suffix": "length"}, {"score": 1.0}, "ada"),  # it was cut
        ("4", {"user": "43"}, {"score": 0.9}, "ada"),
        ("4", {"user": "42"}, {"score": 0.8}, "bob"),
        ("4", {"user": "43"}, {"score": 0.1}, "bob"),  # the same again
        ("5", {"user": "50"}, {"score": 0.1}, "ada"),  # nothing to compare with
    ]
    assert learnt("preferences", await written(tmp_path, asked)) == [("4", "43", "40")]


def test_what_was_asked_with_an_answer_is_there_for_rewards(open_data: Open, log: str) -> None:
    data = open_data(log, kind="answers", learn="corrections", answer_key="metadata.solution")
    assert (data[0].answer, data[1].answer) == ("1", "8")
    assert data[0].extra == {"answer_id": "cmpl-r0", "weight_version": 1, "score": None}
    assert data[1].extra["score"] == 0.0


def record(**fields: Any) -> dict[str, Any]:
    about = {"key": "ada", "key_id": "k", "ended": 1.0, "first_version": 1, "last_version": 1}
    choice = {"index": 0, "text": "x", "tool_calls": [], "finish_reason": "stop", "weight_versions": []}
    asked = {"messages": [], "prompt": "1", "tools": [], "parameters": {}, "metadata": {}}
    return {"record": "answer", "format": 1, "id": "a", "about": about, "choices": [choice], **asked, **fields}


def said(**fields: Any) -> dict[str, Any]:
    given = {"record": "feedback", "format": 1, "id": "a", "key": "ada", "key_id": "k", "time": 2.0, "choice": 0}
    return {**given, "score": None, "correction": "better", **fields}


def write(directory: Path, *records: dict[str, Any]) -> Path:
    (directory / "log").mkdir()
    lines = b"".join(orjson.dumps(record) + b"\n" for record in records)
    (directory / "log" / "20260101T000000000-w-1.jsonl").write_bytes(lines)
    return directory / "log"


@pytest.mark.parametrize(
    ("fields", "feedback", "reason"),
    [
        ({"prompt": [1, 2]}, {}, "token ids"),
        ({"tools": [{"type": "web_search"}]}, {}, "no function"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "more than text"),
        ({}, {"correction": {"tool_calls": [{}]}}, "has no name"),
        ({}, {"correction": {"content": ""}}, "no text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, {}, "has no name"),
        ({}, {"choice": 3}, "no such choice"),
    ],
)
def test_what_cannot_be_learnt_is_a_bad_record(
    open_data: Open, tmp_path: Path, fields: dict[str, Any], feedback: dict[str, Any], reason: str
) -> None:
    learn = "preferences" if "choice" in feedback else "corrections"
    log = write(tmp_path, record(**fields), said(**feedback))
    with pytest.raises(DataError, match=f"line 1: .*{reason}"):
        open_data(log, kind="answers", learn=learn)


SCHEMA = TOOL["function"]["parameters"]
FLAT = {"name": "add", "description": TOOL["function"]["description"]}
FORMS: dict[str, tuple[Any, list[Any]]] = {
    "chat": (TOOL, [QUESTION, says("assistant", "", tool_calls=[CALL]), {**says("tool", "8"), "tool_call_id": "c"}]),
    "responses": (
        {"type": "function", **FLAT, "parameters": SCHEMA},
        [QUESTION, says("assistant", "", tool_calls=[CALL]), {**says("tool", "8"), "tool_call_id": "c"}],
    ),
    "messages": (
        {**FLAT, "input_schema": SCHEMA},
        [
            says("user", [{"type": "text", "text": QUESTION["content"]}]),
            says("assistant", [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 3, "b": 5}}]),
            says("user", [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "8"}]}]),
        ],
    ),
}


@pytest.mark.parametrize("route", FORMS)
def test_answers_that_call_tools_are_learnt_whatever_the_route(open_data: Open, tmp_path: Path, route: str) -> None:
    """Each route gives the records that the same conversation gives as a row of a data set."""
    (tmp_path / "model").mkdir()
    tokenizer = Tokenizer(byte_tokenizer(tmp_path / "model", CHATML, (CHATML[1],), CHATML[1], published("qwen2_5")))
    tool, messages = FORMS[route]
    called = {**record()["choices"][0], "text": "", "tool_calls": [CALL]}
    asked = record(messages=messages[:1], prompt=None, tools=[tool], choices=[called])
    after = record(messages=messages, prompt=None, tools=[tool], id="b")
    liked, corrected = said(correction=None, score=1.0), said(id="b", correction="It is 8.")
    log = write(tmp_path, asked, liked, after, corrected, {**asked, "id": "c", "choices": record()["choices"]},
                said(id="c", correction=None, score=0.0))  # fmt: skip

    def text(ids: tuple[int, ...]) -> str:
        return tokenizer.decode(list(ids), special=True)

    def learnt(learn: str) -> list[tuple[str, str, str, str]]:
        data = open_data(log, kind="answers", learn=learn, tokenizer=tokenizer)
        return [
            (text(r.prompt_ids), text(r.target_ids), text(r.chosen_ids), text(r.rejected_ids))
            for r in (data[index] for index in range(len(data)))
        ]

    first, _ = tokenizer.chat([QUESTION], [TOOL])
    whole, _ = tokenizer.chat(FORMS["chat"][1], [TOOL])
    assert learnt("prompts") == [(first, "", "", ""), (whole, "", "", "")]
    assert learnt("corrections") == [(whole, "It is 8.<|im_end|>", "", "")]
    assert learnt("preferences") == [
        (whole, "", "It is 8.<|im_end|>", "x<|im_end|>"),
        (first, "", CALLED, "x<|im_end|>"),
    ]


def test_what_was_said_last_counts_wherever_it_stands(open_data: Open, tmp_path: Path, tokenizer: Tokenizer) -> None:
    log = write(tmp_path, said(time=3.0, correction="7"), said(time=2.0, correction="6"), record())
    assert tokenizer.decode(list(open_data(log, kind="answers")[0].target_ids[:-1])) == "7"


def test_prompts_in_several_parts_or_of_several_samples(open_data: Open, tmp_path: Path) -> None:
    choices = [{**record()["choices"][0], "index": index} for index in range(4)]
    several = record(prompt=["1", "2"], parameters={"n": 2}, choices=choices)
    log = write(tmp_path, several, said(choice=2))
    assert open_data(log, kind="answers")[0].prompt == "2"


@pytest.mark.parametrize(
    ("line", "reason"), [({"a": 1}, "no record"), ([1], "no record"), ({"record": "answer", "format": 9}, "format 9")]
)
def test_a_file_of_something_else_is_refused(open_data: Open, tmp_path: Path, line: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{reason}"):
        open_data(write(tmp_path, line), kind="answers")


def test_a_log_without_segments_is_refused(open_data: Open, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names no file"):
        open_data(tmp_path, kind="answers")
