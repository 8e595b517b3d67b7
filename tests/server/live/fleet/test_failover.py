"""Streams of real engines that are killed in the middle: a greedy answer is to the token what it would have been.

Only real engines show that what a second one computes goes on from what the first had written.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import psutil
import pytest

from tests.fleet import Fleet
from tests.live import LiveServer
from tests.waiting import comes_true, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200, func_only=True)]
TOKENS = 500
ATTEMPTS = 8  # a kill may come when the answers are all on their way already
PROMPTS = [[9, 8, 7, 6], [40 + i % 60 for i in range(100)]]


@pytest.fixture
def fleet(fleet: Fleet, checkpoints: dict[str, Path]) -> Fleet:
    fleet.live.push(checkpoints["a"])
    return fleet


def both_serve(fleet: Fleet) -> bool:
    return [r["eligible"] for r in fleet.live.instances()] == [True, True]


def busy(server: LiveServer) -> list[int]:
    """Indices of the instances that have requests of the gateway."""
    return [i for i, record in enumerate(server.instances()) if record["in_flight"]]


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)


def whole_instance(server: LiveServer, index: int) -> list[psutil.Process]:
    """Killed, its host is gone, as far as a process can tell: nothing of it says goodbye."""
    return server.tree(index)


def engine_only(server: LiveServer, index: int) -> list[psutil.Process]:
    """Killed, its HTTP server lives on for a moment, and has to say what became of its answers."""
    return [p for p in server.tree(index)[1:] if "EngineCore" in p.name() or "EngineCore" in str(p.cmdline())]


@dataclass
class Stream:
    """One stream, read on a thread of its own."""

    server: LiveServer
    path: str
    body: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    ids: set[Any] = field(default_factory=set)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    roles: int = 0
    events: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    raw: bytearray = field(default_factory=bytearray)
    fault: str = ""
    error: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Stream:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return not self.thread.is_alive()

    def finish(self) -> Stream:
        self.thread.join(240)
        assert not self.thread.is_alive()
        for line in self.raw.decode().split("\n"):
            self._line(line)
        return self

    def answer(self) -> tuple[Any, ...]:
        """All that must not depend on who answered."""
        spans = [(s["start"], s["end"]) for s in self.last["weight_versions"]]
        prompt = [(s["start"], s["end"]) for s in self.last["prompt_weight_versions"]]
        said = (self.text, self.token_ids, self.last["finish_reason"], self.last.get("stop_reason"), spans, prompt)
        return (*said, self.roles, self.usage, self.offsets)

    def _read(self) -> None:
        try:
            url = self.server.url + self.path
            with httpx.stream("POST", url, json=self.body, timeout=240) as answer:
                assert answer.status_code == 200, answer.read()
                for piece in answer.iter_raw():  # read as fast as it comes, and understood later
                    self.raw += piece
                    self.events += piece.count(b"\n\n")
        except Exception as error:
            self.fault = repr(error)

    def _line(self, line: str) -> None:
        name, _, data = line.partition(": ")
        if name != "data":
            self.fault = data if data == "error" else self.fault
            return
        if data == "[DONE]":
            self.ended = True
            return
        payload = orjson.loads(data)
        if payload.get("error"):
            self.error = payload["error"]
            return
        self.ids.add((payload.get("id"), payload.get("created")))
        self.usage = payload.get("usage") or self.usage
        for choice in payload.get("choices", [payload]):
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.roles += "role" in delta
        self.text += choice.get("text") or delta.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        scores = choice.get("logprobs")
        if isinstance(scores, dict):
            self.logprobs += scores.get("token_logprobs") or [c["logprob"] for c in scores.get("content", [])]
            self.offsets += scores.get("text_offset") or []
        elif scores:
            self.logprobs += scores
        if choice.get("finish_reason"):
            self.last = choice


def asks(name: str) -> list[tuple[str, dict[str, Any]]]:
    """One request for every way of asking."""
    greedy = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": TOKENS}
    openai_like = {**greedy, "model": name, "stream_options": {"include_usage": True}}
    found: list[tuple[str, dict[str, Any]]] = []
    for prompt in PROMPTS:
        found.append(("/generate", {**greedy, "prompt_token_ids": prompt, "logprobs": True}))
        found.append(("/v1/completions", {**openai_like, "prompt": prompt}))
        found.append(("/v1/completions", {**openai_like, "prompt": prompt, "logprobs": 2, "min_tokens": 350}))
        messages = [{"role": "user", "content": f"what of {len(prompt)}?"}]
        found.append(("/v1/chat/completions", {**openai_like, "messages": messages}))
        found.append(("/v1/chat/completions", {**openai_like, "messages": messages, "logprobs": True}))
        found.append(("/v1/chat/completions", {**openai_like, "messages": messages, "stop": ["w3"], "min_tokens": 300}))
    return found


def asked(server: LiveServer, most: int | None = None) -> list[Stream]:
    return [Stream(server, path, body).start() for path, body in asks(server.name)[:most]]


@pytest.fixture(scope="module")
def whole(pair: Fleet, checkpoints: dict[str, Path]) -> list[Stream]:
    """The answers that nothing happens to."""
    wait_until(pair.mended, 200)
    pair.live.push(checkpoints["a"])
    streams = [stream.finish() for stream in asked(pair.live)]
    assert [s.fault for s in streams] == [""] * len(streams)
    return streams


def failovers(server: LiveServer) -> float:
    page = httpx.get(server.url + "/metrics").text
    wanted = 'hotswap_gateway_failovers_total{model="toy",outcome="resumed"} '
    return float(next(line for line in page.splitlines() if line.startswith(wanted)).rpartition(" ")[2])


def break_in_mid_stream(
    server: LiveServer, streams: list[Stream], what: Callable[[LiveServer, int], list[psutil.Process]]
) -> list[psutil.Process]:
    """Stops processes of an instance that some of the streams come from, early in the answers; which ones."""
    at = 2 ** random.randrange(5)  # events; on a busy machine one tells many tokens
    wait_until(lambda: all(s.events for s in streams), 120)
    processes = what(server, random.choice(busy(server) or [0]))
    comes_true(lambda: sum(s.events for s in streams) >= at * len(streams) or any(s.over for s in streams), 120)
    for process in processes:
        process.suspend()
    return processes


def check(streams: list[Stream], whole: list[Stream]) -> bool:
    """That the streams are what they would have been; whether others went on with any."""
    for stream, uninterrupted in zip(streams, whole, strict=False):
        stream.finish()
        assert stream.fault == ""
        assert stream.answer() == uninterrupted.answer()
        assert stream.logprobs == pytest.approx(uninterrupted.logprobs, abs=0.05)
        assert stream.ended == uninterrupted.ended
        assert stream.path == "/generate" or len(stream.ids) == 1
    return any(s.last.get("resumed_at") for s in streams)


class Sdk:
    """Streams as the OpenAI SDK reads them: one answer each, whoever makes its parts."""

    def __init__(self, server: LiveServer, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=240)
        common: Any = {"model": server.name, "temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
        self._asks = [{**common, "messages": [{"role": "user", "content": f"what of {n}?"}]} for n in range(4)]
        self._whole = list(pool.map(lambda ask: self._client.chat.completions.create(**ask), self._asks))

    def resumed(self) -> Callable[[], int]:
        """Starts the streams. Returns a function that waits for them; how many another instance has ended."""
        streams = [self._pool.submit(self._resumed, *each) for each in zip(self._asks, self._whole, strict=True)]
        return lambda: sum(stream.result(240) for stream in streams)

    def _resumed(self, ask: Any, whole: Any) -> bool:
        text, finish, ids, seams, usage = "", None, set(), None, 0
        for chunk in self._client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            ids.add(chunk.id)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                seams = (choice.model_extra or {}).get("resumed_at", seams)
            usage = chunk.usage.completion_tokens if chunk.usage is not None else usage
        assert text == whole.choices[0].message.content
        assert (finish, len(ids), usage) == ("length", 1, TOKENS)
        return seams is not None


@pytest.mark.parametrize("what", [whole_instance, pytest.param(engine_only, marks=pytest.mark.broad)])
@pytest.mark.parametrize("again", [0, pytest.param(1, marks=pytest.mark.broad)])
def test_greedy_streams_are_what_they_would_have_been(
    fleet: Fleet, whole: list[Stream], what: Callable[[LiveServer, int], list[psutil.Process]], again: int
) -> None:
    """Read as they come, and by the OpenAI SDK."""

    def resumed(sdk: Sdk) -> bool:
        wait_until(fleet.mended, 200)
        before = failovers(fleet.live)
        streams, told = asked(fleet.live), sdk.resumed()
        kill(break_in_mid_stream(fleet.live, streams, what))
        found, by_sdk = check(streams, whole), told()
        wait_until(lambda: not both_serve(fleet), 120)  # the gateway has heard of it
        assert failovers(fleet.live) - before == sum(bool(s.last.get("resumed_at")) for s in streams) + by_sdk
        return found and by_sdk > 0

    with ThreadPoolExecutor(4) as pool:
        sdk = Sdk(fleet.live, pool)
        assert any(resumed(sdk) for _ in range(ATTEMPTS))


@pytest.mark.broad
def test_an_instance_that_freezes(fleet: Fleet, whole: list[Stream]) -> None:
    """Its connections stay open and say nothing, as when its host is gone; the end of its lease tells."""

    def resumed() -> bool:
        wait_until(fleet.mended, 200)
        streams = asked(fleet.live, 4)
        frozen = break_in_mid_stream(fleet.live, streams, whole_instance)
        try:
            return check(streams, whole)
        finally:
            kill(frozen)
            wait_until(lambda: not both_serve(fleet), 120)

    assert any(resumed() for _ in range(ATTEMPTS))


@pytest.mark.broad
def test_sampled_streams_go_on_and_those_that_cannot_say_so(fleet: Fleet) -> None:
    common = {"temperature": 1.0, "ignore_eos": True, "stream": True, "max_tokens": TOKENS, "prompt": [9, 8, 7]}
    common |= {"model": fleet.live.name, "return_token_ids": True}

    def seen() -> bool:
        wait_until(fleet.mended, 200)
        continued = [Stream(fleet.live, "/v1/completions", {**common, "seed": i}).start() for i in range(3)]
        stuck = [Stream(fleet.live, "/v1/completions", {**common, "presence_penalty": 0.5}).start() for _ in range(3)]
        kill(break_in_mid_stream(fleet.live, continued + stuck, whole_instance))
        for stream in continued:
            stream.finish()
            assert (stream.fault, len(stream.token_ids), stream.ended) == ("", TOKENS, True)
        cut = [s for s in stuck if s.finish().fault]
        for stream in cut:
            assert stream.error["code"] == "upstream_died"
        wait_until(lambda: not both_serve(fleet), 120)
        return bool(cut) and any(s.last.get("resumed_at") for s in continued)

    assert any(seen() for _ in range(2 * ATTEMPTS))


def test_a_stream_that_has_crossed_a_swap(fleet: Fleet, checkpoints: dict[str, Path]) -> None:
    """The version that wrote each token is known of the whole answer, whoever tells its end, and in whichever form."""
    common = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": TOKENS}
    bodies = {
        "/generate": common | {"prompt_token_ids": PROMPTS[0]},
        "/v1/completions": common | {"model": fleet.live.name, "prompt": PROMPTS[0], "return_weight_versions": True},
    }

    def resumed(name: str) -> bool:
        wait_until(fleet.mended, 200)
        before = fleet.live.active()
        after = fleet.live.push(checkpoints[name], activate=False)
        streams = [Stream(fleet.live, path, body).start() for path, body in bodies.items() for _ in range(8)]
        # A busy instance gives many tokens at once: a whole answer may be three events.
        wait_until(lambda: all(s.events or s.over for s in streams), 120)
        assert fleet.live.activate(after).status_code == 200
        # Streams whose last token the old weights wrote could not be continued.
        wait_until(lambda: all(b'"weight_version":%d' % after in s.raw or s.over for s in streams), 120)
        kill(whole_instance(fleet.live, (busy(fleet.live) or [0])[0]))
        found = [s for s in streams if s.finish().last.get("resumed_at")]
        assert {s.fault for s in streams} == {""}
        for stream in found:
            old, new = stream.last["weight_versions"]
            kind = str if stream.path == "/v1/completions" else int
            assert (old["version"], new["version"]) == (kind(before), kind(after))
            assert (old["start"], old["end"], new["end"]) == (0, new["start"], TOKENS)
            assert stream.last["prompt_weight_versions"] == [{"version": before, "start": 0, "end": len(PROMPTS[0])}]
        wait_until(lambda: not both_serve(fleet), 120)
        return {stream.path for stream in found} == bodies.keys()

    assert any(resumed("ba"[i % 2]) for i in range(ATTEMPTS))
