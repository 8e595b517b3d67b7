"""Errors of the command line; each says what to do.

CliError
├── ModelNotFound     no checkpoint directory of that name
├── OtherCheckpoint   the state goes on with what began with another checkpoint
├── PortTaken         somebody else listens there
├── StateLost         the store of a state directory, or the disk with its versions, is not there
├── StateTaken        another server uses the state directory
├── ProcessFailed     a started process ended early
└── RequestFailed     the gateway refused, or did not answer
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
