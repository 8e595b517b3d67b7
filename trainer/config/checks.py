"""Checks that several sections share; they raise ConfigError with the key as the section knows it."""

from __future__ import annotations

import math
from pathlib import Path

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


def server(key: str, url: str, ca_file: str | None, cluster_tls: str | None) -> None:
    """`url` is HTTP's, and what its certificate is checked with is of use."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(key, f"{url!r} is not an HTTP address", "Write http://host:port or https://host:port")
    if ca_file is not None and cluster_tls is not None:
        raise ConfigError("ca_file", "given beside cluster_tls, which has an authority of its own", "Leave one out")
    if (ca_file or cluster_tls) is not None and url.startswith("http://"):
        raise ConfigError(key, f"{url!r} is not encrypted, but has certificates", "Write https://host:port")


def key_in(path: str, key: str) -> str:
    """The key in a file, on one line."""
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"cannot read {path} ({error})", "Name a file this process may read") from None
    if not found or not found.isascii() or not found.isprintable():
        raise ConfigError(key, f"{path} holds no key", "Write the key into it, on one line")
    return found
