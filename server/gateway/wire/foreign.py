"""The answer of an upstream that is not ours, on its way through: which of its headers clients see, what its refusals
become, and two changes to its streams. The chunk of tokens at the end, which the gateway asked for, is hidden from a
client that did not ask for it. A stream ends with its first error: the [DONE] that some servers send behind it would
tell clients that the answer is complete.
"""

from __future__ import annotations

import re
from typing import Final

from server.errors import HttpError
from server.gateway.wire.bodies import Event, decode_event

HEADERS: Final = frozenset({b"content-type", b"content-length", b"transfer-encoding", b"cache-control"})
_THEIRS: Final = frozenset({400, 413, 422})  # what is wrong with the request itself
MOST_HELD: Final = 2**20  # no event is so long
_END: Final = re.compile(rb"\r?\n\r?\n")
_DATA: Final = re.compile(rb"^data:(.*)", re.MULTILINE)


class Foreign:
    """One answer. `lines` are for its head."""

    __slots__ = ("_held", "_hides", "ended", "lines", "name", "reads", "tokens")

    def __init__(self, name: str, *, hides_usage: bool) -> None:
        self.name = name
        self.lines = b"x-hotswap-weights: external\r\nx-hotswap-upstream: %b\r\n" % name.encode()
        self.tokens = b""  # the chunk that was hidden
        self.reads = False  # the body is a stream of events
        self.ended = False  # with an error, which has gone out
        self._hides = hides_usage
        self._held = b""

    def fault(self, status: int, retry_after: bytes) -> HttpError | None:
        """The error that clients get for this status; None: they get the upstream's answer."""
        return fault_of(self.name, status, retry_after)

    def take(self, piece: bytes) -> bytes:
        """The bytes of the body that may go out now: whole events, without the one of tokens alone, up to an error."""
        if self.ended:
            return b""
        if not self.reads:
            return piece
        if self._held or not piece.endswith(b"\n\n"):
            piece = self._held + piece
            end = 0
            for found in _END.finditer(piece):
                end = found.end()
            piece, self._held = piece[:end], piece[end:]
        if b'"usage"' in piece or b'"error"' in piece:
            piece = self._read(piece)
        if len(self._held) > MOST_HELD:
            self.reads = False
            piece += self.rest()
        return piece

    def rest(self) -> bytes:
        """The bytes that were held back, when the body has ended."""
        held, self._held = self._held, b""
        return held

    def _read(self, whole: bytes) -> bytes:
        out: list[bytes] = []
        start = 0
        for found in _END.finditer(whole):
            event = whole[start : found.end()]
            start = found.end()
            told = _told(event)
            if self._hides and told.usage is not None and not told.choices:
                self.tokens = event
                continue
            out.append(event)
            if told.error is not None or told.type == "error":
                self.ended, self._held = True, b""
                break
        return b"".join(out)


def _told(event: bytes) -> Event:
    """The content of an event; empty if it cannot be read."""
    try:
        return decode_event(b"".join(_DATA.findall(event)))
    except (ValueError, TypeError):  # msgspec's errors are ValueErrors
        return Event()


def fault_of(name: str, status: int, retry_after: bytes) -> HttpError | None:
    """The error that clients get for an upstream's refusal; None: they get its answer. Faults of the gateway's own key,
    or of its bill, are not for them to see."""
    if 200 <= status < 300 or status in _THEIRS:
        return None
    seconds = int(retry_after) if re.fullmatch(rb"\d{1,5}", retry_after) else 5
    if status in (401, 402, 403):
        message = f"The upstream of {name} does not take this gateway's key; tell the operator."
        return HttpError(503, message, code="upstream_unauthorized", retry_after_s=60)
    if status in (404, 405):
        message = f"The upstream of {name} does not know the model or the route; tell the operator."
        return HttpError(503, message, code="upstream_unknown_model", retry_after_s=60)
    if status == 429:
        message = f"The upstream of {name} takes no more requests from this gateway now; try again in {seconds} s."
        return HttpError(503, message, code="upstream_rate_limited", retry_after_s=seconds)
    message = f"The upstream of {name} failed ({status}); try again."
    return HttpError(503, message, code="upstream_failed", retry_after_s=seconds)
