"""The gateway's own answers on the hot path, as bytes."""

from __future__ import annotations

from server.errors import HeadersTooLarge, HttpError, PayloadTooLarge
from server.gateway.config import Limits
from server.gateway.proxy.relay import status_line


def error_answer(
    error: HttpError, request_id: bytes, *, keep_alive: bool, head_only: bool, extra_head: bytes = b""
) -> bytes:
    """A whole response; `head_only` for a HEAD request, whose answer has no body. `extra_head`: more header lines."""
    body = error.body()
    lines = [status_line(error.status), b"content-type: application/json\r\n"]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in error.headers().items()]
    lines.append(b"x-request-id: %b\r\ncontent-length: %d\r\n" % (request_id, len(body)) + extra_head)
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines) if head_only else b"".join((*lines, body))


def too_large(limits: Limits) -> PayloadTooLarge:
    """The answer to a body over the limit."""
    return PayloadTooLarge(
        f"The request body is over {limits.max_body} bytes; send less, or raise --max-body on the gateway."
    )


def head_too_large(limits: Limits) -> HeadersTooLarge:
    """The answer to a head over the limit."""
    return HeadersTooLarge(f"More than {limits.max_head} bytes of request line and headers; send less.")
