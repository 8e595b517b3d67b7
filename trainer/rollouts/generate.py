"""The gateway's `/generate`: a prompt's tokens in; tokens, log-probs and weight versions out, as a stream.

The tokens of a stream are kept. If a stream ends early (the connection is lost, the server is overloaded or restarts, a
swap did not wait for the answer any longer), the client asks for the rest: the prompt and the tokens so far go back as
the new prompt. So an answer may take as long as it needs, and none is begun again for what happens to it on the way.

A budget ends a call in the same way: the answer comes back unfinished, and another call, in another iteration and from
other weights, asks for its rest.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from trainer import routing
from trainer.config import GatewayConfig
from trainer.connection import Bearer, verify
from trainer.errors import RolloutError
from trainer.trajectory import LENGTH, REPEAT, UNFINISHED, Turn, VersionSpan

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
WEIGHTS_CHANGED = "weights_changed"
NOT_YET = "model_not_found"  # an adapter's commit record is there a moment before the instances have it
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0
LONGEST_WAIT_S = 30.0  # that a server's Retry-After may ask for
TIMES = 8  # a passage that often in a row is a circle
SEEDS = 2**31
STREAM_INTERVAL = 32  # tokens in an event of a stream: what an interruption can cost, and 32 times fewer events


@dataclass(frozen=True)
class Request:
    """`n` answers to one prompt, by the name `model` (None: what is served). `on_swap` says what a swap in the middle
    of an answer does to it (docs/api.md, policies); an answer whose last `stop_repeats` tokens repeat one passage is
    ended. `more` are further fields of the body, `key` is another key
    than the configuration's. `routed_from`: the experts are wanted that tokens went to, from this one on (None: they
    are not)."""

    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    on_swap: str = "keep"
    model: str | None = None
    stop_repeats: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)
    routed_from: int | None = None

    def split(self) -> list[Request]:
        """One request an answer. The engine adds an answer's index to the seed, so these give the same answers."""
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def after(self, token_ids: Sequence[int]) -> Request:
        """The rest of an answer that has begun with these tokens. It goes on with another seed, since the same one
        would repeat the choices that were made."""
        seed = None if self.seed is None else (self.seed + len(token_ids)) % SEEDS
        prompt, left = (*self.prompt_ids, *token_ids), self.max_tokens - len(token_ids)
        return replace(self, prompt_ids=prompt, max_tokens=left, seed=seed)

    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "prompt_token_ids": self.prompt_ids,
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": True,
            "stream": True,
            "stream_interval": STREAM_INTERVAL,
        }
        if self.model is not None:
            body["model"] = self.model
        if self.on_swap != "keep":
            body["hotswap"] = {"policy": self.on_swap}
        if self.routed_from is not None:
            body |= {"routed_experts": True, "routed_experts_prompt_start": self.routed_from}
        body |= self.more
        return body if self.seed is None else body | {"seed": self.seed}


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens as a turn, and why it ended; UNFINISHED if it is to go on."""

    turn: Turn
    finish_reason: str


class GenerateClient:
    """The gateway's `/generate`, with retries. Bound to the event loop it is first used on."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError when a key or certificates are missing."""
        self._config = config
        self._room = asyncio.Semaphore(config.concurrency)  # httpx's own waiting line is slow with hundreds in it
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        timeout = httpx.Timeout(config.timeout_s, connect=5.0, pool=None)
        self._http = httpx.AsyncClient(
            base_url=config.url,
            headers={"content-type": "application/json"},
            auth=Bearer(config.api_key),
            verify=verify(config),
            limits=limits,
            timeout=timeout,
        )

    async def generate(
        self, request: Request, begun: Turn | None = None, budget: int | None = None
    ) -> tuple[Answer, ...]:
        """`request.n` answers in index order. At most `concurrency` requests are under way, the others wait in line.
        Retries what may pass (connection lost, 429, 5xx) for `retry_s` seconds since the last token that came. Silence
        of `timeout_s` ends a stream.

        `budget`: the most tokens that each answer gets in this call; one that is not complete then comes back
        UNFINISHED. `begun` is what an earlier call brought of the request's only answer.

        Raises RolloutError after `retry_s`, and for a refusal or an answer that breaks the contract.
        """
        assert begun is None or request.n == 1
        drafts = [_Draft.of(request, begun, budget) for _ in range(request.n)]
        patience = _Patience(self._config)
        async with self._room:
            while any(draft.finish_reason is None for draft in drafts):
                before = sum(len(draft.token_ids) for draft in drafts)
                try:
                    await self._go_on(request, drafts)
                except _Interrupted as interruption:
                    progress = sum(len(draft.token_ids) for draft in drafts) > before
                    await patience.pause(interruption, progress=progress)
        return tuple(draft.answer() for draft in drafts)

    async def close(self) -> None:
        await self._http.aclose()

    async def _go_on(self, request: Request, drafts: list[_Draft]) -> None:
        """All of them at once, unless some have begun: then each one's rest. Raises _Interrupted."""
        if not any(draft.token_ids or draft.finish_reason for draft in drafts):
            await self._stream(drafts[0].rest(request), drafts)
            return
        rests = [(d, d.rest(one)) for d, one in zip(drafts, request.split(), strict=True) if not d.finish_reason]
        try:
            async with asyncio.TaskGroup() as tasks:
                for draft, rest in rests:
                    tasks.create_task(self._stream(rest, [draft]))
        except ExceptionGroup as errors:  # what the others have is kept
            raise errors.exceptions[0] from None

    async def _stream(self, request: Request, drafts: list[_Draft]) -> None:
        """Write what comes into the drafts, as it comes. Raises _Interrupted, RolloutError."""
        if request.max_tokens <= 0:
            drafts[0].end(LENGTH)
            return
        for draft in drafts:
            draft.begin()
        own = httpx.USE_CLIENT_DEFAULT if request.key is None else Bearer(lambda: request.key)
        content = orjson.dumps(request.body())
        try:
            async with self._http.stream("POST", "/generate", content=content, auth=own) as response:
                if response.status_code != 200:
                    raise _problem(response.status_code, await response.aread(), response.headers)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise ValueError(f"a {response.headers.get('content-type')} instead of a stream of events")
                async for name, data in _events(response):
                    if name == "error":
                        raise _problem(int(data["error"].get("status", 500)), orjson.dumps(data), httpx.Headers())
                    for choice in [data] if name == "token" else data["choices"]:
                        drafts[choice["index"]].take(choice)
                    if all(draft.finish_reason for draft in drafts):
                        return  # one that repeats itself is left to the server, which sees its client leave
        except httpx.TransportError as error:
            raise _Interrupted(str(error) or type(error).__name__) from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RolloutError(
                f"/generate answered something else than its contract ({error!r}). Is this hotswap, of this version?"
            ) from None
        if any(draft.finish_reason is None for draft in drafts):
            raise _Interrupted("the stream ended before the answer did")


class _Interrupted(Exception):
    """The rest is to be asked for again, after `wait_s` if the server said so. `swap`: weights changed, which is no
    fault."""

    def __init__(self, problem: str, wait_s: float | None = None, *, swap: bool = False) -> None:
        self.problem, self.wait_s, self.swap = problem, wait_s, swap
        super().__init__(problem)


@dataclass
class _Draft:
    """One answer so far; `begun` of its tokens came before the request that is under way. The answer may have `most`
    tokens, and `limit` of them when the call ends."""

    most: int
    limit: int
    stop_repeats: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    earlier: tuple[VersionSpan, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    begun: int = 0
    finish_reason: str | None = None
    routing: str | None = None

    @staticmethod
    def of(request: Request, turn: Turn | None, budget: int | None) -> _Draft:
        """Of an answer to the request, of which `turn` has come before."""
        turn = turn or Turn((), ())
        there, most = len(turn.token_ids), request.max_tokens
        limit = most if budget is None else min(there + budget, most)
        tokens, logprobs = list(turn.token_ids), list(turn.logprobs or ())
        return _Draft(most, limit, request.stop_repeats, tokens, logprobs, turn.versions, routing=turn.routing)

    def rest(self, request: Request) -> Request:
        """The request for the rest of the answer, made of the request for all of it."""
        rest = replace(request.after(self.token_ids), max_tokens=self.limit - len(self.token_ids))
        if rest.routed_from is None:
            return rest
        return replace(rest, routed_from=rest.routed_from + routing.tokens(self.routing))

    def end(self, reason: str) -> None:
        """The server ends with LENGTH where it was told to: that is the end of the call, or that of the answer."""
        cut = reason == LENGTH and len(self.token_ids) == self.limit < self.most
        self.finish_reason = UNFINISHED if cut else reason

    def begin(self) -> None:
        self.earlier, self.spans, self.begun = self.earlier + self.spans, (), len(self.token_ids)

    def take(self, choice: dict[str, Any]) -> None:
        """Its next tokens, or what the end says of all of them."""
        if self.finish_reason == REPEAT:
            return
        tokens, logprobs = choice.get("token_ids", ()), choice.get("logprobs", ())
        if len(tokens) != len(logprobs):
            raise ValueError("tokens without log-probs")
        self.token_ids += tokens
        self.logprobs += logprobs
        if "weight_versions" in choice:
            spans = (VersionSpan(v["version"], v["start"], v["end"]) for v in choice["weight_versions"])
            self.spans = tuple(span.shifted(self.begun) for span in spans)
        elif "weight_version" in choice and tokens:
            self._written_by(choice["weight_version"])
        if (reason := choice.get("finish_reason")) is not None:
            if reason == "abort":
                raise _Interrupted("the server gave the answer up")
            self.routing = routing.joined(self.routing, choice.get("routed_experts"))
            self.end(reason)
        elif self.stop_repeats and tokens and repeats(self.token_ids[-self.stop_repeats :], self.stop_repeats):
            self.finish_reason = REPEAT

    def answer(self) -> Answer:
        assert self.finish_reason is not None
        versions = _joined(self.earlier + self.spans)
        turn = Turn(tuple(self.token_ids), tuple(self.logprobs), versions, routing=self.routing)
        return Answer(turn, self.finish_reason)

    def _written_by(self, version: int) -> None:
        end = len(self.token_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans = (*self.spans[:-1], replace(self.spans[-1], end=end))
        else:
            start = self.spans[-1].end if self.spans else self.begun
            self.spans = (*self.spans, VersionSpan(version, start, end))


def repeats(tokens: Sequence[int], least: int) -> bool:
    """Whether there are `least` tokens, and they are one passage `TIMES` times or more (the last may be cut off).

    The shortest period of a sequence is its length less its longest border (Knuth, Morris and Pratt 1977).
    """
    if len(tokens) < least:
        return False
    border = [0] * len(tokens)
    for i in range(1, len(tokens)):
        k = border[i - 1]
        while k and tokens[i] != tokens[k]:
            k = border[k - 1]
        border[i] = k + 1 if tokens[i] == tokens[k] else 0
    return (len(tokens) - border[-1]) * TIMES <= len(tokens)


def _joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version as one span."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            joined[-1] = replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return tuple(joined)


class _Patience:
    """How long to go on after interruptions in a row that brought no token."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._deadline, self._delay = math.inf, FIRST_DELAY_S

    async def pause(self, interruption: _Interrupted, *, progress: bool) -> None:
        """Wait before the next try. Raises RolloutError when it has been enough."""
        if progress or interruption.swap:
            self._relax()
        else:
            self._deadline = min(self._deadline, time.monotonic() + self._config.retry_s)
        wait = self._delay if interruption.wait_s is None else max(interruption.wait_s, self._delay)
        if time.monotonic() + wait > self._deadline:
            raise RolloutError(
                f"no rollout from {self._config.url} within {self._config.retry_s:g} s; last: {interruption.problem}. "
                "Start the server with `hotswap up`, or set gateway.url."
            )
        self._delay = min(2 * self._delay, LONGEST_DELAY_S) if not interruption.swap else FIRST_DELAY_S
        await asyncio.sleep(wait)

    def _relax(self) -> None:
        self._deadline, self._delay = math.inf, FIRST_DELAY_S


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """(name, data) of the server-sent events that `/generate` writes: one line of each."""
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, orjson.loads(line.removeprefix("data: "))


def _problem(status: int, content: bytes, headers: httpx.Headers) -> Exception:
    """The exception for an error that the server answered."""
    code, problem = error_part(content, "code"), f"HTTP {status}: {error_part(content, 'message')}"
    if code == WEIGHTS_CHANGED:
        return _Interrupted(problem, swap=True)
    if status in RETRYABLE or code == NOT_YET:
        return _Interrupted(problem, retry_after(headers))
    return RolloutError(f"the gateway refused a rollout ({problem}).", status=status)


def error_part(content: bytes, part: str) -> str:
    """The `message` or `code` of an error's body; of any other body its beginning."""
    try:
        return str(orjson.loads(content)["error"][part])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def retry_after(headers: httpx.Headers) -> float | None:
    try:
        return min(float(headers["retry-after"]), LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return None
