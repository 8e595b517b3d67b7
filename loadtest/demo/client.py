"""Two clients of POST /generate that never pause: one streams long answers, one asks for sums, again and again.

They run on an event loop in a thread of their own. Each checks what it gets: the stream must end with `done`, carry as
many tokens as `done` says, and the version spans must agree with the version that each token came with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

from loadtest.demo.scene import Answer, ClientStats

LONG_TOKENS = 240
SUM_TOKENS = 4
PAUSE_S = 0.2  # between two sums, as of someone who reads the answer
RETRY_S = 0.5


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
            sampling = {"max_tokens": LONG_TOKENS, "temperature": 1.0, "ignore_eos": True}
            if await self._guard(self._ask(http, answer, **sampling)) and len(answer.pieces) > 1:
                self._stats.crossed_swap(answer)

    async def _ask_sums(self, http: httpx.AsyncClient) -> None:
        for prompt, expected in itertools.cycle(self._questions):
            answer = Answer(prompt)
            if await self._guard(self._ask(http, answer, max_tokens=SUM_TOKENS, temperature=0.0)):
                answer.right = answer.text.strip() == expected
                self._stats.answered(answer)
            await asyncio.sleep(PAUSE_S)

    async def _guard(self, request: Any) -> bool:
        """Whether the request went well; what went wrong is counted and the client goes on."""
        try:
            await request
            self._stats.answers += 1
            return True
        except Misattributed as error:
            self._stats.problem("misattributed", str(error))
        except (Truncated, httpx.RemoteProtocolError, httpx.ReadError) as error:
            self._stats.problem("truncated", str(error) or type(error).__name__)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._stats.problem("failed", str(error) or type(error).__name__)
        await asyncio.sleep(RETRY_S)
        return False

    async def _ask(self, http: httpx.AsyncClient, answer: Answer, **sampling: Any) -> None:
        body = {"prompt": answer.prompt, "stream": True, **sampling}
        tokens = 0
        marks: list[tuple[int, int]] = []  # (tokens so far, version of the last of them), one per event
        done: dict[str, Any] | None = None
        last = 0.0
        async with http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                raise httpx.HTTPStatusError(
                    (await response.aread()).decode(errors="replace"), request=response.request, response=response
                )
            async for event, data in server_sent_events(response):
                if event == "token":
                    now = time.perf_counter()
                    if last:
                        self._stats.gap(now - last)
                    last = now
                    tokens += len(data["token_ids"])
                    marks.append((tokens, data["weight_version"]))
                    answer.add(data["weight_version"], data["text"])
                    self._stats.took(len(data["token_ids"]), data["weight_version"])
                elif event == "done":
                    done = data
                else:
                    raise Truncated(f"the stream ended with {data}")
        if done is None:
            raise Truncated(f"no `done` after {tokens} tokens")
        wanted = sampling["max_tokens"] if sampling.get("ignore_eos") else done["usage"]["completion_tokens"]
        if not tokens == wanted == done["usage"]["completion_tokens"]:
            raise Truncated(f"{tokens} tokens came of {wanted}")
        check_spans(done["choices"][0]["weight_versions"], marks)


def check_spans(spans: list[dict[str, int]], marks: list[tuple[int, int]]) -> None:
    """Spans must cover every token once and agree with each event's version. Raises Misattributed."""
    by_token = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    if len(by_token) != marks[-1][0] or any(by_token[count - 1] != version for count, version in marks):
        raise Misattributed(f"spans {spans}, but the tokens came with (count, version) {marks}")


async def server_sent_events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """(event, decoded data) of each event in a stream; comments are skipped."""
    event = ""
    async with contextlib.aclosing(response.aiter_lines()) as lines:  # type: ignore[type-var]
        async for line in lines:
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield event, orjson.loads(line.removeprefix("data: "))
