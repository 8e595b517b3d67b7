"""The transport-free core of the proxy: bytes of an instance's response in, bytes for the client out.

The head is rewritten (hop-by-hop headers out, request id in), the body is re-framed but never decoded: pieces that
arrive together leave as one chunk, and what is just one chunk goes through as it is. So a malformed upstream response
cannot reach a client, an HTTP/1.0 client gets a body it can read, and at every moment it is known whether an error
event still fits into the stream.

    IDLE --first byte--> HEAD --headers--> BODY --last byte--> complete
      ^                    `-- 1xx: back to IDLE  |
      `------------- go_on: another instance -----'
"""

from __future__ import annotations

from typing import Any, Final

import httptools

from server.errors import BadUpstream, HttpError
from server.gateway.wire.bodies import KEPT, Usage, estimate_usage, read_usage
from server.gateway.wire.capture import Capture
from server.gateway.wire.foreign import HEADERS, Foreign
from server.gateway.wire.head import date_line, status_line
from server.gateway.wire.journal import Journal, ReplayMemory
from server.gateway.wire.sglang import Translation
from server.resume import RESUMABLE, RESUMED

MAX_HEAD: Final = 64 * 2**10
VERSION_HEADER: Final = b"x-hotswap-weight-version"
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_OURS: Final = frozenset({b"x-request-id", b"x-hotswap-refused", RESUMABLE, RESUMED})


class ResponseRelay:
    """One response. Feed it what the instance sends; write what it returns."""

    __deletable__ = ("_parser",)  # which mypyc wants said
    __slots__ = (
        "_between_chunks",
        "_body",
        "_chunked",
        "_close_delimited",
        "_fault",
        "_framing",
        "_going_on",
        "_head",
        "_headers",
        "_http10",
        "_in_head",
        "_kept",
        "_older",
        "_parser",
        "_recent",
        "_request_id",
        "body_bytes",
        "capture",
        "complete",
        "extra_head",
        "foreign",
        "journal",
        "keep_alive",
        "memory",
        "refused",
        "request_bytes",
        "reusable",
        "seen",
        "sglang",
        "sse",
        "status",
    )

    def __init__(self, request_id: bytes, *, http10: bool, keep_alive: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._request_id = request_id
        self._http10 = http10
        self._headers: list[tuple[bytes, bytes]] = []
        self._head = b""
        self._framing = 0  # bytes of all but the body since the head of the answer or the last piece of its body
        self._body: list[bytes] = []
        self._chunked = self._close_delimited = False
        self._between_chunks = False  # the parser has seen the end of a chunk and nothing after it
        self._in_head = True
        self._recent: list[bytes] = []  # the last pieces of the body
        self._kept = 0  # bytes in them; when they are many, their end becomes
        self._older = b""  # what came before them
        self._fault: str | None = None
        self.status = 0  # 0 until the head of the final response is known
        self.seen = False  # any byte at all
        self.sse = False  # the body is a stream of events
        self.complete = False
        self.keep_alive = keep_alive  # the client's connection may carry another request
        self.reusable = False  # the upstream connection may carry another request
        self.refused = b""  # why the instance has no answer (server/instance/middleware.py), empty if it has one
        self.body_bytes = 0
        self.extra_head = b""  # header lines for the client
        self._going_on = False  # the head of an answer that another instance left unfinished was sent before
        self.memory: ReplayMemory | None = None  # for a journal, where one is wanted
        self.request_bytes = 0  # that are kept along with it
        self.journal: Journal | None = None  # of a stream that another instance could go on with
        self.capture: Capture[Any] | None = None  # where somebody wants the whole answer
        self.foreign: Foreign | None = None  # where it is of an upstream that is not ours
        self.sglang: Translation | None = None  # where the client gets another form of it

    def feed(self, data: bytes) -> bytes:
        """Bytes for the client. Raises BadUpstream if `data` is not what HTTP allows here."""
        self.seen = True
        if self._between_chunks and self._chunked and not (self.complete or self.refused):
            start = whole_chunk(data)
            if start:
                return self._pass(data, data[start:-2])
        self._framing += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            # Bytes that follow a complete response only cost the connection, not the answer.
            if not self.complete or self._fault:
                raise BadUpstream(f"The instance sent a malformed response ({self._fault or exc}).") from exc
            self.reusable = False
        self._between_chunks = self._between_chunks and data.endswith(b"\r\n")  # else the next one has begun
        if self._framing > MAX_HEAD and not self.complete:
            raise BadUpstream(f"The instance sent more than {MAX_HEAD} bytes of headers, trailers or chunk framing.")
        return self._drain()

    def eof(self) -> bytes:
        """The instance closed the connection: the end of a body without a length, else BadUpstream."""
        if not (self._close_delimited and self.status):
            state = "mid-answer" if self.seen else "before its first byte"
            raise BadUpstream(f"The instance closed the connection {state}.", code="upstream_died")
        self.complete = True
        return self._drain()

    def go_on(self) -> None:
        """The instance has died; the next one's answer is what comes after the events that went out."""
        self._parser = httptools.HttpResponseParser(self)
        self._going_on, self.status, self._framing = True, 0, 0
        self.seen = self.complete = self.reusable = self._close_delimited = False
        self.refused, self._fault = b"", None
        self._between_chunks = False
        self._body.clear()

    def close(self) -> None:
        """Nothing more comes. Parser and relay know each other: left so, each request would be the collector's work."""
        del self._parser
        if self.journal is not None:
            self.journal.close()

    def finish(self) -> bytes:
        """The end of a body of which only that is missing."""
        self.complete = True
        return self._drain()

    def error_event(self, error: HttpError, path: str) -> bytes:
        """A server-sent event that tells the client of `path`, or nothing where an event would not fit.

        The body is left unterminated, so that a client that ignores the event still sees a broken answer. Inside an
        unfinished event nothing is added: the specification makes readers drop it, and the cut says the rest.
        """
        tail = self.tail() or b"\n\n"
        if not self.sse or not tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")):
            return b""
        event = b"event: error\ndata: %b\n\n" % error.body_for(path)
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(event), event)
        return event if self._close_delimited or self._http10 else b""

    def fault(self) -> HttpError | None:
        """The error that clients get instead of the answer of an upstream that is not ours; None: they get that."""
        foreign = self.foreign
        return None if foreign is None else foreign.fault(self.status, self.header(b"retry-after"))

    def header(self, name: bytes) -> bytes:
        """The value of a header of the instance's answer (lower case), empty if there is none."""
        return next((value for known, value in self._headers if known == name), b"")

    def tail(self) -> bytes:
        """The end of the body so far: at least its last `KEPT` bytes, if it has as many."""
        return b"".join((self._older, *self._recent))

    def usage(self) -> Usage | None:
        """The tokens of the answer so far; None for errors and what counts no tokens. While a stream tells none, its
        events are taken for them."""
        if not (200 <= self.status < 300 or self._going_on) or not self.body_bytes:
            return None
        tail = self.foreign.tokens if self.foreign is not None and self.foreign.tokens else self.tail()
        found = read_usage(tail)
        return found or (estimate_usage(tail, self.body_bytes) if self.sse else None)

    def _drain(self) -> bytes:
        out, self._head = self._head, b""
        piece = b""
        if self._body:
            piece = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            if self.journal is not None:
                piece = self.journal.take(piece)
            elif self.foreign is not None:
                piece = self.foreign.take(piece)
                self.complete = self.complete or self.foreign.ended
        if self.complete and self.journal is not None:
            piece += self.journal.rest()
        elif self.complete and self.foreign is not None:
            piece += self.foreign.rest()
        if piece:
            self._keep(piece)
        if self.sglang is not None and (piece or self.complete):
            piece = self.sglang.take(piece, ended=self.complete)
        if piece:
            out += b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece
        if self.complete and self._chunked:
            out += b"0\r\n\r\n"
        return out

    def _pass(self, data: bytes, piece: bytes) -> bytes:
        """The usual path of a token: `data` is a chunk around `piece`, and its frame need be neither read nor made."""
        taken = piece
        if self.journal is not None:
            taken = self.journal.take(piece)
        elif self.foreign is not None:
            taken = self.foreign.take(piece)
            self.complete = self.foreign.ended
        if taken:
            self._keep(taken)
            taken = taken if self.sglang is None else self.sglang.take(taken, ended=False)
        out = data
        if taken is not piece:
            out = b"%x\r\n%b\r\n" % (len(taken), taken) if taken else b""
        return out + b"0\r\n\r\n" if self.complete else out

    def _keep(self, piece: bytes) -> None:
        if self.capture is not None:
            self.capture.take(piece)
        self.body_bytes += len(piece)
        self._recent.append(piece)
        self._kept += len(piece)
        if self._kept > KEPT:
            self._older = b"".join(self._recent)[-KEPT:]
            self._recent.clear()
            self._kept = 0

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._headers = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # later ones are trailers, which are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        status = self._parser.get_status_code()
        if self.complete or status < 200:
            if status == 101:
                self._fail("it switched protocols unasked")
            return
        if status > 599:
            self._fail(f"status {status}")
        if status in (401, 409, 503) and self.foreign is None:
            self.refused = self.header(b"x-hotswap-refused")
        if not self._going_on:
            self._head = self._build_head(status)
            self._open_journal(status)
        elif not self.refused:
            self._check_going_on(status)
        self.status, self._framing = status, 0

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if not (self.complete or (self.refused and self._going_on)):
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self.complete:
            self.reusable = False  # it answered more than was asked
        elif self.status:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()

    def _build_head(self, status: int) -> bytes:
        length = dated = False
        dropped = _HOP_BY_HOP
        lines = [status_line(status)]
        self._chunked = False
        for name, value in self._headers:
            if name == b"connection":
                dropped = dropped | ({option.strip().lower() for option in value.split(b",")} - {b"content-length"})
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    self._fail("an unknown transfer encoding")
                self._chunked = True
            elif name == b"content-length":
                length = True
            elif name == b"date":
                dated = self.foreign is None
            elif name == b"content-type":
                self.sse = value[:17].lower() == b"text/event-stream"
        foreign = self.foreign
        self.sglang = self.sglang if status == 200 else None
        if self.sglang is not None:
            dropped = dropped | {b"content-length"}  # of the other form
            self.sglang.version = self.header(VERSION_HEADER)
        if foreign is None:
            lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in dropped and pair[0] not in _OURS]
        else:
            foreign.reads = self.sse
            if self.sse:
                dropped = dropped | {b"content-length"}  # less may go out
            lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in dropped and pair[0] in HEADERS]
            lines.append(foreign.lines)
        lines.append(b"x-request-id: %b\r\n%b%b" % (self._request_id, b"" if dated else date_line(), self.extra_head))
        bodiless = status in (204, 304)
        self._close_delimited = not (length or self._chunked or bodiless)
        length = length and b"content-length" not in dropped
        self._chunked = (self._chunked or not length) and not self._http10 and not bodiless
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        self.keep_alive = self.keep_alive and (self._chunked or length or bodiless)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _open_journal(self, status: int) -> None:
        if self.memory is None or not self.sse or status != 200 or not (self._chunked or self._http10):
            return
        if self.header(RESUMABLE):
            self.journal = self.memory.open(self.request_bytes)

    def _check_going_on(self, status: int) -> None:
        if status != 200 or not self.header(RESUMED):
            self._fail(f"it did not go on with the answer, status {status}")
        framed = self.header(b"transfer-encoding") or self.header(b"content-length")
        self._close_delimited = not framed

    def _fail(self, fault: str) -> None:
        self._fault = fault
        raise ValueError(fault)  # httptools turns it into HttpParserCallbackError


def whole_chunk(data: bytes) -> int:
    """Where the content of `data` begins if it is one chunk with content, to the byte and as usually written; else 0.

    The parser reads all else: several chunks or half a one, extensions, capitals, leading zeros, the last chunk.
    """
    line = data.find(b"\r\n", 0, 10)
    size = len(data) - line - 4
    if line < 1 or size < 1 or not data.endswith(b"\r\n") or data[:line] != b"%x" % size:
        return 0
    return line + 2
