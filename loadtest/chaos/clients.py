"""Clients of the fleet that ask all the time, what they got, and what is wrong with it."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import httpx
import orjson

from loadtest.chaos.models import ALIAS, FIRST, FIRST_TOKEN, SECOND, answerers, badness, token_of
from loadtest.histories.recorder import Log
from loadtest.histories.requests import tap

Problem = Literal["wrong", "foreign"]


@dataclass(frozen=True)
class Wish:
    """What a request asks of swaps, in the words of the API."""

    policy: str = "keep"
    version: int | None = None
    min_version: int | None = None

    def body(self, finish_s: float, wait_s: float) -> dict[str, Any]:
        """The field `hotswap` of a request."""
        asked: dict[str, Any] = {} if self.policy == "keep" else {"policy": self.policy}
        asked |= {"finish_s": finish_s} if self.policy == "finish" else {}
        asked |= {"version": self.version} if self.version is not None else {}
        asked |= {"min_version": self.min_version} if self.min_version is not None else {}
        return asked | ({"wait_s": wait_s} if self.version is not None or self.min_version is not None else {})


@dataclass
class Answer:
    """As much of an answer as arrived. `pieces` are its events: the version of the last token, and the tokens.

    `spans` and `prompt_spans` are those at its end; without them it is not complete. `model` is who it says wrote it.
    """

    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    spans: list[dict[str, int]] | None = None
    prompt_spans: list[dict[str, int]] | None = None
    resumed: int = 0
    model: str | None = None

    def take(self, tokens: Iterable[int], version: int | None) -> None:
        """An event of a stream."""
        before = len(self.tokens)
        self.tokens += tokens
        if version is not None and len(self.tokens) > before:
            self.pieces.append((version, len(self.tokens) - before))

    def take_end(self, choice: Mapping[str, Any]) -> None:
        """The choice that says which versions wrote it all."""
        self.spans = choice["weight_versions"]
        self.prompt_spans = choice.get("prompt_weight_versions", self.prompt_spans)
        self.resumed = len(choice.get("resumed_at", ()))

    @property
    def versions(self) -> list[int]:
        """In the order of their tokens."""
        return [v["version"] for v in self.spans] if self.spans is not None else [v for v, _ in self.pieces]


def problems(answer: Answer, wish: Wish, asked: str) -> list[tuple[Problem, str]]:
    """What is wrong with its tokens, as far as they arrived; `asked`: model or alias. What is wrong with its labels the
    history shows (loadtest/histories)."""
    foreign: list[tuple[Problem, str]] = []
    if answer.model is not None and answer.model not in answerers(asked):
        foreign = [("foreign", f"an answer of {answer.model} to a request for {asked}")]
    # Until an answer of an alias says whose it is, its tokens must be of one of its models.
    by = (answer.model,) if answer.model is not None and answer.model in FIRST_TOKEN else answerers(asked)
    wrong = min(([*_wrong(answer, wish, model)] for model in by), key=len)
    return [*foreign, *wrong]


def _wrong(answer: Answer, wish: Wish, model: str) -> Iterable[tuple[Problem, str]]:
    """Tokens that the weights they are labelled with do not answer.

    After a bad version's, those of a newer one are anybody's guess, too: the KV cache of the answer is the bad one's
    still. It is computed anew on the way back to an older version, and on any way with the policy `recompute`.
    """
    prompt = (span["version"] for span in answer.prompt_spans or ())
    spoilt = max((version for version in prompt if badness(version)), default=None)
    for version, token in _labelled(answer):
        if badness(version):
            spoilt = version
            continue
        if spoilt is not None and (version < spoilt or wish.policy == "recompute"):
            spoilt = None
        if spoilt is None and token != token_of(model, version):
            yield "wrong", f"token {token} under {model}'s version {version}, which answers {token_of(model, version)}"


def _labelled(answer: Answer) -> Iterable[tuple[int, int]]:
    """(version, token), as far as it is known: of an event with several tokens it is the last one's version."""
    if answer.spans is not None:
        for span in answer.spans:
            for token in answer.tokens[span["start"] : span["end"]]:
                yield span["version"], token
        return
    at = 0
    for version, count in answer.pieces:
        at += count
        yield version, answer.tokens[at - 1]


FINISH_S, WAIT_S = 5.0, 5.0
LONGEST = 300  # tokens: some answers last over a swap
Outcome = Literal["answered", "refused", "untyped", "cut"]


@dataclass(frozen=True)
class Question:
    """A request, whichever gateway is asked. `model` is a model or an alias."""

    model: str
    route: str
    stream: bool
    length: int
    prompt: tuple[int, ...]
    wish: Wish

    def body(self) -> dict[str, Any]:
        shared = {"model": self.model, "max_tokens": self.length, "temperature": 0, "ignore_eos": True}
        shared |= {"stream": self.stream, "hotswap": self.wish.body(FINISH_S, WAIT_S)}
        if self.route == "/generate":
            return shared | {"prompt_token_ids": self.prompt}
        return shared | {"prompt": self.prompt, "return_token_ids": True}


@dataclass
class Attempt:
    """What came of it; times are monotonic seconds of this machine. `asked`: when its question was asked first.

    `code` is the error's, or the class of what broke the connection. `model` was asked, `by` has answered.
    """

    gateway: int
    began: float
    model: str
    route: str
    stream: bool
    policy: str
    bound: bool
    asked: float
    ended: float = 0.0
    outcome: Outcome = "answered"
    status: int = 0
    code: str = ""
    retry_after: float | None = None
    message: str = ""
    tokens: int = 0
    crossed: bool = False
    resumed: int = 0
    version: int | None = None
    by: str | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)

    def line(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"


class Refused(Exception):
    """The server's own word for why there is no answer, whole or from here on."""

    def __init__(self, status: int, error: object, retry_after: float | None = None) -> None:
        self.status, self.error, self.retry_after = status, error, retry_after
        super().__init__(str(error)[:300])


class Incomplete(Exception):
    """A body ended in order, before the answer did."""


async def attempt(http: httpx.AsyncClient, gateway: int, question: Question, asked: float) -> Attempt:
    """Asks once; `asked`: when this question was asked first."""
    wish = question.wish
    bound = wish.version is not None or wish.min_version is not None
    made = Attempt(
        gateway, time.monotonic(), question.model, question.route, question.stream, wish.policy, bound, asked
    )
    answer = Answer()
    try:
        await _ask(http, question, answer)
    except Refused as refusal:
        _note_refusal(made, refusal)
    except (httpx.TransportError, Incomplete) as error:
        made.outcome, made.code, made.message = "cut", type(error).__name__, str(error)
    except (ValueError, TypeError, LookupError) as error:  # neither an answer nor an error of the API
        made.outcome, made.code, made.message = "untyped", type(error).__name__, f"not an answer: {error}"
    made.ended = time.monotonic()
    made.tokens, made.resumed = len(answer.tokens), answer.resumed
    made.crossed = len(set(answer.versions)) > 1
    made.version, made.by = answer.versions[-1] if answer.versions else None, answer.model
    made.problems = [(kind, said) for kind, said in problems(answer, wish, question.model)]
    return made


def _note_refusal(made: Attempt, refusal: Refused) -> None:
    error = refusal.error
    typed = isinstance(error, dict) and all(isinstance(error.get(k), str) for k in ("message", "type", "code"))
    made.status, made.message = refusal.status, str(refusal)
    made.outcome = "refused" if typed else "untyped"
    made.code = error["code"] if typed and isinstance(error, dict) else ""
    made.retry_after = refusal.retry_after


async def _ask(http: httpx.AsyncClient, question: Question, answer: Answer) -> None:
    async with http.stream("POST", question.route, json=question.body()) as response:
        if response.status_code != 200:
            body = _parsed(await response.aread())
            error = body.get("error") if isinstance(body, dict) else body
            after = response.headers.get("retry-after")
            raise Refused(response.status_code, error, float(after) if after else None)
        if not question.stream:
            body = orjson.loads(await response.aread())
            choice, answer.model = body["choices"][0], body["model"]
            answer.take(choice["token_ids"], None)
            answer.take_end(choice)
            return
        event = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: ") and line != "data: [DONE]":
                _take(event, orjson.loads(line.removeprefix("data: ")), answer)
                event = ""
    if answer.spans is None:
        raise Incomplete("the stream ended without its last event")


def _take(event: str, data: Mapping[str, Any], answer: Answer) -> None:
    """One event of a stream of either route."""
    if event == "error" or "error" in data:
        raise Refused(200, data.get("error"))
    if event == "token":
        answer.take(data["token_ids"], data["weight_version"])
        return
    answer.model = data["model"]
    for choice in data["choices"]:
        answer.take(choice.get("token_ids") or (), data.get("weight_version"))
        if "weight_versions" in choice:
            answer.take_end(choice)


def _parsed(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def drawn(chance: random.Random, seen: Mapping[str, int]) -> Question:
    """A question at random; `seen` is the last version in an answer of each model. An alias has none of its own."""
    model = chance.choices((FIRST, SECOND, ALIAS), (5, 3, 2))[0]
    newest = seen.get(model)
    wish = Wish(chance.choices(("keep", "recompute", "finish", "abort"), (50, 15, 20, 15))[0])
    if newest is not None and wish.policy == "keep" and chance.random() < 0.4:
        wish = Wish(min_version=newest)
    elif newest is not None and wish.policy in ("finish", "abort") and chance.random() < 0.4:
        wish = Wish(wish.policy, version=newest)
    return Question(
        model=model,
        route=chance.choice(("/generate", "/v1/completions")),
        stream=chance.random() < 0.7,
        length=chance.randint(8, LONGEST),
        prompt=tuple(chance.randint(3, 90) for _ in range(chance.randint(4, 40))),
        wish=wish,
    )


TIMEOUT = httpx.Timeout(45.0, connect=3.0)  # longer than a gateway lets an instance be silent
THINK_S = (0.05, 0.4)
LONGEST_PAUSE_S = 2.0


@dataclass
class Client:
    """One at a time. `urls` are the gateways, one on each host."""

    urls: list[str]
    chance: random.Random
    file: BinaryIO
    at: int
    newest: dict[str, int] = field(default_factory=dict)
    connections: dict[int, httpx.AsyncClient] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._until_answered(drawn(self.chance, self.newest), stop)
            await asyncio.sleep(self.chance.uniform(*THINK_S))
        for http in self.connections.values():
            await http.aclose()

    async def _until_answered(self, question: Question, stop: asyncio.Event) -> None:
        asked = time.monotonic()
        while True:
            made = await attempt(self._http(), self.at, question, asked)
            self.file.write(made.line())
            if made.version is not None and made.by is not None:
                self.newest[made.by] = made.version
            if made.outcome == "answered" or stop.is_set():
                return
            question = self._next(question, made)
            await asyncio.sleep(min(LONGEST_PAUSE_S, made.retry_after or 0.2))

    def _next(self, question: Question, made: Attempt) -> Question:
        """The same question; what was bound to a version that may be gone for ever is bound to none."""
        if made.outcome == "cut":
            self.at = (self.at + 1) % len(self.urls)
        gone = made.code in ("version_unavailable", "version_wait_timeout")
        return replace(question, wish=Wish(question.wish.policy)) if gone else question

    def _http(self) -> httpx.AsyncClient:
        if self.at not in self.connections:
            self.connections[self.at] = httpx.AsyncClient(base_url=self.urls[self.at], timeout=TIMEOUT)
        return self.connections[self.at]


async def main(seed: int, count: int, path: str, history: str, urls: list[str]) -> None:
    stop, log = asyncio.Event(), Log(Path(history))
    tap(lambda _: log)
    with open(path, "wb", buffering=0) as file:  # noqa: ASYNC230 - a line at a time, into the page cache
        clients = [Client(urls, random.Random(f"{seed} {n}"), file, n % len(urls)) for n in range(count)]
        tasks = [asyncio.create_task(client.run(stop)) for client in clients]
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:]))
