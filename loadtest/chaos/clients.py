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

from loadtest.chaos.models import (
    ADAPTERS,
    ALIAS,
    FIRST,
    FIRST_TOKEN,
    SECOND,
    answerers,
    answers_for,
    badness,
    base_of,
    flawed,
    is_adapter,
    one_of,
    token_of,
)
from loadtest.histories.recorder import Log
from loadtest.histories.requests import Answer, Choice, Outcome, tap
from weightsync.control.editions import MARK, split_name

Problem = Literal["wrong", "foreign", "flawed"]


@dataclass(frozen=True)
class Wish:
    """Wishes of a request about swaps, in the words of the API."""

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


def problems(choice: Choice, by: str, wish: Wish, asked: str) -> list[tuple[Problem, str]]:
    """The faults of its tokens, as far as they arrived. `asked`: model, alias or adapter; `by`: the model or edition
    that it names, "" if it broke off before. The history shows the faults of its labels (loadtest/histories)."""
    found: list[tuple[Problem, str]] = []
    if by and not answers_for(by, asked):
        found.append(("foreign", f"an answer of {by} to a request for {asked}"))
    if (edition := split_name(by)[1]) is not None and flawed(edition):
        found.append(("flawed", f"an answer through {by}, which is not finite"))
    # Until an answer of an alias says whose it is, its tokens must be of one of its models.
    models = (base_of(by),) if base_of(by) in FIRST_TOKEN else answerers(asked)
    return [*found, *min(([*_wrong(choice, wish, model)] for model in models), key=len)]


def _wrong(choice: Choice, wish: Wish, model: str) -> Iterable[tuple[Problem, str]]:
    """Tokens that the weights they are labelled with do not answer.

    After a bad version's, those of a newer one are anybody's guess, too: the KV cache of the answer is the bad one's
    still. It is computed anew on the way back to an older version, and on any way with the policy `recompute`.
    """
    prompt = (span["version"] for span in choice.prompt)
    spoilt = max((version for version in prompt if badness(version)), default=None)
    for span in choice.spans:
        version = span["version"]
        if badness(version):
            spoilt = version
            continue
        if spoilt is not None and (version < spoilt or wish.policy == "recompute"):
            spoilt = None
        if spoilt is None:
            says = token_of(model, version)
            for token in choice.tokens[span["start"] : span["end"]]:
                if token != says:
                    yield "wrong", f"token {token} under {model}'s version {version}, which answers {says}"


FINISH_S, WAIT_S = 5.0, 5.0
LONGEST = 300  # tokens: some answers last over a swap
BEAMS = 0.1  # of the questions
EDITION, BY_NAME, STRAY = "edition", 0.6, 0.2  # of the questions for an edition; of those by number


@dataclass(frozen=True)
class Question:
    """A request, whichever gateway is asked. `model` is a model, an alias or an adapter."""

    model: str
    route: str
    stream: bool
    length: int
    prompt: tuple[int, ...]
    wish: Wish
    beams: int = 0  # of a beam search, whose best answer is the first

    def body(self) -> dict[str, Any]:
        shared = {"model": self.model, "max_tokens": self.length, "temperature": 0, "ignore_eos": True}
        shared |= {"stream": self.stream, "hotswap": self.wish.body(FINISH_S, WAIT_S)}
        if self.route == "/generate":
            return shared | {"prompt_token_ids": self.prompt}
        search = {"use_beam_search": True, "n": self.beams} if self.beams else {}
        return shared | search | {"prompt": self.prompt, "return_token_ids": True}


@dataclass
class Attempt:
    """The outcome of an attempt; times are monotonic seconds of this machine.

    `asked`: when its question was asked first. `code` is the error's, or the class of what broke the connection.
    `model` was asked, `by` has answered.
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


async def attempt(http: httpx.AsyncClient, gateway: int, question: Question, asked: float) -> Attempt:
    """Asks once; `asked`: when this question was asked first."""
    wish = question.wish
    bound = wish.version is not None or wish.min_version is not None
    made = Attempt(
        gateway, time.monotonic(), question.model, question.route, question.stream, wish.policy, bound, asked
    )
    answer, body = Answer(), bytearray()
    broken: tuple[Outcome, str] | None = None
    try:
        async with http.stream("POST", question.route, json=question.body()) as response:
            made.status = response.status_code
            made.retry_after = float(response.headers["retry-after"]) if "retry-after" in response.headers else None
            async for piece in response.aiter_bytes():
                body += piece
    except httpx.TransportError as error:
        broken = ("cut", type(error).__name__)
    answer.read(made.status, question.stream and made.status == 200, bytes(body), broken)
    choice = answer.choices.get(0, Choice())
    made.ended, made.by = time.monotonic(), answer.model or None
    made.outcome, made.code, made.message = answer.outcome, answer.code, answer.message
    made.tokens, made.resumed = len(choice.tokens), choice.resumed
    made.crossed = len({span["version"] for span in choice.spans}) > 1
    made.version = choice.spans[-1]["version"] if choice.spans else None
    made.problems = [(kind, said) for kind, said in problems(choice, answer.model, wish, question.model)]
    return made


def _edition(chance: random.Random, numbers: Mapping[str, int]) -> str:
    """An adapter with editions, or one of its editions by number, which has answered or may never have existed."""
    name = one_of(chance.choice((FIRST, SECOND)), chance)
    if chance.random() < BY_NAME or name not in numbers:
        return name
    return f"{name}{MARK}{numbers[name] + (chance.randint(-3, 3) if chance.random() < STRAY else 0)}"


def drawn(chance: random.Random, seen: Mapping[str, int], numbers: Mapping[str, int]) -> Question:
    """A question at random. `seen` is the last version in an answer of each model, which an alias has not; `numbers` is
    the last edition of each adapter that was heard of."""
    model = chance.choices((FIRST, SECOND, ALIAS, *ADAPTERS, EDITION), (5, 3, 2, 1, 1, 5))[0]
    if model == EDITION:
        model = _edition(chance, numbers)
    newest = seen.get(base_of(model))
    wish = Wish(chance.choices(("keep", "recompute", "finish", "abort"), (50, 15, 20, 15))[0])
    if newest is not None and wish.policy == "keep" and chance.random() < 0.4:
        wish = Wish(min_version=newest)
    elif newest is not None and wish.policy in ("finish", "abort") and chance.random() < 0.4:
        wish = Wish(wish.policy, version=newest)
    beams = chance.choice((2, 3)) if chance.random() < BEAMS else 0
    return Question(
        model=model,
        route="/v1/completions" if beams else chance.choice(("/generate", "/v1/completions")),
        stream=not beams and chance.random() < 0.7,
        length=chance.randint(8, LONGEST // 6 if beams else LONGEST),
        beams=beams,
        prompt=tuple(chance.randint(3, 90) for _ in range(chance.randint(4, 40))),
        wish=wish,
    )


def _gone(made: Attempt) -> bool:
    """Whether the adapter is not there, or never will be served, so that the question is given up."""
    return is_adapter(made.model) and made.status in (404, 422)


TIMEOUT = httpx.Timeout(45.0, connect=3.0)  # longer than a gateway lets an instance be silent
THINK_S = (0.05, 0.4)
LONGEST_PAUSE_S = 2.0


@dataclass
class Client:
    """One at a time. `urls` are the gateways, one on each host. `numbers`: see `drawn`; all clients learn from all."""

    urls: list[str]
    chance: random.Random
    file: BinaryIO
    at: int
    numbers: dict[str, int]
    newest: dict[str, int] = field(default_factory=dict)
    connections: dict[int, httpx.AsyncClient] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._until_answered(drawn(self.chance, self.newest, self.numbers), stop)
            await asyncio.sleep(self.chance.uniform(*THINK_S))
        for http in self.connections.values():
            await http.aclose()

    async def _until_answered(self, question: Question, stop: asyncio.Event) -> None:
        asked = time.monotonic()
        while True:
            made = await attempt(self._http(), self.at, question, asked)
            self.file.write(made.line())
            self._learn(made)
            if made.outcome == "answered" or stop.is_set() or _gone(made):
                return
            question = self._next(question, made)
            await asyncio.sleep(min(LONGEST_PAUSE_S, made.retry_after or 0.2))

    def _learn(self, made: Attempt) -> None:
        if made.by is not None and made.version is not None:
            name, number = split_name(made.by)
            self.newest[base_of(made.by)] = made.version
            self.numbers |= {name: number} if number is not None else {}

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
        numbers = dict[str, int]()
        clients = [Client(urls, random.Random(f"{seed} {n}"), file, n % len(urls), numbers) for n in range(count)]
        tasks = [asyncio.create_task(client.run(stop)) for client in clients]
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:]))
