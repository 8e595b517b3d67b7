"""What an answer is worth: one dataclass per kind of reward; its first field, `kind`, chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigError


@dataclass(frozen=True)
class ExactMatchReward:
    """1 when the answer's text equals the target, surrounding white space aside."""

    kind: Literal["exact_match"] = "exact_match"
    weight: float = 1.0


@dataclass(frozen=True)
class RegexReward:
    """1 when `pattern` is found; with a group named `answer`, 1 when that group equals the target."""

    kind: Literal["regex"] = "regex"
    pattern: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ConfigError("pattern", "missing", "Give a Python regular expression")


@dataclass(frozen=True)
class CallableReward:
    """`target` is `package.module:function`, called with (prompt, answer, target), all text; returns a number."""

    kind: Literal["callable"] = "callable"
    target: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.target.count(":") != 1:
            raise ConfigError("target", f"{self.target!r} names no function", "Write package.module:function")
