"""Records of answers have what clients got: texts, tokens and the versions that wrote them, on every route."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest

from server.answers.log import Folder
from server.answers.parse import Answer
from server.answers.reading import Wanted, joined
from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad]
TOKENS = 300


@pytest.fixture
def collecting(live: LiveServer, tmp_path: Path) -> Iterator[str]:
    """The URL of a second gateway of the same server, which keeps every answer in `log`."""
    collect = ("--collect-anonymous", "--answers", str(tmp_path / "log"), "--answers-segment", "0.1")
    with live.another_gateway("--no-coordinator", *collect) as url:
        yield url


def kept(log: str, count: int) -> dict[str, Answer]:
    """By request id, once there are so many."""
    folder = Folder(log)
    wait_until(lambda: sum(len(folder.read(path).splitlines()) for path, _ in folder.segments()) >= count)
    return {answer.about.request_id: answer for answer, _ in joined(log, Wanted())}


MESSAGES = [{"role": "user", "content": "3+4="}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True},
    ),
    "text": ("/v1/completions", {"prompt": "3+4=", "max_tokens": TOKENS, "ignore_eos": True, "n": 2, "logprobs": 0}),
    "vllm": (
        "/v1/completions",
        {"prompt": "3+4=", "max_tokens": TOKENS, "ignore_eos": True, "return_weight_versions": True},
    ),
    "tokens": (
        "/generate", {"prompt_token_ids": [7, 8, 9], "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True},
    ),
    "response": ("/v1/responses", {"input": "3+4=", "max_output_tokens": TOKENS, "instructions": "Add."}),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": TOKENS}),
}  # fmt: skip


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = (line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {"))
    return [orjson.loads(line) for line in lines]


def spans_of(raw: bytes, *, streamed: bool) -> dict[int, Any]:
    """The spans of each choice as the answer tells them last."""
    found: dict[int, Any] = {}
    for payload in events(raw) if streamed else [orjson.loads(raw)]:
        told = payload.get("response") or payload
        for choice in told.get("choices") or [told]:
            if choice.get("weight_versions"):
                found[choice.get("index", 0)] = [
                    (int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]
                ]
    return found


def test_records_say_what_the_answers_said_over_swaps(
    live: LiveServer, checkpoints: dict[str, Path], collecting: str, tmp_path: Path
) -> None:
    live.push(checkpoints["say-1"])
    over = threading.Event()

    def ask(name: str, streamed: bool, number: int) -> tuple[str, bytes]:
        route, body = ASKED[name]
        request_id = f"{name}-{streamed}-{number}"
        asked = {**body, "model": live.name, "stream": streamed}
        answer = httpx.post(collecting + route, json=asked, headers={"x-request-id": request_id}, timeout=120)
        assert answer.status_code == 200, answer.text
        return request_id, answer.content

    def keep_asking(name: str, streamed: bool) -> list[tuple[str, bytes]]:
        found = [ask(name, streamed, 0)]
        while not over.is_set():
            found.append(ask(name, streamed, len(found)))
        return found

    with ThreadPoolExecutor(2 * len(ASKED)) as pool:
        asking = [pool.submit(keep_asking, name, streamed) for name in ASKED for streamed in (False, True)]
        try:
            for number in range(4):
                live.push(checkpoints[f"say-{number}"])
        finally:
            over.set()
        told = dict(pair for each in asking for pair in each.result())
    answers = kept(str(tmp_path / "log"), len(told))
    assert answers.keys() == told.keys()
    crossed = set()
    for request_id, raw in told.items():
        name, streamed, _ = request_id.split("-")
        answer = answers[request_id]
        wanted = spans_of(raw, streamed=streamed == "True")
        assert {c.index: [msgspec.structs.astuple(s) for s in c.weight_versions] for c in answer.choices} == wanted
        assert wanted, request_id
        check(answer, raw, streamed=streamed == "True")
        crossed |= {(name, streamed) for spans in wanted.values() if len(spans) > 1}
    assert len(crossed) >= 4, "too few answers crossed a swap to show anything"


def check(answer: Answer, raw: bytes, *, streamed: bool) -> None:
    """The rest of a record, held against the answer."""
    assert answer.whole
    assert answer.completion_tokens == sum(choice.weight_versions[-1].end for choice in answer.choices)
    ids = {p.get("id") or (p.get("response") or p.get("message") or {}).get("id") for p in events(raw)} - {None}
    assert answer.id in (ids if streamed else {orjson.loads(raw)["id"]})
    assert answer.choices[0].text
    route = answer.about.route
    if route == "/generate":
        (choice,) = answer.choices
        assert len(choice.token_ids) == len(choice.logprobs) == TOKENS
        assert answer.prompt == [7, 8, 9]
    elif route == "/v1/chat/completions":
        assert len(answer.choices[0].logprobs) == TOKENS
        said = [c for p in (events(raw) if streamed else [orjson.loads(raw)]) for c in p["choices"]]
        texts = [(c.get("delta") or c.get("message") or {}).get("content") or "" for c in said]
        assert answer.choices[0].text == "".join(texts)
    elif route == "/v1/responses":
        assert answer.messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]
