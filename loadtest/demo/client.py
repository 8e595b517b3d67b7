"""Two clients that never pause: one streams long answers from the OpenAI route, one asks `/generate` for sums.

They run on an event loop in a thread of their own. Each checks what it gets: the stream must come to its proper end,
with as many tokens as were asked for or as the end says, and the version spans in that end must agree with the version
that every single event came with.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx

from loadtest.demo import protocols
from loadtest.demo.protocols import Delta, End, Refused, Spans
from loadtest.demo.scene import Answer, ClientStats

LONG_TOKENS = 240
SUM_TOKENS = 4
PAUSE_S = 0.2  # between two sums, as of someone who reads the answer
RETRY_S = 0.5
Events = Callable[[httpx.Response], AsyncIterator[Delta | End]]


class Truncated(Exception):
    """The stream ended early, or not as it should."""


class Misattributed(Exception):
    """The version spans at the end are not those of the tokens."""


class Clients:
    """Both clients, until their task is cancelled. Everything they see goes into `stats`."""

    def __init__(self, url: str, stats: ClientStats, questions: list[tuple[str, str]]) -> None:
        """`questions` are (prompt, right answer)."""
        self._url, self._stats, self._questions = url, stats, questions

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream_long(http))
            tasks.create_task(self._ask_sums(http))

    async def _stream_long(self, http: httpx.AsyncClient) -> None:
        for prompt, _ in itertools.cycle(self._questions):
            answer = self._stats.live = Answer(prompt)
            body = protocols.completion_request(prompt, LONG_TOKENS)
            request = self._ask(http, answer, "/v1/completions", body, protocols.completion_events, LONG_TOKENS)
            if await self._guard(request) and len(answer.pieces) > 1:
                self._stats.crossed_swap(answer)

    async def _ask_sums(self, http: httpx.AsyncClient) -> None:
        for prompt, expected in itertools.cycle(self._questions):
            answer = Answer(prompt)
            body = protocols.generate_request(prompt, SUM_TOKENS)
            if await self._guard(self._ask(http, answer, "/generate", body, protocols.generate_events)):
                answer.right = answer.text.strip() == expected
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
