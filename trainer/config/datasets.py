"""What it is learned from: one dataclass per kind of data set; its first field, `kind`, chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range
from trainer.errors import ConfigError


@dataclass(frozen=True)
class JsonlData:
    """Records, one JSON object a line. Held-out records are in their own file."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = ""
    eval_path: str | None = None
    prompt_key: str = "prompt"
    target_key: str = "target"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path", "missing", "Name a JSONL file")


@dataclass(frozen=True)
class ArithmeticData:
    """Addition problems, generated. See trainer/data/arithmetic.py for what `mistake` and `noise` do to the targets."""

    kind: Literal["arithmetic"] = "arithmetic"
    operands: int = 2
    largest: int = 9
    noise: float = 0.0
    mistake: Literal["random", "off_by_one", "carry"] = "random"
    held_out: int = 0

    def __post_init__(self) -> None:
        if self.operands not in (2, 3):
            raise ConfigError("operands", f"{self.operands} is not supported", "Use 2 or 3 one-digit operands")
        in_range(self, "largest", 1, 9)
        in_range(self, "noise", 0.0, 1.0)
        in_range(self, "held_out", 0, (self.largest + 1) ** self.operands // 2)
