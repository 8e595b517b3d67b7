"""A request's place in a trace: W3C Trace Context, taken over from the client or begun here.

https://www.w3.org/TR/trace-context/ (traceparent and tracestate), and OpenTelemetry's parent-based sampling: what the
client decided holds, and of the traces begun here a share is recorded, chosen by the trace id as its
TraceIdRatioBased sampler does, so that every process with the same ratio chooses the same ones.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_IDS = rb"-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
_PARENT = re.compile(rb"00%b|(?!00|ff)[0-9a-f]{2}%b(?:-.*)?" % (_IDS, _IDS))  # later versions may have more after it
_LINES = re.compile(rb"^trace(?:parent|state): [^\r\n]*\r\n", re.MULTILINE)
_PARENT_LINE = re.compile(rb"^traceparent: ([^\r\n]*)\r\n", re.MULTILINE)
_LOW_64 = 2**64 - 1


@dataclass(slots=True)
class TraceContext:
    """The span of one request here. `parent_id` is 0 where the trace begins here."""

    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool

    @property
    def line(self) -> bytes:
        """The header line for whoever works on this request next."""
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace_id, self.span_id, self.sampled)


def begin(forward: bytes, ratio: float) -> tuple[TraceContext, bytes]:
    """A span under the one that the client's header lines name, or that of a new trace; and the lines to pass on."""
    parents = _PARENT_LINE.findall(forward) if b"traceparent: " in forward else ()
    parent = _parse(parents[0]) if len(parents) == 1 else None
    if parent is None:
        trace_id = random.getrandbits(128) or 1
        context = TraceContext(trace_id, _new_id(), 0, (trace_id & _LOW_64) < ratio * 2**64)
        kept = _LINES.sub(b"", forward) if b"trace" in forward else forward
    else:
        trace_id, parent_id, sampled = parent
        context = TraceContext(trace_id, _new_id(), parent_id, sampled)
        kept = _PARENT_LINE.sub(b"", forward)
    return context, kept + context.line


def _parse(value: bytes) -> tuple[int, int, bool] | None:
    """(trace id, parent's span id, sampled), or None for what the specification calls invalid."""
    found = _PARENT.fullmatch(value)
    if found is None:
        return None
    trace_id, span_id, flags = (int(group, 16) for group in found.groups() if group is not None)
    return (trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def _new_id() -> int:
    return random.getrandbits(64) or 1
