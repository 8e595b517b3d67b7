"""Errors of the command line; each says what to do.

CliError
├── ModelNotFound     no checkpoint directory of that name
├── ProcessFailed     a started process ended early
└── RequestFailed     the gateway refused, or did not answer
"""

from __future__ import annotations


class CliError(Exception):
    """A fault the user can mend."""


class ModelNotFound(CliError):
    """`--model` names no checkpoint directory and no model in the local cache or hub."""


class ProcessFailed(CliError):
    """A process that `up` started ended before it was ready."""


class RequestFailed(CliError):
    """The gateway answered with an error, or not at all."""
