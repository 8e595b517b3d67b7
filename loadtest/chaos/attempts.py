"""One attempt to get an answer: it comes, or the server says why not, or the connection breaks."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import httpx
import orjson

from loadtest.chaos.answers import Answer, Wish, problems

FINISH_S, WAIT_S = 5.0, 5.0
LONGEST = 300  # tokens: some answers last over a swap
Outcome = Literal["answered", "refused", "untyped", "cut"]


@dataclass(frozen=True)
class Question:
    """A request, whoever is asked."""

    route: str
    stream: bool
    length: int
    prompt: tuple[int, ...]
    wish: Wish

    def body(self, model: str) -> dict[str, Any]:
        shared = {"model": model, "max_tokens": self.length, "temperature": 0, "ignore_eos": True}
        shared |= {"stream": self.stream, "hotswap": self.wish.body(FINISH_S, WAIT_S)}
        if self.route == "/generate":
            return shared | {"prompt_token_ids": self.prompt}
        return shared | {"prompt": self.prompt, "return_token_ids": True}


@dataclass
class Attempt:
    """What came of it; times are monotonic seconds of this machine. `asked`: when its question was asked first.

    `code` is the error's, or the class of what broke the connection.
    """

    gateway: int
    began: float
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


async def attempt(http: httpx.AsyncClient, gateway: int, model: str, question: Question, asked: float) -> Attempt:
    """Asks once; `asked`: when this question was asked first."""
    wish = question.wish
    bound = wish.version is not None or wish.min_version is not None
    made = Attempt(gateway, time.monotonic(), question.route, question.stream, wish.policy, bound, asked)
    answer = Answer()
    try:
        await _ask(http, question, model, answer)
    except Refused as refusal:
        _note_refusal(made, refusal)
    except (httpx.TransportError, Incomplete) as error:
        made.outcome, made.code, made.message = "cut", type(error).__name__, str(error)
    except (ValueError, TypeError, LookupError) as error:  # neither an answer nor an error of the API
        made.outcome, made.code, made.message = "untyped", type(error).__name__, f"not an answer: {error}"
    made.ended = time.monotonic()
    made.tokens, made.resumed = len(answer.tokens), answer.resumed
    made.crossed = len(set(answer.versions)) > 1
    made.version = answer.versions[-1] if answer.versions else None
    made.problems = [(kind, said) for kind, said in problems(answer, question.length, wish)]
    return made


def _note_refusal(made: Attempt, refusal: Refused) -> None:
    error = refusal.error
    typed = isinstance(error, dict) and all(isinstance(error.get(k), str) for k in ("message", "type", "code"))
    made.status, made.message = refusal.status, str(refusal)
    made.outcome = "refused" if typed else "untyped"
    made.code = error["code"] if typed and isinstance(error, dict) else ""
    made.retry_after = refusal.retry_after


async def _ask(http: httpx.AsyncClient, question: Question, model: str, answer: Answer) -> None:
    async with http.stream("POST", question.route, json=question.body(model)) as response:
        if response.status_code != 200:
            body = _parsed(await response.aread())
            error = body.get("error") if isinstance(body, dict) else body
            after = response.headers.get("retry-after")
            raise Refused(response.status_code, error, float(after) if after else None)
        if not question.stream:
            choice = orjson.loads(await response.aread())["choices"][0]
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
    for choice in data["choices"]:
        answer.take(choice.get("token_ids") or (), data.get("weight_version"))
        if "weight_versions" in choice:
            answer.take_end(choice)


def _parsed(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def drawn(chance: random.Random, newest: int | None) -> Question:
    """A question at random; `newest` is the last version that was seen in an answer."""
    wish = Wish(chance.choices(("keep", "recompute", "finish", "abort"), (50, 15, 20, 15))[0])
    if newest is not None and wish.policy == "keep" and chance.random() < 0.4:
        wish = Wish(min_version=newest)
    elif newest is not None and wish.policy in ("finish", "abort") and chance.random() < 0.4:
        wish = Wish(wish.policy, version=newest)
    return Question(
        route=chance.choice(("/generate", "/v1/completions")),
        stream=chance.random() < 0.7,
        length=chance.randint(8, LONGEST),
        prompt=tuple(chance.randint(3, 90) for _ in range(chance.randint(4, 40))),
        wish=wish,
    )
