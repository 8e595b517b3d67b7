"""POST /generate: a prompt or token ids in; tokens, log-probabilities and the version that wrote each of them out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent

from .inflight import Problem
from .provenance import Span, current_trace, problem_body, prompt_spans, to_spans
from .routed_experts import FIELD, encoded

router = APIRouter()
T = TypeVar("T")


_ONE_PROMPT: list[Any] = [
    {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}
    for one, other in (("prompt", "prompt_token_ids"), ("prompt_token_ids", "prompt"))
]


class GenerateRequest(BaseModel):
    """Body of POST /generate; unknown fields are refused. `logprobs` asks for the chosen tokens' log-probabilities;
    `stream_interval` is how many tokens an event of the stream has at least, its last one aside. `routed_experts` asks
    where a mixture's routers sent the tokens from `routed_experts_prompt_start` on (routed_experts.py)."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"oneOf": _ONE_PROMPT})

    model: str | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = Field(default=None, min_length=1)
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: bool = False
    routed_experts: bool = False
    routed_experts_prompt_start: int = Field(default=0, ge=0)
    stream: bool = True
    stream_interval: int = Field(default=1, ge=1, le=1024)
    priority: int = 0


class Choice:
    """The output of one sample so far, of which the first `told` tokens were in an event."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.told = self._told_text = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.prompt: list[Span] = []
        self.routing: dict[str, str | None] = {}
        self.finish_reason: str | None = None

    def add(self, output: Any, prompt_tokens: int, *, logprobs: bool) -> None:
        """Take in an engine delta."""
        token_ids = list(output.token_ids)
        if logprobs:
            self.logprobs += [_chosen(p, t) for p, t in zip(output.logprobs or (), token_ids, strict=False)]
        self.text += output.text
        self.token_ids += token_ids
        self.spans = to_spans(output.weight_versions or ())
        if self.spans and not self.prompt:
            self.prompt = prompt_spans(output, self.spans[0]["version"], prompt_tokens)
        self.finish_reason = output.finish_reason or self.finish_reason

    def untold(self) -> int:
        """How many tokens no event had."""
        return len(self.token_ids) - self.told

    def event(self, *, logprobs: bool) -> dict[str, Any]:
        """The `token` event for what no event had."""
        start, self.told = self.told, len(self.token_ids)
        text, self._told_text = self.text[self._told_text :], len(self.text)
        event = {
            "index": self.index,
            "text": text,
            "token_ids": self.token_ids[start:],
            "logprobs": self.logprobs[start:] if logprobs else None,
            "weight_version": self.spans[-1]["version"] if self.spans else None,
        }
        if not start and self.prompt:
            event["prompt_weight_versions"] = self.prompt
        if len(self.spans) > 1 and self.spans[-1]["start"] > start:
            event["weight_versions"] = self.spans  # more than one wrote these tokens
        return event if self.finish_reason is None else {**event, **self.routing, "finish_reason": self.finish_reason}

    def summary(self) -> dict[str, Any]:
        spans = {"weight_versions": self.spans, "prompt_weight_versions": self.prompt}
        return {"index": self.index, "finish_reason": self.finish_reason, **spans}

    def whole(self, *, logprobs: bool) -> dict[str, Any]:
        body = {"text": self.text, "token_ids": self.token_ids, "logprobs": self.logprobs if logprobs else None}
        return {**self.summary(), **body, **self.routing}


@router.post("/generate")
async def generate(raw: Request) -> Response:
    """Answer with server-sent events `token`..., `done` (or `error`), or with one JSON object if `stream` is false."""
    try:
        request = parse(await raw.body())
        check_model(request, raw.app.state)
        run = Run(request, f"gen-{uuid.uuid4().hex}", raw.app.state, raw.headers)
        # The first output is awaited before the head is sent: what the engine refuses is then a plain error answer.
        await unless_gone(raw, run.start())
        if request.stream:
            return EventSourceResponse(run.events(), headers={"cache-control": "no-store"}, ping=3600, sep="\n")
        return JSONResponse(await unless_gone(raw, run.whole()))
    except Problem as ended:
        return JSONResponse(problem_body(ended), status_code=ended.status)


async def unless_gone(raw: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and with it the generation, when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(raw))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Problem("the client closed the connection", status=499, code="client_closed_request")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(raw: Request) -> None:
    while (await raw.receive())["type"] != "http.disconnect":
        pass


def parse(body: bytes) -> GenerateRequest:
    """The request in `body`; Problem names the field and what is wrong with it."""
    try:
        request = GenerateRequest.model_validate(orjson.loads(body or b"null"))
    except orjson.JSONDecodeError as error:
        raise Problem(f"the body is not JSON: {error}", code="invalid_json") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(p) for p in first["loc"]) or None
        raise Problem(f"{name or 'body'}: {first['msg']}", param=name) from error
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise Problem("give exactly one of `prompt` (text) and `prompt_token_ids`", param="prompt")
    return request


def check_model(request: GenerateRequest, state: Any) -> None:
    """Refuse a model this instance does not serve, and prompts or tokens it cannot take."""
    config = state.engine_client.model_config
    served = request.model in state.hotswap_models or state.hotswap_adapters.find(request.model) is not None
    if request.model is not None and not served:
        raise Problem(
            f"model {request.model!r} is not served here; ask for {state.hotswap_models[0]!r}",
            status=404,
            code="model_not_found",
            param="model",
        )
    ids = request.prompt_token_ids or []
    if len(ids) + request.max_tokens > config.max_model_len:
        raise Problem(
            f"{len(ids)} prompt tokens + max_tokens {request.max_tokens} exceed the context of {config.max_model_len}; "
            "shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
            param="max_tokens",
        )


class Run:
    """One request in the engine."""

    def __init__(self, request: GenerateRequest, request_id: str, state: Any, headers: Mapping[str, str]) -> None:
        self._request, self._id, self._state, self._headers = request, request_id, state, headers
        self._choices = [Choice(i) for i in range(request.n)]
        self._prompt_tokens = 0
        self._first: Any = None

    async def start(self) -> None:
        """Submit the request and wait for its first output. Raises Problem for what the engine refuses."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind
        from vllm.tracing import extract_trace_headers

        r = self._request
        if (trace := current_trace.get()) is not None:
            trace.wants_routing = r.routed_experts
        try:
            params = SamplingParams(
                n=r.n, max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p,
                seed=r.seed, stop=r.stop, stop_token_ids=r.stop_token_ids, ignore_eos=r.ignore_eos,
                logprobs=0 if r.logprobs else None, output_kind=RequestOutputKind.DELTA,
                routed_experts_prompt_start=r.routed_experts_prompt_start,
            )  # fmt: skip
            asked = {"prompt": r.prompt} if r.prompt is not None else {"prompt_token_ids": r.prompt_token_ids}
            client = self._state.engine_client
            (prompt,) = await client.renderer.render_cmpl_async([asked])
            adapter = self._state.hotswap_adapters.find(r.model)
            self._outputs = client.generate(
                prompt, params, self._id, priority=r.priority, lora_request=adapter,
                trace_headers=extract_trace_headers(self._headers) or None,
            )  # fmt: skip
            self._first = await anext(self._outputs)
        except (ValueError, VLLMValidationError) as error:
            raise Problem(str(error), param=getattr(error, "parameter", None) or "prompt") from error

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        """`token` events as they come, then `done`. Tokens that were written before an error are told before it."""
        try:
            async for choice in self._tokens():
                if choice.untold() >= self._request.stream_interval or choice.finish_reason is not None:
                    yield self._told(choice)
            yield self._event("done", self._answer([c.summary() | self._seams() for c in self._choices]))
            return
        except Problem as ended:
            problem = problem_body(ended)
        except Exception as error:
            message = f"generation failed: {error or type(error).__name__}; the request can be retried"
            problem = problem_body(Problem(message, status=500, code="engine_error"))
        for choice in self._choices:
            if choice.untold():
                yield self._told(choice)
        yield self._event("error", problem)

    def _told(self, choice: Choice) -> ServerSentEvent:
        event, trace = choice.event(logprobs=self._request.logprobs), current_trace.get()
        if trace is not None and trace.must_count():
            event["hotswap_usage"] = trace.usage()  # last, where the gateway looks for it
        return self._event("token", event)

    @staticmethod
    def _event(name: str, data: dict[str, Any]) -> ServerSentEvent:
        return ServerSentEvent(orjson.dumps(data).decode(), event=name, sep="\n")

    async def whole(self) -> dict[str, Any]:
        """The finished answer as one JSON object."""
        async for _ in self._tokens():
            pass
        return self._answer([c.whole(logprobs=self._request.logprobs) for c in self._choices])

    async def _tokens(self) -> AsyncIterator[Choice]:
        """The choice that each of the engine's deltas was for, which has taken it in."""
        output = self._first
        try:
            while output is not None:
                self._prompt_tokens = len(output.prompt_token_ids or ())
                for delta in output.outputs:
                    choice = self._choices[delta.index]
                    choice.add(delta, self._prompt_tokens, logprobs=self._request.logprobs)
                    if self._request.routed_experts and delta.finish_reason is not None:
                        experts = delta.routed_experts
                        choice.routing = {FIELD: None if experts is None else encoded(experts)}
                    yield choice
                output = await anext(self._outputs, None)
        finally:
            await self._outputs.aclose()

    @staticmethod
    def _seams() -> dict[str, list[int]]:
        trace = current_trace.get()
        return trace.replaying.seams() if trace is not None else {}

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The counts stand last, where the gateway reads them (server/gateway/wire/bodies.py)."""
        completion = sum(len(c.token_ids) for c in self._choices)
        total = self._prompt_tokens + completion
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion, "total_tokens": total}
        model = self._request.model or self._state.hotswap_models[0]
        return {"id": self._id, "model": model, "choices": choices, "usage": usage}


def _chosen(position: Any, token: int) -> float:
    """The log-probability of `token` at one position of vLLM's logprobs."""
    return float(position[token].logprob)
