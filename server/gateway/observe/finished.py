"""What is told of a request when it is over: one object for the access log and for traces.

Ids, counts and times, and never a key, a header a client made up, or a word of a prompt or an answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from server.errors import HttpError
from server.gateway.observe.context import TraceContext
from server.gateway.wire.bodies import Usage
from server.gateway.wire.head import RequestHead


@dataclass(slots=True)
class Finished:
    """One request. Times in seconds, `ended` in unix seconds; None: there was no such thing."""

    request_id: str
    method: str
    route: str  # a public route, "-" where none was recognised
    status: int  # 499: the client left
    code: str | None  # of the gateway's own error
    key: str  # name of the key's owner
    ended: float
    duration_s: float
    queued_s: float = 0.0
    ttft_s: float | None = None
    instance: str | None = None  # the last that was asked
    first_version: int | None = None
    last_version: int | None = None
    usage: Usage | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    streamed: bool = False
    trace: TraceContext | None = None


class Watcher(Protocol):
    """Who wants to know of requests. Called on the event loop, so it does little there and never waits."""

    def begin(self, head: RequestHead) -> TraceContext | None:
        """A request with this head is about to be forwarded; the trace it is in from here on, if it is in one."""

    def end(self, finished: Finished) -> None:
        """A request is over."""


def of_refusal(request_id: bytes, method: bytes, route: str, key: str, error: HttpError) -> Finished:
    """What is told of a request that the gateway answered itself, without forwarding it."""
    return Finished(
        request_id=request_id.decode(),
        method=method.decode("latin-1") if method.isalpha() else "-",
        route=route,
        status=error.status,
        code=error.code,
        key=key,
        ended=time.time(),
        duration_s=0.0,
    )
