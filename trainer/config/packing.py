"""Whether sequences are packed. Its presence turns packing on."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.checks import positive


@dataclass(frozen=True)
class PackingConfig:
    """Sequences end to end in rows of at most `max_tokens` tokens, each attending to itself only. A forward pass takes
    one row, so this bounds its activations; `micro_batch` is not used then."""

    max_tokens: int = 2048

    def __post_init__(self) -> None:
        positive(self, "max_tokens")
