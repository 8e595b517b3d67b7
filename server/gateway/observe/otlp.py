"""Sends spans to a collector over OTLP (HTTP, protobuf), from a thread of its own.

`put` never waits: what finds the queue full is dropped and counted, as is what the collector does not take. Retries,
compression, headers and certificates are the OpenTelemetry exporter's, with its environment variables
(OTEL_EXPORTER_OTLP_*). OpenTelemetry is only imported when a gateway is told to trace.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from server.errors import ConfigError
from server.gateway.observe.tracing import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("hotswap.gateway")

QUEUE = 4096
# Encoding holds the interpreter's lock: few at a time, so that no answer waits for long.
BATCH = 32
INTERVAL_S = 0.5
FLUSH_S = 2.0
T = TypeVar("T")


class SpanSender:
    """A bounded queue and the thread that empties it.

    What became of spans is counted in `counts`: "exported", "dropped" (the queue was full: one for a record, however
    many spans it would have made) or "failed" (the collector did not take them).
    """

    def __init__(self, endpoint: str, counts: dict[str, int], service: str = "hotswap-gateway") -> None:
        self._counts = counts
        self._queue: deque[tuple[Any, Callable[[Any], Sequence[Span]]]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failing = False
        self._convert, self._exporter = _open_exporter(traces_url(endpoint), service)
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def put(self, record: T, make: Callable[[T], Sequence[Span]]) -> None:
        """Takes a record whose spans `make` builds later, on the thread."""
        if len(self._queue) >= QUEUE:
            self._counts["dropped"] += 1
            return
        self._queue.append((record, make))
        if len(self._queue) == QUEUE // 4:
            self._wake.set()

    def close(self) -> None:
        """Sends what is waiting, for a moment; then whatever is left is dropped."""
        self._stopping = True
        self._wake.set()
        self._thread.join(FLUSH_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._empty()
        self._empty()

    def _empty(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            self._send(batch)

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
    """What makes a span of ours one of the SDK's, and the SDK's exporter."""
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
