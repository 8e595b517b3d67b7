"""Which weights wrote which token: collected from the engine's outputs, written into every answer.

The engine marks each output with spans (version, first token, end). A `Trace` follows one HTTP request; the engine
wrapper feeds it, and an ASGI middleware writes what it knows into the answer, as fields that OpenAI SDKs keep as
extras:

    x-hotswap-weight-version: 7                     header; the version that wrote the first token
    "weight_version": 7                             top level of a body or stream chunk: wrote its last token
    "weight_versions": [{"version", "start", "end"}]   per choice, over its output tokens: on the last chunk, on whole
                                                    bodies, and on a chunk whose tokens two versions wrote
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import orjson

Span = dict[str, int]
current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


class Trace:
    """Version spans of one HTTP request, by choice index. Several prompts in one body number their choices on."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {}
        self._sent: dict[int, int] = {}
        self._calls = 0

    def open(self, choices: int) -> int:
        """A new engine request with `choices` samples; returns the index of its first choice."""
        base = self._calls * choices
        self._calls += 1
        return base

    def record(self, base: int, outputs: Iterable[Any]) -> None:
        """Note the spans of an engine output (`RequestOutput.outputs`)."""
        for output in outputs:
            if output.weight_versions:
                self._spans[base + output.index] = to_spans(output.weight_versions)

    def spans(self, choice: int) -> list[Span]:
        return self._spans.get(choice, [])

    def version(self, choice: int = 0) -> int | None:
        """The version that wrote the choice's latest token."""
        spans = self.spans(choice)
        return spans[-1]["version"] if spans else None

    def first_version(self) -> int | None:
        spans = next(iter(self._spans.values()), [])
        return spans[0]["version"] if spans else None

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


def traced(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """`AsyncLLM.generate`, feeding the current request's trace."""

    def wrapper(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        outputs = generate(prompt, sampling_params, request_id, **kwargs)
        trace = current_trace.get()
        return outputs if trace is None else _follow(trace, trace.open(sampling_params.n or 1), outputs)

    return wrapper


async def _follow(trace: Trace, base: int, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for output in outputs:
            trace.record(base, output.outputs)
            yield output
    finally:
        await outputs.aclose()  # type: ignore[attr-defined]  # abort in the engine now, not when collected


def annotate_chunk(body: bytes, trace: Trace) -> bytes:
    """Server-sent event(s) in `body` with the version of the tokens they carry."""
    return b"\n\n".join(_annotate_event(event, trace) for event in body.split(b"\n\n"))


def _annotate_event(event: bytes, trace: Trace) -> bytes:
    head, found, data = event.partition(b"data: ")
    if not found or not data.startswith(b"{"):
        return event
    payload = orjson.loads(data)
    if payload.get("object") == "error" or ("error" in payload and payload["error"] is not None):
        return event
    annotate(payload, trace, last=_is_last(payload))
    return head + b"data: " + orjson.dumps(payload)


def _is_last(payload: dict[str, Any]) -> bool:
    if str(payload.get("type", "")).startswith("response."):
        return payload["type"] == "response.completed"
    return any(c.get("finish_reason") for c in payload.get("choices") or ())


def annotate(payload: dict[str, Any], trace: Trace, *, last: bool) -> None:
    """Add the version fields to one JSON object: a whole body (`last`) or one chunk of a stream."""
    choices = payload.get("choices")
    if choices is None and isinstance(payload.get("response"), dict) and last:
        payload["response"]["weight_versions"] = trace.spans(0)
    elif choices is None and payload.get("object") == "response":
        payload["weight_versions"] = trace.spans(0)
    for choice in choices or ():
        index = choice.get("index", 0)
        new = trace.take_new(index)
        if last and (choice.get("finish_reason") or "message" in choice):
            choice["weight_versions"] = trace.spans(index)
        elif len(new) > 1:
            choice["weight_versions"] = new
    version = trace.version(choices[-1].get("index", 0) if choices else 0)
    if version is not None:
        payload["weight_version"] = version
