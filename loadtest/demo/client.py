"""A client that streams all the time, by each of the protocols that the gateway speaks."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from loadtest.demo.recipe import Course, Question
from loadtest.demo.scene import Answer, ClientStats, Scene

SILENT = {"0": -100, "1": -100, "2": -100}  # logit bias against the special tokens, which have no text: both models'
Spans = list[dict[str, int]]


@dataclass(frozen=True)
class Delta:
    """Tokens that came in one event; `version` wrote the last of them."""

    text: str
    tokens: int
    version: int


@dataclass(frozen=True)
class End:
    """The stream's own account of itself: tokens in all, and which version wrote which of them."""

    tokens: int
    spans: Spans


class Refused(Exception):
    """The answer is not a stream, or the stream ends in an error."""


def generate_request(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy answer."""
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


async def generate_events(response: httpx.Response) -> AsyncIterator[Delta | End]:
    """Of POST /generate. Raises Refused."""
    event = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = orjson.loads(line.removeprefix("data: "))
            if event == "token":
                yield Delta(data["text"], len(data["token_ids"]), data["weight_version"])
            elif event == "done":
                yield End(data["usage"]["completion_tokens"], data["choices"][0]["weight_versions"])
            else:
                raise Refused(str(data))


def completion_request(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """A sampled answer of exactly `max_tokens` tokens, all of which can be seen."""
    return {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.0, "stream": True,
        "ignore_eos": True, "logit_bias": SILENT, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def completion_events(response: httpx.Response) -> AsyncIterator[Delta | End]:
    """Of POST /v1/completions with usage. Raises Refused."""
    spans: Spans = []
    tokens = -1
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            yield End(tokens, spans)
        elif line.startswith("data: "):
            data = orjson.loads(line.removeprefix("data: "))
            if "error" in data:
                raise Refused(str(data["error"]))
            for choice in data["choices"]:
                if choice.get("token_ids"):
                    yield Delta(choice["text"], len(choice["token_ids"]), data["weight_version"])
                if choice["finish_reason"]:
                    spans = choice["weight_versions"]
            tokens = data["usage"]["completion_tokens"] if data.get("usage") else tokens


PAUSE_S = 0.2  # between two sums, as of someone who reads the answer
RETRY_S = 0.5
Events = Callable[[httpx.Response], AsyncIterator[Delta | End]]


class Truncated(Exception):
    """The stream ended early, or not as it should."""


class Misattributed(Exception):
    """The version spans at the end are not those of the tokens."""


class Clients:
    """Both clients, until their task is cancelled. Everything they see goes into the scene."""

    def __init__(self, url: str, course: Course, scene: Scene, questions: list[Question]) -> None:
        self._url, self._course, self._scene, self._questions = url, course, scene, questions
        self._stats: ClientStats = scene.client

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream_long(http))
            tasks.create_task(self._ask_sums(http))

    async def _stream_long(self, http: httpx.AsyncClient) -> None:
        tokens = self._course.long_tokens
        for question in itertools.cycle(self._questions):
            answer = self._stats.live = Answer(question.shown)
            body = completion_request(self._course.asked(self._scene), question.prompt, tokens)
            request = self._ask(http, answer, "/v1/completions", body, completion_events, tokens)
            if await self._guard(request) and len(answer.pieces) > 1:
                self._stats.crossed_swap(answer)

    async def _ask_sums(self, http: httpx.AsyncClient) -> None:
        for question in itertools.cycle(self._questions):
            answer = Answer(question.shown)
            body = generate_request(self._course.asked(self._scene), question.prompt, self._course.short_tokens)
            if await self._guard(self._ask(http, answer, "/generate", body, generate_events)):
                answer.right = self._course.right(answer.text, question)
                self._stats.answered(answer)
            await asyncio.sleep(PAUSE_S)

    async def _guard(self, request: Coroutine[Any, Any, None]) -> bool:
        """Whether the request went well; what went wrong is counted and the client goes on."""
        try:
            await request
            self._stats.answers += 1
            return True
        except Misattributed as error:
            self._stats.problem("misattributed", str(error))
        except (Truncated, httpx.RemoteProtocolError, httpx.ReadError) as error:
            self._stats.problem("truncated", str(error) or type(error).__name__)
        except (Refused, httpx.HTTPError, ValueError, KeyError) as error:
            self._stats.problem("failed", str(error) or type(error).__name__)
        await asyncio.sleep(RETRY_S)
        return False

    async def _ask(
        self,
        http: httpx.AsyncClient,
        answer: Answer,
        path: str,
        body: dict[str, Any],
        events: Events,
        wanted: int | None = None,
    ) -> None:
        """Stream one answer and check it; `wanted` is its length if that is known beforehand."""
        marks: list[tuple[int, int]] = []  # (tokens so far, version of the last of them), one per event
        tokens, last, end = 0, 0.0, None
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise Refused(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for event in events(response):
                if isinstance(event, End):
                    end = event
                    continue
                now = time.perf_counter()
                if last:
                    self._stats.gap(now - last)
                last, tokens = now, tokens + event.tokens
                marks.append((tokens, event.version))
                answer.add(event.version, event.text)
                self._stats.took(event.tokens, event.version)
        if end is None:
            raise Truncated(f"no end after {tokens} tokens")
        if tokens != end.tokens or tokens != (wanted or tokens):
            raise Truncated(f"{tokens} tokens came; the end says {end.tokens}, asked were {wanted}")
        check_spans(end.spans, marks)


def check_spans(spans: Spans, marks: list[tuple[int, int]]) -> None:
    """Spans must cover every token once and agree with each event's version. Raises Misattributed."""
    by_token = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    if len(by_token) != marks[-1][0] or any(by_token[count - 1] != version for count, version in marks):
        raise Misattributed(f"spans {spans}, but the tokens came with (count, version) {marks}")
