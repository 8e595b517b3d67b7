"""The error that a client of the training API gets when its request cannot be done as asked.

ApiError          `status` of the HTTP answer, `code`, `param`, and a message that says what to do
└── Ended         the server ends, or its ranks start again
"""

from __future__ import annotations

from typing import Any, Final

from trainer.errors import TrainerError

# The statuses that are answered, each with its code where the fault has none of its own.
CODES: Final = {
    400: "invalid_request",  # the request must be changed
    401: "invalid_api_key",  # the key is missing or not known
    404: "not_found",  # it is not there, or it is another key's
    410: "result_gone",  # a result that is no longer kept; the SDK asks anew
    429: "limit_reached",  # a limit of the key is reached; the SDK waits
    500: "server_error",
    503: "gateway_unavailable",  # the gateway does not answer; the SDK tries again
}


class ApiError(TrainerError):
    """Base of the tree."""

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None) -> None:
        self.status, self.param = status, param
        super().__init__(message, code=code or CODES[status])

    @property
    def user(self) -> bool:
        """Whether the client has to change something."""
        return self.status < 500

    def body(self) -> dict[str, Any]:
        """Of an HTTP answer, in the shape of the gateway's."""
        kind = "invalid_request_error" if self.user else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Ended(ApiError):
    """The server ends, or its ranks start again. The acknowledged requests are done after that."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, "server_ended")
