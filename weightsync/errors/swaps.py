"""Errors of a swap."""

from __future__ import annotations

from weightsync.errors.publishing import PublishError


class SwapError(PublishError):
    """A version was not made active, or not in time."""


def swap_aborted(version: int, reason: str, tensor: str | None = None) -> SwapError:
    """`reason` says why, `tensor` names a culprit if known."""
    message = f"version {version} was not made active: {reason}"
    return SwapError(message, code="swap_aborted", version=version, reason=reason, tensor=tensor)


def swap_timeout(version: int, seconds: float, hint: str = "") -> SwapError:
    """No outcome in time; the version may still become active."""
    hint = hint or "is a gateway running on this store, and are its instances healthy?"
    message = f"version {version} was neither made active nor refused within {seconds:g} s: {hint}"
    return SwapError(message, code="swap_timeout", version=version)


def fingerprint_mismatch(version: int, expected: str, got: str) -> SwapError:
    """An instance built other weights of a version than were committed; it must not serve them."""
    message = (
        f"version {version} was built with fingerprint {got}, committed was {expected}: this instance does not "
        "serve it; restart the instance, and if that does not help publish the version again"
    )
    return SwapError(message, code="fingerprint_mismatch", version=version, expected=expected, got=got)


def not_enough_instances(versions: int, minimum: int, have: int) -> SwapError:
    """Versions cannot share traffic: an engine runs one version, so each takes instances of its own. `needed` is how
    many there must be."""
    needed, each = versions * minimum, "one" if minimum == 1 else str(minimum)
    message = (
        f"{versions} versions share the traffic of {needed} instances or more ({each} for each), and "
        f"{have} {'serves' if have == 1 else 'serve'}: start {needed - have} more (`hotswap up --instances {needed}`)"
    )
    return SwapError(message, code="not_enough_instances", needed=needed, have=have)


def unknown_version(version: int, state: str | None) -> SwapError:
    """There is no such version, or it is not ready."""
    state_in_words = "does not exist" if state is None else f"is {state}"
    if state == "retired":
        state_in_words += ", so its bytes are no longer held (`--keep-versions` says how many versions are)"
    message = f"version {version} {state_in_words}: list the versions and choose one that is ready"
    return SwapError(message, code="unknown_version", version=version)
