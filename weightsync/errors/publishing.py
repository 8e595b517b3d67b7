"""Errors of who makes a version: checkpoints, deltas, signatures, publishers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from weightsync.errors.base import WeightSyncError

P = ParamSpec("P")
R = TypeVar("R")


class PublishError(WeightSyncError):
    """A version could not be published, or not be made active."""


def publishing(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, of whose errors all are PublishErrors: any other has its code, message and attributes, and is its
    cause."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PublishError:
            raise
        except WeightSyncError as error:
            raise PublishError(str(error), **{"code": error.code, **vars(error)}) from error

    return call


def unknown_model(model: str, served: Iterable[str]) -> PublishError:
    """The first version of a model that no instance serves, on a store whose instances serve other models."""
    names = ", ".join(repr(name) for name in sorted(served))
    problem = f"no instance serves a model {model!r}, and it has no version yet (instances serve {names})"
    advice = "pass a served model's name as `model`, or `new_model=True` to publish the first version of a new one"
    return PublishError(f"{problem}: {advice}", code="unknown_model", problem=problem)


class StalePublisher(PublishError):
    """A newer publisher of this lineage has taken over; this one may write no more."""

    def __init__(self, lineage: str, token: int, holder: str) -> None:
        self.lineage, self.token, self.holder = lineage, token, holder
        super().__init__(
            f"lineage {lineage!r} was taken over by {holder} (token {token}): stop this trainer, or give it a lineage "
            "of its own"
        )


class CheckpointError(PublishError):
    """A checkpoint cannot be read. `file` and `tensor` say where, when known."""

    def __init__(self, file: str, problem: str, *, tensor: str | None = None) -> None:
        self.file, self.problem, self.tensor = file, problem, tensor
        super().__init__(f"{file}: {problem}")


def delta_error(problem: str) -> PublishError:
    """A delta is damaged, cut off, or was never one; nothing of it was published."""
    return PublishError(f"not a sound delta: {problem}. Send the version again", code="delta_error")


def unknown_base(version: int, expected: str, got: str | None) -> PublishError:
    """The base of a delta is retired, was never here, or is another version than the one the delta was made against."""
    found = "is not here" if got is None else f"has digest {got} here"
    message = f"the base of the delta, version {version} with digest {expected}, {found}: send the full version instead"
    return PublishError(message, code="unknown_base", version=version, expected=expected, got=got)


def config_mismatch(field: str, problem: str) -> PublishError:
    """The config.json of a version does not fit to the tokenizer and the code of instances, by its `field`."""
    message = (
        f"the config.json of this version has another {field} ({problem}), which does not fit to the tokenizer and "
        "the limits of the served model: serve it as a model of its own, with `hotswap up --model DIR --name NAME`"
    )
    return PublishError(message, code="config_mismatch", field=field)


def version_refused(version: int, problem: str) -> PublishError:
    """The policy of an instance asks for a signature that this version does not have."""
    message = f"{problem}: it is not staged; publish it again, signed with a key that the instance trusts"
    return PublishError(message, code="version_refused", version=version)


def signing_key_error(path: str, problem: str) -> WeightSyncError:
    """The file of a key or certificate cannot be read, or holds another kind of key."""
    return WeightSyncError(f"{path}: {problem}", code="signing_key_error")
