"""Errors of the engine that is to run a version."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors.base import WeightSyncError


class UnsupportedVllm(WeightSyncError):
    """The installed vLLM is a release whose private names may be others than those used here."""

    def __init__(self, found: str | None, supported: Sequence[str]) -> None:
        self.found = found
        known = " or ".join(supported)
        super().__init__(
            f"vLLM {found} is installed, and Hotswap works with {known}: install one of them (docs/install.md)"
            if found is not None
            else f"no vLLM is installed: install {known} (docs/install.md)"
        )


class ConfigMismatch(WeightSyncError):
    """The config.json of a version does not fit to the tokenizer and the code that instances have.

    `field` of config.json is to blame.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(
            f"the config.json of this version has another {field} ({problem}), which does not fit to the tokenizer and "
            "the limits of the served model: serve it as a model of its own, with `hotswap up --model DIR --name NAME`"
        )


class PartNotServed(WeightSyncError):
    """A version has a part that this instance has no place for; nothing changed."""

    def __init__(self, part: str, advice: str) -> None:
        self.part, self.advice = part, advice
        super().__init__(f"this instance cannot take {part!r}: {advice}")
