"""The exceptions of `server`: what a client can meet at run time, and below that what a command can say to its user.

    ServerError                 of itself: an instance or a reward server gave no answer that counts
    ├── ConfigError             a wrong setting; raised before anything is served, never answered
    └── HttpError               the answer to a request that fails: a status, and an OpenAI-shaped body
        └── BadUpstream         502: the instance answered what is not HTTP, or died before its first byte

    CliError                    a fault that the user of a command can mend; says how
    └── RequestFailed           the gateway refused, or did not answer

`HttpError.body()` is what the OpenAI SDKs parse: `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import orjson

from server import api

_ANTHROPIC: Final = frozenset(route.path for route in api.ROUTES if route.tag == "anthropic")
# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
# The statuses that are answered, each with its type, and its code where the fault has none of its own.
KINDS: Final = {
    400: ("invalid_request_error", "bad_request"),  # malformed request line, headers, framing or JSON
    401: ("authentication_error", "invalid_api_key"),  # no key, or a key nobody issued
    403: ("permission_error", "insufficient_scope"),  # a good key without the scope
    404: ("invalid_request_error", "not_found"),  # not a public route, or nothing of that name
    405: ("invalid_request_error", "method_not_allowed"),  # a public route asked with another method
    408: ("invalid_request_error", "request_timeout"),  # the client did not finish its request in time
    409: ("conflict_error", "conflict"),  # the fleet's state does not allow it now
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", "unprocessable"),  # well formed, and cannot be served (a tensor of the wrong shape)
    429: ("rate_limit_error", "rate_limit_exceeded"),  # this key asks for more than it may
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    501: ("invalid_request_error", "unsupported"),  # a verb or field of another system that has no meaning here
    502: ("server_error", "bad_upstream"),
    503: ("service_unavailable_error", "no_instance"),  # no instance, or none that accepts connections
    504: ("server_error", "upstream_timeout"),  # the instance was silent for too long
    507: ("server_error", "insufficient_storage"),  # the arena has no room for another version
}


class ServerError(Exception):
    """Base of everything `server` raises on purpose. Of itself: an instance or a reward server gave no answer that
    counts; the message says why."""


class ConfigError(ServerError):
    """A setting that cannot work. The message names the setting and what to do about it."""


def error_body(path: str, status: int, error: dict[str, Any]) -> dict[str, Any]:
    """`error`, as OpenAI's SDKs read it, in the shape of the API that `path` belongs to: clients of Anthropic's and
    SGLang's read other ones."""
    if path in api.SGLANG:
        return {"success": False, "message": error["message"], "error": error}
    if path not in _ANTHROPIC:
        return {"error": error}
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {**error, "type": kind}}


class HttpError(ServerError):
    """The answer to a request that fails. `message` says what to do; `details` are extra fields of the error object.

    The status settles `type` and `code`, unless they are given (KINDS). A 503 says when to ask again: after a second.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.type, self.code = kind or KINDS[status][0], code or KINDS[status][1]
        self.param, self.allow = param, allow
        self.retry_after_s = 1 if status == 503 and retry_after_s is None else retry_after_s
        self.details = details or {}

    def body_for(self, path: str) -> bytes:
        """The JSON body in the shape of the API that `path` belongs to."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.details}
        return orjson.dumps(error_body(path, self.status, error), default=str)

    def body(self) -> bytes:
        """The OpenAI-shaped JSON body."""
        return self.body_for("")

    def headers(self) -> dict[str, str]:
        """Headers that belong to this status (WWW-Authenticate, Allow, Retry-After)."""
        found = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.allow is not None:
            found["allow"] = self.allow
        return found if self.retry_after_s is None else {**found, "retry-after": str(self.retry_after_s)}


class BadUpstream(HttpError):
    """The instance answered what is not HTTP, or died before its first byte."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(502, message, code=code)


class CliError(Exception):
    """A fault the user can mend."""


@contextlib.contextmanager
def as_cli_error(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Errors of these kinds, whose messages say what to do, become a CliError with the same message."""
    try:
        yield
    except kinds as error:
        raise CliError(f"{prefix}{error}") from error


class RequestFailed(CliError):
    """The gateway answered with an error, or not at all: then `status` is 0. `code` is its word for the error."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code
