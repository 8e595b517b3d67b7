"""Errors of the engine that is to run a version."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors.base import WeightSyncError


class EngineError(WeightSyncError):
    """An engine cannot run versions, or not this one, or has ended."""

    advice: str = ""  # on a part that is not served


def unsupported_model(message: str) -> EngineError:
    """This model's weights cannot be staged beside it; the message names the layer and what to use instead."""
    return EngineError(message, code="unsupported_model")


def unsupported_vllm(found: str | None, supported: Sequence[str]) -> EngineError:
    """The installed vLLM is a release whose private names may be others than those used here."""
    known = " or ".join(supported)
    message = (
        f"vLLM {found} is installed, and Hotswap works with {known}: install one of them (docs/install.md)"
        if found is not None
        else f"no vLLM is installed: install {known} (docs/install.md)"
    )
    return EngineError(message, code="unsupported_vllm")


def part_not_served(part: str, advice: str) -> EngineError:
    """A version has a part that this instance has no place for."""
    return EngineError(f"this instance cannot take {part!r}: {advice}", code="part_not_served", advice=advice)
