"""One line for every request, or for a share of them; those that failed are always told of."""

from __future__ import annotations

import random
from typing import Any

import orjson

from server.gateway.observe.finished import Finished
from server.gateway.observe.logs import LineWriter, iso
from server.gateway.wire.head import RequestHead

LOGGER = "hotswap.access"


class AccessLog:
    """Writes lines about requests (finished.Watcher). `share` of 0 to 1; answers of 500 and above are not left out."""

    def __init__(self, writer: LineWriter, share: float, log_format: str) -> None:
        self._writer = writer
        self._share = share
        self._line = json_line if log_format == "json" else text_line

    def begin(self, head: RequestHead) -> None:
        """Nothing is told before the end."""

    def end(self, finished: Finished) -> None:
        """The line goes to the writer, which makes it on its own thread."""
        if self._share >= 1.0 or finished.status >= 500 or random.random() < self._share:  # noqa: S311 - no secret
            self._writer.put(finished, self._line)


def fields(finished: Finished) -> dict[str, Any]:
    """What a line says; what there was not is left out."""
    found: dict[str, Any] = {
        "request_id": finished.request_id,
        "method": finished.method,
        "route": finished.route,
        "status": finished.status,
        "code": finished.code,
        "key": finished.key,
        "instance": finished.instance,
        "weight_version_first": finished.first_version,
        "weight_version_last": finished.last_version,
        "duration_s": round(finished.duration_s, 6),
        "queue_s": round(finished.queued_s, 6),
        "ttft_s": None if finished.ttft_s is None else round(finished.ttft_s, 6),
        "stream": finished.streamed,
        "bytes_in": finished.bytes_in,
        "bytes_out": finished.bytes_out,
    }
    if finished.usage is not None:
        found["prompt_tokens"] = finished.usage.prompt_tokens if finished.usage.exact else None
        found["completion_tokens"] = finished.usage.completion_tokens
        found["tokens_exact"] = finished.usage.exact
    if finished.trace is not None:
        found["trace_id"] = f"{finished.trace.trace_id:032x}"
        found["span_id"] = f"{finished.trace.span_id:016x}"
    return {name: value for name, value in found.items() if value is not None}


def json_line(finished: Finished) -> bytes:
    """The line as JSON."""
    message = f"{finished.method} {finished.route} {finished.status}"
    head = {"time": iso(finished.ended), "level": "INFO", "logger": LOGGER, "message": message}
    return orjson.dumps(head | fields(finished))


def text_line(finished: Finished) -> bytes:
    """The line as words; names of keys are quoted, for they may hold anything."""
    told = " ".join(f"{name}={_word(value)}" for name, value in fields(finished).items())
    return f"{iso(finished.ended)} INFO {LOGGER}: {told}".encode()


def _word(value: Any) -> str:
    if isinstance(value, str) and not value.replace("/", "").replace("-", "").replace("_", "").isalnum():
        return orjson.dumps(value).decode()
    return str(value)
