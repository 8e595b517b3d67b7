"""A span for every request that is forwarded or waits to be, between the client's and the engine's.

The span's id goes upstream in `traceparent`, so that vLLM (`--otlp-traces-endpoint`) hangs its own under it. On the
event loop a request costs three header lines and one append to a bounded queue; spans are built and sent by a thread
(otlp.py). Names are OpenTelemetry's semantic conventions for HTTP servers and generative AI, and vLLM's for latencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.gateway.observe import context
from server.gateway.observe.finished import Finished
from server.gateway.wire.head import RequestHead

if TYPE_CHECKING:
    from server.gateway.observe.otlp import SpanSender

OPERATIONS = {  # gen_ai.operation.name, by route
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}


@dataclass(slots=True)
class Span:
    """A finished span, as it is handed to the sender. Times in unix seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    started: float
    ended: float
    attributes: Mapping[str, Any]
    error: str | None = None  # description, where it failed
    server: bool = True


class Tracer:
    """Puts requests into traces (stats.Watcher)."""

    def __init__(self, sender: SpanSender, model: str, ratio: float) -> None:
        self._sender = sender
        self._model = model
        self._ratio = ratio

    def begin(self, head: RequestHead) -> context.TraceContext | None:
        """From here on the request, and whoever works on it, is in a trace."""
        trace, head.forward = context.begin(head.forward, self._ratio)
        return trace

    def end(self, finished: Finished) -> None:
        """Its span goes to the sender, if the trace is recorded."""
        trace = finished.trace
        if trace is not None and trace.sampled:
            self._sender.put(finished, self._span)

    def _span(self, finished: Finished) -> list[Span]:
        trace = finished.trace
        assert trace is not None
        failed = finished.status >= 500 or (finished.code and finished.status < 400)  # a 200 whose stream broke, too
        span = Span(
            name=f"{finished.method} {finished.route}",
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            parent_id=trace.parent_id,
            started=finished.ended - finished.duration_s,
            ended=finished.ended,
            attributes=attributes(finished, self._model),
            error=finished.code or str(finished.status) if failed else None,
        )
        return [span]


def attributes(finished: Finished, model: str) -> dict[str, Any]:
    """What a span says of a request; nothing of prompts, answers and keys."""
    found: dict[str, Any] = {
        "http.request.method": finished.method,
        "http.route": finished.route,
        "http.response.status_code": finished.status,
        "http.request.body.size": finished.bytes_in,
        "http.response.body.size": finished.bytes_out,
        "gen_ai.operation.name": OPERATIONS.get(finished.route),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": model,
        "gen_ai.request.id": finished.request_id,
        "gen_ai.latency.e2e": finished.duration_s,
        "gen_ai.latency.time_in_queue": finished.queued_s,
        "gen_ai.latency.time_to_first_token": finished.ttft_s if finished.streamed else None,
        "error.type": finished.code or (str(finished.status) if finished.status >= 500 else None),
        "hotswap.instance.id": finished.instance,
        "hotswap.key.name": finished.key,
        "hotswap.weight_version.first": finished.first_version,
        "hotswap.weight_version.last": finished.last_version,
    }
    if finished.usage is not None:
        found["gen_ai.usage.input_tokens"] = finished.usage.prompt_tokens if finished.usage.exact else None
        found["gen_ai.usage.output_tokens"] = finished.usage.completion_tokens
    return {name: value for name, value in found.items() if value is not None}
