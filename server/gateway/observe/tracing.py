"""Traces: a span for every request that is forwarded or waits to be, between the client's and the engine's.

The span's id goes upstream in `traceparent`, so that vLLM (`--otlp-traces-endpoint`) hangs its own under it. On the
event loop a request costs three header lines and one append to a bounded queue; a thread builds the spans and sends
them over OTLP (HTTP, protobuf). Names are OpenTelemetry's semantic conventions for HTTP servers and generative AI, and
vLLM's for latencies. Swaps are spans too, and entries of the ledger are events (spans without length with an
`event.name`), both of the one gateway that leads.

Retries, compression, headers and certificates are the OpenTelemetry exporter's, with its environment variables
(OTEL_EXPORTER_OTLP_*). OpenTelemetry is only imported when a gateway is told to trace. `open_watchers` begins traces
and the access log as the settings ask for them; neither costs anything when it is off.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from server import api
from server.errors import ConfigError
from server.gateway.config import ObserveSettings
from server.gateway.observe import context
from server.gateway.observe.context import TraceContext
from server.gateway.observe.logs import AccessLog, Backlog, stderr
from server.gateway.observe.stats import Finished, ProcessStats, Seen
from server.gateway.wire.head import RequestHead
from weightsync.control.chain import LedgerEntry
from weightsync.control.records import SwapRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("hotswap.gateway")

T = TypeVar("T")
OPERATIONS = {route.path: route.operation for route in api.ROUTES if route.operation}


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

    def __init__(self, sender: SpanSender, ratio: float) -> None:
        self._sender = sender
        self._ratio = ratio

    def begin(self, head: RequestHead) -> TraceContext | None:
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
            attributes=attributes(finished),
            error=finished.code or str(finished.status) if failed else None,
        )
        return [span]


def attributes(finished: Finished) -> dict[str, Any]:
    """The attributes of a request's span; none tells of prompts, answers or keys."""
    found: dict[str, Any] = {
        "http.request.method": finished.method,
        "http.route": finished.route,
        "http.response.status_code": finished.status,
        "http.request.body.size": finished.bytes_in,
        "http.response.body.size": finished.bytes_out,
        "gen_ai.operation.name": OPERATIONS.get(finished.route),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": finished.model or None,
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


def _spans(ended: tuple[str, SwapRecord, Seen]) -> list[Span]:
    """The swap, and under it its phases."""
    model, record, seen = ended
    trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1
    about = {
        "hotswap.model": model,
        "hotswap.swap.id": record.id,
        "hotswap.weight_version": record.target,
        "hotswap.swap.mode": record.mode,
        "hotswap.swap.outcome": record.phase,
        "hotswap.swap.participants": list(record.participants),
    }
    failed = (record.reason or "aborted") if record.phase == "aborted" else None
    end = seen[-1][1]
    spans = [Span("swap", trace_id, span_id, 0, min(record.opened_at, end), end, about, failed, server=False)]
    for (phase, start), (_, until) in itertools.pairwise(seen):
        child = random.getrandbits(64) or 1
        spans.append(Span(f"swap {phase}", trace_id, child, span_id, start, until, {}, server=False))
    return spans


def _event(entry: LedgerEntry) -> list[Span]:
    """An entry of the ledger: a span of its own without length, with what the entry says."""
    told = {f"hotswap.ledger.{name}": value for name, value in asdict(entry).items() if value not in ("", None)}
    about = {"event.name": f"hotswap.ledger.{entry.action}", **told}
    ids = random.getrandbits(128) or 1, random.getrandbits(64) or 1
    failed = (entry.outcome or "aborted") if entry.action in ("abort", "revert") else None
    return [Span(f"ledger {entry.action}", *ids, 0, entry.at, entry.at, about, failed, server=False)]


class SpanSender(Backlog):
    """Sends spans to a collector. Their outcomes are counted in `counts`: "exported", "dropped" (the queue was
    full: one for a record, however many spans it would have made) or "failed" (the collector did not take them)."""

    most = 4096
    batch = 32  # encoding holds the interpreter's lock: few at a time, so that no answer waits for long
    interval_s = 0.5

    def __init__(self, endpoint: str, counts: dict[str, int], service: str = "hotswap-gateway") -> None:
        self._counts = counts
        self._failing = False
        self._convert, self._exporter = _open_exporter(traces_url(endpoint), service)
        super().__init__("otlp")

    def put(self, record: T, make: Callable[[T], Sequence[Span]]) -> None:
        """Takes a record whose spans `make` builds later, on the thread."""
        super().put(record, make)
        self._counts["dropped"] = self.dropped

    def close(self) -> None:
        """Sends what is waiting, for a moment; then whatever is left is dropped."""
        super().close()
        self._exporter.shutdown()

    def _send(self, batch: list[tuple[Any, Callable[[Any], Sequence[Span]]]]) -> None:
        spans: list[ReadableSpan] = []
        try:
            spans += [self._convert(span) for record, make in batch for span in make(record)]
            taken = self._exporter.export(spans).value == 0
        except Exception:  # a fault in it must not end the thread; what it means is logged below
            taken = False
            log.debug("a fault in sending spans", exc_info=True)
        self._counts["exported" if taken else "failed"] += len(spans) or len(batch)
        if taken == self._failing:
            self._failing = not taken
            log.warning("the trace collector %s", "takes spans again" if taken else "does not answer; dropping spans")


def traces_url(endpoint: str) -> str:
    """The URL spans are posted to: `endpoint` itself if it has a path, else with OTLP's own."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _open_exporter(url: str, service: str) -> tuple[Callable[[Span], ReadableSpan], Any]:
    """A function that makes a span of ours one of the SDK's, and the SDK's exporter."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
    except ImportError as exc:
        raise ConfigError(f"--otlp-endpoint: OpenTelemetry is not installed ({exc}); see requirements/.") from exc
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line an outage is enough, see `_send`
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or service})
    flags = TraceFlags(TraceFlags.SAMPLED)

    def convert(span: Span) -> ReadableSpan:
        parent = SpanContext(span.trace_id, span.parent_id, is_remote=True, trace_flags=flags)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=flags),
            parent=parent if span.parent_id else None,
            resource=resource,
            attributes=span.attributes,
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int(span.started * 1e9),
            end_time=int(span.ended * 1e9),
        )

    return convert, OTLPSpanExporter(endpoint=url)


def open_watchers(settings: ObserveSettings, stats: ProcessStats, leads: Callable[[str], bool]) -> Callable[[], None]:
    """Begins what `settings` ask for; the result ends it, and may take seconds. Swaps of a model are traced while this
    gateway `leads` it.

    Raises ConfigError.
    """
    ending: list[Callable[[], None]] = []
    if settings.otlp_endpoint is not None:
        sender = SpanSender(settings.otlp_endpoint, stats.spans)
        stats.watchers.append(Tracer(sender, settings.trace_ratio))
        stats.swap_told = lambda model, record, seen: (
            sender.put((model, record, seen), _spans) if leads(model) else None
        )
        stats.ledger_told = lambda entry: sender.put(entry, _event)
        ending.append(sender.close)
    if settings.access_share > 0.0:  # after the tracer, so that lines have ids of traces
        stats.watchers.append(AccessLog(stderr(), settings.access_share, settings.log_format))
        ending.append(stderr().flush)  # a process that ends by a signal runs nothing more

    def close() -> None:
        for end in ending:
            end()

    return close
