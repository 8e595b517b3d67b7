"""Heads of requests, and the gateway's own answers; no sockets.

A request's head is checked, and written anew for the instance. The forwarded headers are an allow-list: hop-by-hop
headers, credentials, cookies and headers that could steer the instance's own middleware never leave the gateway. llhttp
(httptools) has already refused duplicate or malformed Content-Length, Content-Length beside Transfer-Encoding, bare
line feeds, folded headers and control characters.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http
import ipaddress
import itertools
import re
import secrets
import time
from collections.abc import Collection
from email.utils import formatdate
from typing import Final
from urllib.parse import urlsplit

from server.errors import HttpError
from server.gateway.config import Limits
from weightsync.tls import is_loopback

Headers = list[tuple[bytes, bytes]]

_FORWARDED: Final = frozenset(
    {
        b"accept",
        b"accept-language",
        b"anthropic-beta",
        b"anthropic-version",
        b"baggage",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"user-agent",
    }
)
SESSION: Final = b"x-session-id"
WISH: Final = b"x-hotswap-"  # how the headers begin that ask the gateway itself for something
_CONNECTION_OPTIONS: Final = frozenset({b"close", b"keep-alive", b"te", b"upgrade", b"http2-settings", b""})
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PROCESS: Final = secrets.token_hex(6).encode()
_COUNTER: Final = itertools.count(1)
_date = 0, b""  # the last line, and the second that it is of
STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in http.HTTPStatus}


class RequestHead:
    """The parts of a request's headers that the gateway needs. `forward`: header lines for the instance.

    No dataclass, whose `__init__` would stay Python where this is compiled.
    """

    key: bytes | None = None  # the client's key, from Authorization, x-api-key or api-key
    content_length: int | None = None
    chunked: bool = False
    expect_continue: bool = False
    asked: dict[bytes, bytes] | None = None  # x-hotswap-* headers, for terms.read
    session: bytes | None = None  # x-session-id, which is forwarded too
    origin: bytes | None = None  # of the page that has a browser ask
    preflight: bool = False  # its browser asks whether the page may send a request
    cors: bytes = b""  # header lines by which its browser lets that page read the answer
    sticky: dict[bytes, bytes] | None = None  # the headers that splits of traffic go by, where some do
    hop_by_hop: frozenset[bytes] = frozenset()  # the headers that Connection names
    scope: bytes = b""  # whose prefix cache it may hit, as the header line that says so

    def __init__(self, request_id: bytes, forward: bytes) -> None:
        self.request_id = request_id
        self.forward = forward


def new_request_id() -> bytes:
    """An id unique over processes and restarts, cheap enough for every request."""
    return b"%b-%x" % (_PROCESS, next(_COUNTER))


def read_head(headers: Headers, http_version: str, limits: Limits, wishes: Collection[bytes]) -> RequestHead:
    """Checks and digests `headers` (names in lower case). Raises HttpError (400, 413, 431).

    `wishes`: the headers that may begin with WISH.
    """
    if len(headers) > limits.max_headers:
        raise HttpError(431, f"More than {limits.max_headers} headers; send fewer.")
    head = RequestHead(b"", b"")
    forward: list[bytes] = []
    size = hosts = 0
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name in _FORWARDED:
            forward.append(b"%b: %b\r\n" % (name, value))
        elif name == b"host":
            hosts += 1
        elif name in _READERS:
            _READERS[name](head, value.strip(), http_version)
        elif name.startswith(WISH):
            _read_wish(head, name, value.strip(), wishes)
    if size > limits.max_head:
        raise head_too_large(limits)
    if hosts != 1 and (hosts > 1 or http_version != "1.0"):
        raise HttpError(400, "Exactly one Host header is required.", code="bad_host")
    if head.content_length is not None and head.content_length > limits.max_body:
        raise too_large(limits)
    head.request_id = head.request_id or new_request_id()
    if head.session is not None:
        forward.append(b"%b: %b\r\n" % (SESSION, head.session))
    if head.hop_by_hop:
        forward = [line for line in forward if line.partition(b":")[0] not in head.hop_by_hop]
    head.forward = b"".join(forward)
    return head


def upstream_head(
    method: bytes, target: bytes, opening: bytes, head: RequestHead, length: int, lines: bytes = b""
) -> bytes:
    """The request head for an instance; `opening` are its pool's lines, and `lines` go in besides those of `head`."""
    return b"%b %b HTTP/1.1\r\n%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
        method,
        target,
        opening,
        head.forward,
        lines,
        head.request_id,
        length,
    )


def _content_length(head: RequestHead, value: bytes, _: str) -> None:
    head.content_length = int(value)


def _transfer_encoding(head: RequestHead, value: bytes, http_version: str) -> None:
    if head.chunked or value.lower() != b"chunked" or http_version == "1.0":
        raise HttpError(
            400, "The only Transfer-Encoding read here is a single `chunked`, on HTTP/1.1.", code="bad_framing"
        )
    head.chunked = True


def _origin(head: RequestHead, value: bytes, _: str) -> None:
    head.origin = value


def _preflight(head: RequestHead, value: bytes, _: str) -> None:
    head.preflight = bool(value)


def _connection(head: RequestHead, value: bytes, _: str) -> None:
    """The headers that `Connection` names are for this connection alone (RFC 9110, 7.6.1)."""
    head.hop_by_hop |= frozenset(option.strip().lower() for option in value.split(b",")) - _CONNECTION_OPTIONS


def _expect(head: RequestHead, value: bytes, http_version: str) -> None:
    if value.lower() != b"100-continue":
        raise HttpError(400, "The only expectation met here is `Expect: 100-continue`.", code="bad_expect")
    head.expect_continue = http_version != "1.0"


def _authorization(head: RequestHead, value: bytes, _: str) -> None:
    """A bearer key, or one as password of Basic: clients without a key setting take it in a URL (http://:KEY@host)."""
    scheme, _space, key = value.partition(b" ")
    head.key = b""
    if scheme.lower() == b"bearer":
        head.key = key.strip()
    elif scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            head.key = base64.b64decode(key.strip(), validate=True).partition(b":")[2]


def _api_key(head: RequestHead, value: bytes, _: str) -> None:
    if head.key is None:
        head.key = value


def _request_id(head: RequestHead, value: bytes, _: str) -> None:
    if _REQUEST_ID.fullmatch(value):
        head.request_id = value


def _session(head: RequestHead, value: bytes, _: str) -> None:
    """The first one counts, if there are several."""
    if head.session is None and value:
        head.session = value


def _read_wish(head: RequestHead, name: bytes, value: bytes, known: Collection[bytes]) -> None:
    """Strict, for what is overlooked here is not what the client asked for."""
    word = name.decode("latin-1")
    if name not in known:
        raise HttpError(400, f"There is no request header {word}; leave it out.", code="invalid_parameter", param=word)
    head.asked = {} if head.asked is None else head.asked
    if name in head.asked:
        raise HttpError(400, f"{word} was sent twice; send it once.", code="invalid_parameter", param=word)
    head.asked[name] = value


_READERS: Final = {
    b"content-length": _content_length,
    b"transfer-encoding": _transfer_encoding,
    b"connection": _connection,
    b"expect": _expect,
    b"origin": _origin,
    b"access-control-request-method": _preflight,
    b"authorization": _authorization,
    b"x-api-key": _api_key,
    b"api-key": _api_key,  # as Azure's clients send it
    b"x-request-id": _request_id,
    SESSION: _session,
}


def check_origin(origin: bytes, host: bytes, listening_on: str, allowed: Collection[str], own_name: str) -> None:
    """Refuses pages that may not ask while no key is needed. Raises HttpError (403).

    A browser sends what any page has it send, also to this machine's ports. Programs send no Origin; browsers send one
    with every POST of a page, which the page cannot change. Keys are protection enough where they are needed, since no
    foreign page knows one. Pages of this machine pass, those `allowed`, and beyond loopback those of the very `host`
    that is asked, if it is an address or the gateway's `own_name`.

    No other name in the Host header proves anything: its owner can let it lead to any address (DNS rebinding).
    """
    text = origin.decode("latin-1")
    try:
        url = urlsplit(text)
        name, netloc = url.hostname or "", url.netloc
    except ValueError:
        name = netloc = ""
    own = not is_loopback(listening_on) and netloc == host.decode("latin-1") and (name == own_name or _is_address(name))
    if not (name and (is_loopback(name) or own or text in allowed)):
        message = "Pages of this origin may not ask while no key is needed: make a key, or start with --allow-origin."
        raise HttpError(403, message, code="origin_not_allowed")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# the gateway's own answers


def status_line(status: int) -> bytes:
    """The status line, with the standard phrase where there is one."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def date_line() -> bytes:
    """The Date header of an answer that begins now."""
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = now, f"date: {formatdate(now, usegmt=True)}\r\n".encode()
    return _date[1]


def error_answer(
    error: HttpError, request_id: bytes, *, keep_alive: bool, head_only: bool, extra_head: bytes = b"", path: str = ""
) -> bytes:
    """A whole response; `head_only` for a HEAD request, whose answer has no body. `extra_head`: more header lines;
    `path`: the route, whose API has its own shape of errors."""
    body = error.body_for(path)
    lines = [status_line(error.status), b"content-type: application/json\r\n", date_line()]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in error.headers().items()]
    lines.append(b"x-request-id: %b\r\ncontent-length: %d\r\n" % (request_id, len(body)) + extra_head)
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines) if head_only else b"".join((*lines, body))


def too_large(limits: Limits) -> HttpError:
    """The answer to a body over the limit."""
    return HttpError(
        413, f"The request body is over {limits.max_body} bytes; send less, or raise --max-body on the gateway."
    )


def head_too_large(limits: Limits) -> HttpError:
    """The answer to a head over the limit."""
    what = "request line and headers, or of trailers and framing of chunks"
    return HttpError(431, f"More than {limits.max_head} bytes of {what}; send less.")
