"""The outcome of a request, read from the bytes of its answer: the versions of its tokens, and how it ended.

A request is one line of a history: `named` is the model that it asks for ("": its body is not known), `model` is the
one that answers, `asked` is what it asks of swaps (policy, version, min_version), `outcome` is

    answered    whole, and with its last event
    refused     with an error that has a message, a type and a code, at once or in its middle; `code` is that
    untyped     with an error that has not
    cut         the connection broke, or the body ended before the answer did
    left        the client went away

and each of `choices` has the spans of its tokens and of its prompt, the ids of the tokens as far as the answer has them
(each with how often it comes in a row), and how many other instances went on with it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from loadtest.histories.recorder import Log

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
MOST = 8 << 20  # bytes of an answer; a larger one (it has logits, say) is not recorded
PLAIN = {
    "hotswap", "ignore_eos", "logprobs", "max_tokens", "messages", "model", "n", "prompt", "prompt_logprobs",
    "prompt_token_ids", "return_token_ids", "seed", "stream", "temperature",
}  # fmt: skip
Outcome = Literal["answered", "refused", "untyped", "cut", "left"]
Span = Mapping[str, int]


@dataclass
class Choice:
    """As much of it as arrived."""

    spans: list[Span] = field(default_factory=list)
    prompt: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    resumed: int = 0
    whole: bool = False

    def take(self, choice: Mapping[str, Any], version: int | None) -> None:
        start = len(self.tokens)
        self.tokens += choice.get("token_ids") or ()
        told = choice.get("hotswap_weight_versions", choice.get("weight_versions"))
        if told:  # all of them, or those of a piece that two versions wrote; with versions as text in vLLM's own field
            spans = [{**span, "version": int(span["version"])} for span in told]
            self.spans = _joined([span for span in self.spans if span["start"] < spans[0]["start"]], spans)
        elif told is None and version is not None and not self.whole:
            self.spans = _joined(self.spans, [{"version": version, "start": start, "end": len(self.tokens)}])
        self.whole = self.whole or choice.get("finish_reason") is not None
        self.prompt = choice.get("prompt_weight_versions", self.prompt)
        self.resumed = len(choice.get("resumed_at") or ()) or self.resumed

    def shown(self) -> dict[str, Any]:
        tokens = [[token, sum(1 for _ in group)] for token, group in itertools.groupby(self.tokens)]
        return {"spans": self.spans, "prompt": self.prompt, "tokens": tokens, "resumed": self.resumed}


def _joined(known: Sequence[Span], new: Sequence[Span]) -> list[Span]:
    """Where one version goes on, it has one span."""
    if known and known[-1]["version"] == new[0]["version"] and known[-1]["end"] >= new[0]["start"]:
        new = [{**new[0], "start": known[-1]["start"]}, *new[1:]]
        known = known[:-1]
    return [*known, *new]


@dataclass
class Answer:
    """One answer, as it arrives."""

    choices: dict[int, Choice] = field(default_factory=dict)
    model: str = ""
    outcome: Outcome = "left"
    code: str = ""
    message: str = ""

    def take(self, event: str, data: Mapping[str, Any]) -> None:
        """An event of a stream, or a whole body (`event` is ""). Raises LookupError, TypeError for what is neither."""
        if isinstance(data, list) or (isinstance(data, dict) and "meta_info" in data):
            self.take_sglang(data)
            self.outcome = "answered" if event == "done" else self.outcome
            return None
        if event == "error" or data.get("error") is not None:
            return self.refuse(data.get("error"))
        self.model = data.get("model", self.model)
        for choice in [data] if event == "token" and "token_ids" in data else data["choices"]:
            known = self.choices.setdefault(choice.get("index", 0), Choice())
            known.take(choice, choice.get("weight_version", data.get("weight_version")))
        if event == "done":
            self.outcome = "answered"
        return None

    def take_sglang(self, told: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Answers in SGLang's form, each whole as far as it has come. Raises LookupError, TypeError for others."""
        for place, one in enumerate(told if isinstance(told, list) else [told]):
            about = one["meta_info"]
            self.choices[one.get("index", place)] = choice = Choice()
            choice.take({**about, "token_ids": one["output_ids"]}, None)

    def refuse(self, error: object) -> None:
        self.outcome, self.message = "untyped", str(error)[:300]
        if isinstance(error, dict) and all(isinstance(error.get(key), str) for key in ("message", "type")):
            code = error.get("code")
            typed = isinstance(code, str) or (type(code) is int and code < 500)  # vLLM's own, of what is wrong with it
            self.outcome, self.code = ("refused", str(code)) if typed else ("untyped", "")

    def read(self, status: int, streamed: bool, body: bytes, broken: tuple[Outcome, str] | None = None) -> None:
        """All of it that arrived. `broken`: why no more did, "cut" or "left" and a word; None if the body has ended."""
        try:
            if streamed:
                self._lines(body.decode(errors="replace"))
            elif broken is None:
                self.take("done", orjson.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.outcome, self.code, self.message = "untyped", type(error).__name__, f"not an answer: {error}"
        if self.outcome == "left":
            self.outcome, self.code = broken or ("cut", "Incomplete")
        if broken is None and status != 200 and self.outcome != "refused":
            self.outcome, self.code, self.message = "untyped", "", body.decode(errors="replace")[:300]

    def _lines(self, text: str) -> None:
        event = ""
        for line in text.split("\n")[:-1]:
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.rstrip() == "data: [DONE]":
                self.outcome = "answered" if self.outcome == "left" else self.outcome
            elif line.startswith("data: "):
                self.take(event, orjson.loads(line.removeprefix("data: ")))
                event = ""


@dataclass
class _Tap:
    """A request of httpx (`library`: or of what has its classes) on its way, and what has come of its answer."""

    library: Any
    log: Log
    request: httpx.Request
    began: float
    status: int = 0
    streamed: bool = False
    body: bytearray = field(default_factory=bytearray)

    def end(self, broken: tuple[Outcome, str] | None = None) -> None:
        log, self.log = self.log, None  # type: ignore[assignment]  # once
        if log is None or len(self.body) > MOST:
            return
        answer = Answer()
        answer.read(self.status, self.streamed, bytes(self.body), broken)
        url, body = self.request.url, _body(self.request)
        log.write(
            "request", began=self.began, server=url.netloc.decode(), route=url.path, status=self.status,
            model=answer.model, named=str(body.get("model", "")), asked=_asked(self.request, body),
            length=_length(body), outcome=answer.outcome, code=answer.code,
            choices=[choice.shown() for choice in answer.choices.values()],
        )  # fmt: skip

    def fail(self, error: BaseException) -> None:
        timed_out = isinstance(error, self.library.TimeoutException)  # it is the client that has had enough
        broke = isinstance(error, self.library.TransportError) and not timed_out
        self.end(("cut" if broke else "left", type(error).__name__))


class _Stream:
    def __init__(self, stream: Any, tap: _Tap) -> None:
        self._stream, self._tap = stream, tap

    def __iter__(self) -> Iterator[bytes]:
        try:
            for piece in self._stream:
                self._tap.body += piece
                yield piece
        except BaseException as error:
            self._tap.fail(error)
            raise
        self._tap.end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._stream:
                self._tap.body += piece
                yield piece
        except BaseException as error:
            self._tap.fail(error)
            raise
        self._tap.end()

    def close(self) -> None:
        self._tap.end(("left", "closed"))
        self._stream.close()

    async def aclose(self) -> None:
        self._tap.end(("left", "closed"))
        await self._stream.aclose()


def tap(log_of: Callable[[httpx.URL], Log | None], *libraries: Any) -> None:
    """From now on all requests of this process by way of httpx, and of other `libraries` with its classes, are recorded
    in the log of where they go."""
    for library in (httpx, *libraries):
        _tap(log_of, library)


def _tap(log_of: Callable[[httpx.URL], Log | None], library: Any) -> None:
    cold, cold_async = library.HTTPTransport.handle_request, library.AsyncHTTPTransport.handle_async_request
    stream = type("_Stream", (_Stream, library.SyncByteStream, library.AsyncByteStream), {})

    def tapped(request: httpx.Request) -> _Tap | None:
        log = log_of(request.url) if request.method == "POST" and request.url.path in ROUTES else None
        return _Tap(library, log, request, time.time()) if log is not None else None

    def follow(response: httpx.Response, tap: _Tap) -> httpx.Response:
        tap.status = response.status_code
        tap.streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = stream(response.stream, tap)
        return response

    def handle(self: Any, request: httpx.Request) -> httpx.Response:
        if (tap := tapped(request)) is None:
            return cold(self, request)  # type: ignore[no-any-return]
        try:
            return follow(cold(self, request), tap)
        except BaseException as error:
            tap.fail(error)
            raise

    async def handle_async(self: Any, request: httpx.Request) -> httpx.Response:
        if (tap := tapped(request)) is None:
            return await cold_async(self, request)  # type: ignore[no-any-return]
        try:
            return follow(await cold_async(self, request), tap)
        except BaseException as error:
            tap.fail(error)
            raise

    library.HTTPTransport.handle_request = handle
    library.AsyncHTTPTransport.handle_async_request = handle_async


def _body(request: httpx.Request) -> dict[str, Any]:
    """Empty if it is streamed, or is no JSON object."""
    try:
        body = orjson.loads(request.content)
    except (RuntimeError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _asked(request: httpx.Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """Wishes of a request about swaps, by header or by field."""
    asked = body.get("hotswap")
    found = dict(asked) if isinstance(asked, dict) else {}
    for name in ("policy", "version", "min_version"):
        if (value := request.headers.get(f"x-hotswap-{name.replace('_', '-')}")) is not None:
            found[name] = int(value) if value.isdecimal() else value
    return {name: found[name] for name in ("policy", "version", "min_version") if name in found}


def _length(body: Mapping[str, Any]) -> int | None:
    """How many tokens it asks for, if nothing may end its answer before."""
    plain = body.get("ignore_eos") is True and body.keys() <= PLAIN
    return body.get("max_tokens") if plain else None
