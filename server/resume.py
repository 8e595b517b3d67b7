"""The message between a gateway and an instance that continues a stream of another instance.

A gateway says in every request that may stream that it would like to be able to have the answer continued
(`RESUMABLE`). An instance that can promise it says so in the answer's head, and stamps the ids of the tokens into every
event. When that instance dies, the gateway sends the request to another one, a `Resume` put before its body and the
length of it into `RESUME`; that one confirms with `RESUMED`, and what it answers is only what comes next.
"""

from __future__ import annotations

import msgspec

RESUMABLE = b"x-hotswap-resumable"
RESUME = b"x-hotswap-resume"
RESUMED = b"x-hotswap-resumed"


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens `start` to `end`, and the weight version they came from."""

    version: int
    start: int
    end: int


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the answer that the client has: whole events, and nothing of the next one."""

    tokens: list[int]
    spans: list[Span]  # over `tokens`
    prompt_spans: list[Span]
    version: int | None  # the weights that must go on; None: any that the request itself allows
    lead: int = 0  # events before the first token
    id: str | None = None  # of the answer, as its events have it
    created: int | None = None
    finish_reason: str | None = None  # the choice has ended; what is missing comes after it
    stop_reason: int | str | None = None
    usage_sent: bool = False
    resumed_at: list[int] = []  # tokens there were when another instance went on, this time included
