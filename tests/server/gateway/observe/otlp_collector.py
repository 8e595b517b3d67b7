"""A collector that real exporters post to: it decodes their protobufs and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass
class Seen:
    """One span as it arrived; ids in hex, "" for no parent; times in unix seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    started: float
    ended: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """A collector and what has arrived there. `answer` is the status it gives; `bodies` are the raw requests."""

    port: int = 0
    answer: int = 200
    spans: list[Seen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    free: threading.Event = field(default_factory=threading.Event)  # what it answers waits for this

    def __post_init__(self) -> None:
        self.free.set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        """Raises if it is not what OTLP says it is."""
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {kv.key: value_of(kv.value) for kv in of_resource.resource.attributes}
            for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                self.spans.append(
                    Seen(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.status.code,
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        {kv.key: value_of(kv.value) for kv in span.attributes},
                        resource,
                    )
                )


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free loopback port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            answer = collector.answer  # as it is now, though the test may go on before this thread does
            collector.free.wait(60)
            if answer == 200:
                collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(answer)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="collector")
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
