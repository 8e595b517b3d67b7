"""Checks that several sections share; they raise ConfigError with the key as the section knows it."""

from __future__ import annotations

import math

from trainer.errors import ConfigError


def positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(name, f"must be positive, got {value}", "Give a value above 0")


def in_range(section: object, name: str, low: float, high: float) -> None:
    value = getattr(section, name)
    if not low <= value <= high:
        raise ConfigError(name, f"must be in [{low}, {high}], got {value}", "Give a value in that range")
