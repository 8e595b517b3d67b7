"""The exceptions of `server`: what a client can meet at run time, and below that what a command can say to its user.

    ServerError
    ├── ConfigError                 a wrong setting; raised before anything is served, never answered
    └── HttpError                   has a status and an OpenAI-shaped body
        ├── BadRequest              400   malformed request line, headers, framing or JSON
        ├── Unauthorized            401   no key, or a key nobody issued
        ├── Forbidden               403   a good key without the scope
        ├── NotFound                404   not a public route
        ├── MethodNotAllowed        405   a public route asked with another method
        ├── RequestTimeout          408   the client did not finish its request in time
        ├── Conflict                409   the fleet's state does not allow it now
        ├── PayloadTooLarge         413
        ├── Unprocessable           422   well formed, but it cannot be served (a tensor of the wrong shape)
        ├── TooManyRequests         429   this key asks for more than it may; carries Retry-After
        ├── HeadersTooLarge         431
        ├── Unsupported             501   a verb or field of another system that has no meaning here
        ├── BadUpstream             502   the instance answered what is not HTTP, or died before its first byte
        ├── Unavailable             503   no instance, or none that accepts connections; carries Retry-After
        ├── UpstreamTimeout         504   the instance was silent for too long
        └── InsufficientStorage     507   the arena has no room for another version

    CliError                        a fault that the user of a command can mend; says how
    ├── ModelNotFound               no checkpoint directory of that name
    ├── OtherCheckpoint             the state goes on with what began with another checkpoint
    ├── PortTaken                   somebody else listens there
    ├── StateLost                   the store of a state directory, or the disk with its versions, is not there
    ├── StateTaken                  another server uses the state directory
    ├── ProcessFailed               a started process ended early
    └── RequestFailed               the gateway refused, or did not answer

`HttpError.body()` is what the OpenAI SDKs parse: `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import orjson

from server import api

_ANTHROPIC: Final = frozenset(route.path for route in api.ROUTES if route.tag == "anthropic")
# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ServerError(Exception):
    """Base of everything `server` raises on purpose."""


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
    """A fault with an HTTP status. `message` says what to do; `details` are extra fields of the error object."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def body_for(self, path: str) -> bytes:
        """The JSON body in the shape of the API that `path` belongs to."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.details}
        return orjson.dumps(error_body(path, self.status, error), default=str)

    def body(self) -> bytes:
        """The OpenAI-shaped JSON body."""
        return self.body_for("")

    def headers(self) -> dict[str, str]:
        """Headers that belong to this status (Retry-After, WWW-Authenticate)."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class BadRequest(HttpError):
    status = 400
    type = "invalid_request_error"
    default_code = "bad_request"


class Unauthorized(HttpError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer", **super().headers()}


class Forbidden(HttpError):
    status = 403
    type = "permission_error"
    default_code = "insufficient_scope"


class NotFound(HttpError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(HttpError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        return {"allow": self.allow, **super().headers()}


class RequestTimeout(HttpError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class Conflict(HttpError):
    status = 409
    type = "conflict_error"
    default_code = "conflict"


class PayloadTooLarge(HttpError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class Unprocessable(HttpError):
    status = 422
    type = "invalid_request_error"
    default_code = "unprocessable"


class TooManyRequests(HttpError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class HeadersTooLarge(HttpError):
    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class Unsupported(HttpError):
    status = 501
    type = "invalid_request_error"
    default_code = "unsupported"


class BadUpstream(HttpError):
    status = 502
    default_code = "bad_upstream"


class Unavailable(HttpError):
    status = 503
    type = "service_unavailable_error"
    default_code = "no_instance"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int = 1, **details: Any) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s, details=details)


class UpstreamTimeout(HttpError):
    status = 504
    default_code = "upstream_timeout"


class InsufficientStorage(HttpError):
    status = 507
    default_code = "insufficient_storage"


class CliError(Exception):
    """A fault the user can mend."""


@contextlib.contextmanager
def as_cli_error(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Errors of these kinds, whose messages say what to do, become a CliError with the same message."""
    try:
        yield
    except kinds as error:
        raise CliError(f"{prefix}{error}") from error


class ModelNotFound(CliError):
    """`--model` names no checkpoint directory and no model in the local cache or hub."""


class OtherCheckpoint(CliError):
    """`up` was asked to serve another checkpoint than the one that its state began with."""


class PortTaken(CliError):
    """`up` cannot listen where it was asked to."""


class StateLost(CliError):
    """A state directory, its store or its disk with copies is missing; Hotswap makes none anew unasked."""


class StateTaken(CliError):
    """Another server, or what is left of one, uses the state directory."""


class ProcessFailed(CliError):
    """A process that `up` started ended before it was ready."""


class RequestFailed(CliError):
    """The gateway answered with an error, or not at all: then `status` is 0. `code` is its word for the error."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code
