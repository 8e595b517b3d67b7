"""Provenance: which weights wrote which token, collected from the engine's outputs and written into every answer.

The engine marks each output with spans (version, first token, end). A `Trace` follows one HTTP request; the engine
wrapper feeds it, and an ASGI middleware writes what it knows into the answer, as fields that OpenAI SDKs keep as
extras. An answer may take several calls of the engine: one for each prompt of a body, one after the other where vLLM
runs tools between them, one for each token of each beam. A swap sees one request in them, from the first call to the
end of the answer. One version writes all of it if the policy is `abort` or `finish`.

    x-hotswap-weight-version: 7                     header; the version that wrote the first token
    "weight_version": 7                             top level of a body or stream chunk: wrote its last token
    "weight_versions": [{"version", "start", "end"}]   per choice, over its output tokens: on the last chunk, on whole
                                                    bodies, and on a chunk whose tokens two versions wrote
                                                    With `return_weight_versions` in the request, it is vLLM's own
                                                    field of that name: versions as text, on last chunks and whole
                                                    bodies alone; the chunk of two versions has its spans in
                                                    "hotswap_weight_versions"
    "prompt_weight_versions": [{"version", "start", "end"}]   beside it on whole bodies and last chunks: the versions
                                                    that computed the prompt's keys and values for the first token
    "hotswap_usage": {"prompt_tokens", "completion_tokens"}   in a chunk that ends a choice, and in one before which a
                                                    stream had more tokens than chunks, where it has no `usage`: of all
                                                    choices so far. Either stands near the end of what it counts, where
                                                    the gateway reads it (server/gateway/wire/bodies.py). A stream that
                                                    is cut without either is charged a token a chunk
    "token_ids": [17]                               per choice, in streams that another instance can go on with
    "resumed_at": [12]                              per choice, on the last chunk of a stream that others went on with:
                                                    how many tokens it had each time
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import orjson

from server.errors import error_body
from server.instance.requests import check_count
from weightsync.vllm_engine.engine_core.prefixes import FIELD

from . import replay, routed_experts
from .inflight import Inflight, Problem, Wish, version_mismatch, weights_changed
from .replay import Replaying
from .routed_experts import Recording

log = logging.getLogger("hotswap.instance")
MOST_SCORES = 2**20  # log-probabilities of prompt tokens in one answer: about 100 bytes each, and written in one call
Span = dict[str, int]
MESSAGES = ("message", "message_delta")
RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
CHAINED = frozenset({"/v1/responses"})  # where vLLM calls the engine again with what tools have answered
current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


class Trace:
    """Version spans of one HTTP request, by choice index. Several prompts in one body number their choices on, and
    chained calls of the engine go on with the one choice."""

    def __init__(self, wish: Wish | None = None, replaying: Replaying | None = None, path: str = "") -> None:
        self.path = path
        self.wish = wish or Wish()
        self.replaying = replaying or Replaying()
        self.problem: Problem | None = None
        self.failed = False  # an error was the last event of its stream
        self.as_vllm = False  # the client wants spans in vLLM's form
        self.prefixes: list[tuple[int, float]] = []  # of the body, and the share of the prompt that each is
        self.wants_routing: bool | None = None  # None: the route tells it as vLLM does
        self._routing: dict[int, Any] = {}  # of answers that are complete, by choice
        self.begun = False  # the engine has answered
        self._prompts: dict[int, list[Span]] = {}
        self._spans: dict[int, list[Span]] = {}
        self._sent: dict[int, int] = {}
        self._prompt_tokens: dict[int, int] = {}  # by first choice
        self._tokens = self._events = 0  # of all choices
        self._calls = 0
        self.running = 0  # choices of calls that have not ended
        self._scores = 0  # log-probabilities of prompt tokens that were asked for
        self._earlier: list[Span] = []  # of the calls before, where they are chained
        self._beams = False
        self._versions: set[int] = set()  # that wrote any of it
        self._users = 0  # the answer, and calls of the engine for it
        self._held: contextlib.ExitStack | None = None  # once it was let in, until its last user has ended
        self.began: int | None = None  # the version that answered when it was let in

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """The answer is being made, or a call of the engine for it. Notes the Problem that ends it."""
        self._users += 1
        try:
            yield
        except Problem as problem:
            self.problem = problem
            raise
        finally:
            self._users -= 1
            if not self._users and self._held is not None:
                self._held.close()
                self._held = None

    async def admit(self, inflight: Inflight) -> None:
        """Return when the answer may begin, at once if it has: a swap may wait for its end. Raises Problem
        (version_mismatch)."""
        if self._held is None:
            await inflight.admit(self.wish)
            _check_resumed(self, inflight)
        if self._held is None:  # not by another of its calls meanwhile
            self.began, self._held = inflight.active, contextlib.ExitStack()
            self._held.enter_context(inflight.running(self.wish))

    def check(self, *versions: int) -> None:
        """`versions` have written some of it. Raises Problem (weights_changed) if one has to write all of it.

        A resumed answer has chosen otherwise.
        """
        self._versions.update(versions)
        one = self.wish.policy in ("abort", "finish") and self.replaying.resume is None
        if one and len(self._versions) > 1:
            raise weights_changed()

    def open(self, choices: int) -> int:
        """A new engine request with `choices` samples; returns the index of its first choice."""
        self._calls += 1
        if self.path in CHAINED:
            self._earlier = self.spans(0)
            self._prompt_tokens[-self._calls] = self._prompt_tokens.pop(0, 0)  # of the call before
            return 0
        return (self._calls - 1) * choices

    def open_beams(self, width: int) -> int:
        """The same for a beam search. A swap waits for it as for `finish`, unless the policy is `abort`."""
        self._beams = True
        if self.wish.policy != "abort":
            self.wish = replace(self.wish, policy="finish")
        return self.open(width)

    def open_for(self, prompt: Any, params: Any) -> int:
        """The same, for this prompt and these sampling parameters, which are given what the engine must know.

        Raises VLLMValidationError if the answer would be too large.
        """
        self._count_scores(prompt, params)
        check_count(self.running + (params.n or 1))
        self.running += params.n or 1
        base = 0 if self._beams else self.open(params.n or 1)
        self.replaying.begins(self._calls, prompt, params)
        # Always written: what a client puts there itself (vllm_xargs) must not reach the engine.
        asked = self.wish.for_engine() | self.replaying.for_engine()
        if self.prefixes and self._calls == 1 and not self._beams:  # later ones are of other prompts in the body
            asked[FIELD] = self.prefixes
        params.extra_args = {**(params.extra_args or {}), "hotswap": asked}
        return base

    def _count_scores(self, prompt: Any, params: Any) -> None:
        """An answer is written in one call, for which every stream of this instance stands still."""
        each = getattr(params, "prompt_logprobs", None)
        if each is None or not isinstance(prompt, Mapping):
            return
        self._scores += len(prompt.get("prompt_token_ids") or ()) * (each + 1)
        if self._scores > MOST_SCORES:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                f"the prompts of this request ask for over {MOST_SCORES} log-probabilities; send fewer prompts in one "
                "request, or ask for fewer `prompt_logprobs`",
                parameter="prompt_logprobs",
            )

    def record(self, base: int, outputs: Sequence[Any], prompt_tokens: int = 0, *, whole: bool = False) -> None:
        """Note the spans of an engine output (`RequestOutput.outputs`). Raises Problem (weights_changed).

        `whole`: it is the end of a beam search, and not one call for it.
        """
        self.begun = True
        self.check(*(int(span.version) for output in outputs for span in output.weight_versions or ()))
        if self._beams and not whole:
            return
        self._prompt_tokens[base] = prompt_tokens or self._prompt_tokens.get(base, 0)
        for output in outputs:
            choice = base + output.index
            if output.weight_versions:
                spans = joined(self._earlier, to_spans(output.weight_versions))
                before, self._spans[choice] = self.spans(choice), spans
                self._tokens += _end(self._spans[choice]) - _end(before)
            if self._spans.get(choice) and choice not in self._prompts:
                self._prompts[choice] = prompt_spans(output, self._spans[choice][0]["version"], prompt_tokens)
            if getattr(output, "routed_experts", None) is not None:
                self._routing[choice] = output.routed_experts
        self.replaying.record(outputs)

    def record_beams(self, base: int, answer: Any) -> None:
        """Note the beams of one prompt, all of which one version has written."""
        from vllm.outputs import WeightVersionSpan

        for beam in answer.outputs:
            beam.weight_versions = [WeightVersionSpan(str(v), 0, len(beam.token_ids)) for v in self._versions]
        self.record(base, answer.outputs, len(answer.prompt_token_ids), whole=True)

    def prompt(self, choice: int) -> list[Span]:
        """The versions that computed the prompt's keys and values, over its tokens."""
        return self._prompts.get(choice, [])

    def spans(self, choice: int) -> list[Span]:
        return self._spans.get(choice, [])

    def told(self, choice: int) -> list[Span] | list[dict[str, Any]]:
        """The spans of a whole answer, in the form that the client wants."""
        spans = self.spans(choice)
        return [{**span, "version": str(span["version"])} for span in spans] if self.as_vllm else spans

    def routing(self, choice: int) -> dict[str, str | None]:
        """The field of an answer that is complete, if its routing was asked for."""
        if not self.wants_routing:
            return {}
        found = self._routing.get(choice)
        return {routed_experts.FIELD: None if found is None else routed_experts.encoded(found)}

    def version(self, choice: int = 0) -> int | None:
        """The version that wrote the choice's latest token."""
        spans = self.spans(choice)
        return spans[-1]["version"] if spans else None

    def first_version(self) -> int | None:
        spans = next(iter(self._spans.values()), [])
        return spans[0]["version"] if spans else None

    def usage(self) -> dict[str, int]:
        """Tokens so far, over all prompts and choices."""
        return {"prompt_tokens": sum(self._prompt_tokens.values()), "completion_tokens": self._tokens}

    def must_count(self) -> bool:
        """Called for each event of a stream: whether it has to carry `usage`, having had more tokens than events."""
        self._events += 1
        return self._tokens > self._events

    def take_new(self, choice: int) -> list[Span]:
        """Spans of the tokens that came since the last call, clipped to them."""
        done = self._sent.get(choice, 0)
        spans = [{**s, "start": max(s["start"], done)} for s in self.spans(choice) if s["end"] > done]
        if spans:
            self._sent[choice] = spans[-1]["end"]
        return spans


def to_spans(spans: Iterable[Any]) -> list[Span]:
    """vLLM's `WeightVersionSpan`s as JSON-ready dicts with integer versions."""
    return [{"version": int(s.version), "start": s.start, "end": s.end} for s in spans if s.end > s.start]


def joined(earlier: list[Span], spans: list[Span]) -> list[Span]:
    """The spans of tokens, and of those that follow them."""
    if not earlier or not spans:
        return earlier or spans
    end = _end(earlier)
    moved = [{**span, "start": span["start"] + end, "end": span["end"] + end} for span in spans]
    if earlier[-1]["version"] == moved[0]["version"]:
        return [*earlier[:-1], moved[0] | {"start": earlier[-1]["start"]}, *moved[1:]]
    return [*earlier, *moved]


def _end(spans: list[Span]) -> int:
    return spans[-1]["end"] if spans else 0


def prompt_spans(output: Any, version: int, prompt_tokens: int) -> list[Span]:
    """Spans over the prompt: `version` computed what follows the parts that the engine says others computed."""
    spans, start = [], 0
    for end, label in [*getattr(output, "hotswap_prompt", ()), (prompt_tokens, str(version))]:
        if end > start and label.isdecimal():
            spans.append({"version": int(label), "start": start, "end": end})
        start = max(start, end)
    return spans


def traced(
    generate: Callable[..., AsyncIterator[Any]], inflight: Inflight, recording: Recording | None = None
) -> Callable[..., AsyncIterator[Any]]:
    """`AsyncLLM.generate`, feeding the current request's trace and doing at swaps what its headers ask for.

    Raises Problem before anything is generated (version_mismatch), or when a swap ended the request (weights_changed)
    or its routing is lost (routing_lost).
    """

    def wrapper(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        trace = current_trace.get() or Trace()
        base = trace.open_for(prompt, sampling_params)
        if recording is not None:
            recording.prepare(prompt, sampling_params, wanted=trace.wants_routing)
        kwargs["priority"] = trace.wish.in_engine(kwargs.get("priority", 0))
        choices = sampling_params.n or 1

        def begin() -> AsyncIterator[Any]:
            outputs = generate(prompt, sampling_params, request_id, **kwargs)
            if recording is None or trace.wants_routing is False:
                return outputs
            return _whole(outputs, recording, sampling_params)

        return _follow(trace, base, choices, inflight, begin)

    return wrapper


def pooled(encode: Callable[..., AsyncIterator[Any]], inflight: Inflight) -> Callable[..., AsyncIterator[Any]]:
    """`AsyncLLM.encode`, in the caller's cache scope, and never over a swap that the request says it must not cross.

    Raises Problem before anything is computed (version_mismatch), or when a swap came between (weights_changed).
    """

    async def wrapper(prompt: Any, pooling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        trace = current_trace.get() or Trace()
        wish = trace.wish
        pooling_params.extra_kwargs = {**(pooling_params.extra_kwargs or {}), "hotswap": {"scope": wish.scope}}
        kwargs["priority"] = wish.in_engine(kwargs.get("priority", 0))
        with trace.lasting():
            await trace.admit(inflight)
            outputs = _accepted(encode(prompt, pooling_params, request_id, **kwargs))
            async with contextlib.aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    crossed = inflight.active != trace.began and wish.policy in ("abort", "finish")
                    ended = output.error is None and not output.outputs.data.numel()  # its adapter was withdrawn
                    if crossed or ended or not wish.allows(inflight.active):
                        raise weights_changed()
                    yield output

    return wrapper


async def _follow(
    trace: Trace, base: int, choices: int, inflight: Inflight, begin: Callable[[], AsyncIterator[Any]]
) -> AsyncIterator[Any]:
    try:
        with trace.lasting():
            await trace.admit(inflight)
            outputs = _accepted(begin())
            try:
                async for output in _with_replay(_uncut(outputs, trace, inflight), trace):
                    if trace.wants_routing is False:
                        routed_experts.strip(output.outputs)
                    trace.record(base, output.outputs, len(output.prompt_token_ids or ()))
                    yield output
            finally:
                await outputs.aclose()  # type: ignore[attr-defined]  # abort in the engine now, not when collected
    finally:
        trace.running -= choices


def beamed(search: Callable[..., AsyncIterator[Any]], inflight: Inflight) -> Callable[..., AsyncIterator[Any]]:
    """vLLM's `beam_search`, which calls the engine for each token of each beam. One version writes all of its answer.

    Spans could not tell it otherwise: the search compares scores of all beams, whichever version gave them. Raises
    Problem before anything is generated (version_mismatch), or when a swap ended the search (weights_changed).
    """

    @functools.wraps(search)
    def beam_search(self: Any, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any) -> Any:
        trace = current_trace.get() or Trace()
        base = trace.open_beams(params.beam_width)

        async def follow() -> AsyncIterator[Any]:
            with trace.lasting():
                await trace.admit(inflight)
                answers: Any = search(self, prompt, request_id, params, *args, **kwargs)
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        trace.record_beams(base, answer)
                        yield answer

        return follow()

    return beam_search


async def _whole(outputs: AsyncIterator[Any], recording: Recording, params: Any) -> AsyncIterator[Any]:
    """The engine's outputs. Raises Problem (routing_lost)."""
    async with contextlib.aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            recording.check(output, params)
            yield output


async def _accepted(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The engine's outputs. Raises VLLMValidationError, a 400 on every route, where vLLM fails over a field that its
    schema admits, before the engine has the request; vLLM itself would call that a fault of the engine's."""
    begun = False
    async with contextlib.aclosing(outputs):  # type: ignore[type-var]
        try:
            async for output in outputs:
                begun = True
                yield output
        except Exception as error:
            from vllm.exceptions import VLLMValidationError
            from vllm.v1.engine.exceptions import EngineGenerateError

            cause = error.__cause__ if isinstance(error, EngineGenerateError) else None
            if begun or not isinstance(cause, AttributeError | LookupError | TypeError | ValueError | ArithmeticError):
                raise
            log.warning("vLLM cannot take a request", exc_info=cause)
            raise VLLMValidationError(cannot_take(cause)) from error


def cannot_take(error: Exception) -> str:
    """The message to a client whose request has caused an error in vLLM's code."""
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"vLLM cannot take this request ({what}); check the types and ranges of its fields"


def _check_resumed(trace: Trace, inflight: Inflight) -> None:
    """Raises Problem (version_mismatch) if other weights run here than have to go on with the answer."""
    resume = trace.replaying.resume
    if resume is not None and resume.version not in (None, inflight.active):
        raise version_mismatch(inflight.active)


async def _with_replay(outputs: AsyncIterator[Any], trace: Trace) -> AsyncIterator[Any]:
    """The engine's outputs; before them, where the engine goes on with an answer, what the client has of it."""
    replaying = trace.replaying
    async for output in outputs:
        told = replay.replayed(output, replaying.resume) if replaying.resume is not None else None
        if told is not None:
            replaying.muted = True
            yield told
            replaying.muted = False
            trace.take_new(0)
            if told.finished:
                return
        yield output


async def _uncut(outputs: AsyncIterator[Any], trace: Trace, inflight: Inflight) -> AsyncIterator[Any]:
    """The engine's outputs; an end that the engine chose itself at a swap becomes the error it stands for."""
    async for output in outputs:
        if any(o.finish_reason == "abort" for o in output.outputs):
            began = trace.begun or trace.wish.allows(inflight.active)
            raise weights_changed() if began else version_mismatch(inflight.active)
        yield output


def annotate_chunk(body: bytes, trace: Trace) -> bytes:
    """Server-sent event(s) in `body` with the version of the tokens they carry, without those the client has, up to an
    error."""
    *events, rest = body.split(b"\n\n")
    out = b""
    for event in events:
        annotated = _annotate_event(event, trace)
        out += annotated + b"\n\n" if annotated else b""
        if trace.failed:
            return out
    return out + _annotate_event(rest, trace)


def _annotate_event(event: bytes, trace: Trace) -> bytes:
    head, found, data = event.partition(b"data: ")
    if not found or not data.startswith(b"{"):
        return event
    payload = orjson.loads(data)
    if "error" in (payload.get("object"), payload.get("type")) or payload.get("error") is not None:
        trace.failed = True
        return (
            event if trace.problem is None else head + b"data: " + orjson.dumps(problem_body(trace.problem, trace.path))
        )
    if trace.replaying.silences(payload):
        return b""
    trace.replaying.disguise(payload)
    annotate(payload, trace, last=_is_last(payload))
    return head + b"data: " + orjson.dumps(payload)


def _is_last(payload: dict[str, Any]) -> bool:
    if str(payload.get("type", "")).startswith("response."):
        return payload["type"] in RESPONSE_ENDS
    return any(c.get("finish_reason") for c in payload.get("choices") or ())


def annotate(payload: dict[str, Any], trace: Trace, *, last: bool) -> None:
    """Add the version fields to one JSON object: a whole body (`last`) or one chunk of a stream."""
    choices = payload.get("choices")
    if choices is None and isinstance(payload.get("response"), dict) and last:
        spans = {"weight_versions": trace.spans(0), "prompt_weight_versions": trace.prompt(0)}
        payload["response"] |= spans | trace.routing(0)
    elif choices is None and (payload.get("object") == "response" or payload.get("type") in MESSAGES):
        payload |= {"weight_versions": trace.spans(0), "prompt_weight_versions": trace.prompt(0)} | trace.routing(0)
    for choice in choices or ():
        index = choice.get("index", 0)
        new = [] if _opens(choice) else trace.take_new(index)
        trace.replaying.stamp(choice, trace.prompt(index))
        choice.pop("weight_versions", None)  # vLLM 0.33 writes null, and with `return_weight_versions` what it has
        if last and (choice.get("finish_reason") or "message" in choice):
            choice |= {"weight_versions": trace.told(index), "prompt_weight_versions": trace.prompt(index)}
            choice |= trace.replaying.seams()
            if not choice.get(routed_experts.FIELD):  # vLLM's own whole answers have it
                choice |= trace.routing(index)
        elif len(new) > 1:
            choice["hotswap_weight_versions" if trace.as_vllm else "weight_versions"] = new
    version = trace.version(choices[-1].get("index", 0) if choices else 0)
    if version is not None:
        payload["weight_version"] = version
    must_count = trace.must_count() or last
    if payload.get("usage"):
        payload["usage"] = payload.pop("usage")
    elif must_count:
        payload["hotswap_usage"] = trace.usage()


def _opens(choice: dict[str, Any]) -> bool:
    """Whether it is the event that vLLM sends before the first tokens, when it has them already."""
    delta = choice.get("delta") or {}
    return "role" in delta and not delta.get("content")


def problem_body(problem: Problem, path: str = "") -> dict[str, Any]:
    """The error of a request that was ended or kept out, in the shape of the API that `path` belongs to."""
    error = {"message": str(problem), "type": problem.type, "param": problem.param, "code": problem.code}
    return error_body(path, problem.status, error)
