"""Errors of a swap."""

from __future__ import annotations

from weightsync.errors.base import WeightSyncError


class SwapError(WeightSyncError):
    """A version was not made active."""


class SwapAborted(SwapError):
    """The version was not made active and nothing changed. `reason` says why, `tensor` names a culprit if known."""

    def __init__(self, version: int, reason: str, tensor: str | None = None) -> None:
        self.version, self.reason, self.tensor = version, reason, tensor
        super().__init__(f"version {version} was not made active: {reason}")


class SwapTimeout(SwapError):
    """No outcome in time."""

    def __init__(self, version: int, seconds: float, hint: str = "") -> None:
        self.version, self.seconds = version, seconds
        hint = hint or "is a gateway running on this store, and are its instances healthy?"
        super().__init__(f"version {version} was neither made active nor refused within {seconds:g} s: {hint}")


class StagingCancelled(SwapError):
    """The swap it was staged for has ended, or was superseded."""

    def __init__(self) -> None:
        super().__init__("staging was cancelled: its swap has ended, or another one took its place")


class FingerprintMismatch(SwapError):
    """An instance built other weights of a version than were committed; it must not serve them."""

    def __init__(self, version: int, expected: str, got: str) -> None:
        self.version, self.expected, self.got = version, expected, got
        super().__init__(
            f"version {version} was built with fingerprint {got}, committed was {expected}: this instance does not "
            "serve it; restart the instance, and if that does not help publish the version again"
        )


class BadSplit(SwapError):
    """Requests cannot be divided like that."""


class NotEnoughInstances(SwapError):
    """Versions cannot share traffic: an engine runs one version, so each takes instances of its own. `needed` is how
    many there must be."""

    def __init__(self, versions: int, minimum: int, have: int) -> None:
        self.needed, self.have = versions * minimum, have
        each = "one" if minimum == 1 else str(minimum)
        super().__init__(
            f"{versions} versions share the traffic of {self.needed} instances or more ({each} for each), and "
            f"{have} {'serves' if have == 1 else 'serve'}: start {self.needed - have} more (`hotswap up --instances "
            f"{self.needed}`)"
        )


class UnknownVersion(SwapError):
    """There is no such version, or it is not ready."""

    def __init__(self, version: int, state: str | None) -> None:
        self.version, self.state = version, state
        what = "does not exist" if state is None else f"is {state}"
        if state == "retired":
            what += ", so its bytes are no longer held (`--keep-versions` says how many versions are)"
        super().__init__(f"version {version} {what}: list the versions and choose one that is ready")
