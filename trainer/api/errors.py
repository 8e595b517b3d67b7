"""The errors that a client of the training API gets when its request cannot be done as asked.

ApiError          base: `status` of the HTTP answer, `code`, `param`, and a message that says what to do
├── BadRequest    the request must be changed (400)
│   └── Taken     another client has what only one can have
├── Unauthorized  the key is missing, or the gateway does not know it (401)
├── NotFound      it is not there, or it is another key's (404)
├── Gone          a result that is no longer kept (410); the SDK asks anew
├── TooMany       a limit of the key is reached (429); the SDK waits
└── Unavailable   the gateway does not answer (503); the SDK tries again
    └── Ended     the server ends, or its ranks start again
"""

from __future__ import annotations

from typing import Any

from trainer.errors import TrainerError


class ApiError(TrainerError):
    """Base of the tree."""

    status, code, user = 500, "server_error", False

    def __init__(self, message: str, code: str = "", param: str | None = None) -> None:
        self.code, self.param = code or self.code, param
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Of an HTTP answer, in the shape of the gateway's."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    """The request must be changed."""

    status, code, user = 400, "invalid_request", True


class Taken(BadRequest):
    """Another client has what only one can have at a time."""

    code = "weights_taken"


class Unauthorized(ApiError):
    """The key is missing or not known."""

    status, code, user = 401, "invalid_api_key", True


class NotFound(ApiError):
    """It is not there, or it is another key's."""

    status, code, user = 404, "not_found", True


class Gone(ApiError):
    """A result that is no longer kept."""

    status, code, user = 410, "result_gone", True


class TooMany(ApiError):
    """A limit of the key is reached."""

    status, code, user = 429, "limit_reached", True


class Unavailable(ApiError):
    """The gateway does not answer."""

    status, code = 503, "gateway_unavailable"


class Ended(Unavailable):
    """The server ends, or its ranks start again. The acknowledged requests are done after that."""

    code = "server_ended"
