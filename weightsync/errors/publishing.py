"""Errors of who makes a version: checkpoints, deltas, signatures, publishers."""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.errors.base import WeightSyncError


class PublishError(WeightSyncError):
    """A version could not be published."""


class BadPart(PublishError):
    """A part cannot be published so: its name, an adapter without its configuration, or no base model to go with."""


class UnknownModel(PublishError):
    """The first version of a model that no instance serves, on a store whose instances serve other models."""

    def __init__(self, model: str, served: Iterable[str]) -> None:
        names = ", ".join(repr(name) for name in sorted(served))
        self.problem = f"no instance serves a model {model!r}, and it has no version yet (instances serve {names})"
        super().__init__(
            f"{self.problem}: pass a served model's name as `model`, or `new_model=True` to publish the first version "
            "of a new one"
        )


class StalePublisher(PublishError):
    """A newer publisher of this lineage has taken over; this one may write no more."""

    def __init__(self, lineage: str, token: int, holder: str) -> None:
        self.lineage, self.token, self.holder = lineage, token, holder
        super().__init__(
            f"lineage {lineage!r} was taken over by {holder} (token {token}): stop this trainer, or give it a lineage "
            "of its own"
        )


class DraftLost(PublishError):
    """The lease of a draft with shares on other hosts ended before the commit: these hosts may have freed them."""


class DraftClosed(PublishError):
    """The draft was already committed or aborted; begin another."""


class CheckpointError(WeightSyncError):
    """A checkpoint cannot be read. `file` and `tensor` say where, when known."""

    def __init__(self, file: str, problem: str, *, tensor: str | None = None) -> None:
        self.file, self.problem, self.tensor = file, problem, tensor
        super().__init__(f"{file}: {problem}")


class DeltaError(WeightSyncError):
    """A delta is damaged, cut off, or was never one; nothing of it was published."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"not a sound delta: {problem}. Send the version again")


class DeltaBaseMismatch(DeltaError):
    """The base of a delta is retired, was never here, or is another version than the one the delta was made against."""

    code = "unknown_base"

    def __init__(self, version: int, expected: str, got: str | None) -> None:
        self.version, self.expected, self.got = version, expected, got
        found = "is not here" if got is None else f"has digest {got} here"
        super().__init__(f"its base, version {version} with digest {expected}, {found}: send the full version instead")


class RemoteError(WeightSyncError):
    """A server refused a version, or could not be reached. `status` is HTTP's, `answer_code` the server's, if known."""

    def __init__(self, message: str, *, status: int | None = None, answer_code: str | None = None) -> None:
        self.status, self.answer_code = status, answer_code
        super().__init__(message)


class SigningKeyError(WeightSyncError):
    """The file of a key or certificate cannot be read, or holds another kind of key."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class VersionRefused(WeightSyncError):
    """The policy of an instance asks for a signature that this version does not have."""

    def __init__(self, version: int, problem: str) -> None:
        self.version = version
        super().__init__(f"{problem}: it is not staged; publish it again, signed with a key that the instance trusts")
