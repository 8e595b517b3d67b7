"""What a run does about faults: ranks that die, stop or hang, numbers that are no longer sane, and SIGTERM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range, positive
from trainer.errors import ConfigError


@dataclass(frozen=True)
class FaultsConfig:
    """`max_restarts`: how often all ranks are started anew after one failed (not after a mistake of the user's).

    Every rank sends a heartbeat each `heartbeat_s`; one that is silent for `heartbeat_timeout_s` is named and ended.
    When no rank gets on for `hang_s`, each says where it is and ends (0: never; it must be longer than the longest
    phase, rollouts included). After SIGTERM the ranks have `grace_s` to save and leave.

    `on_diverged` says what a loss or gradient that is not finite, or that leaps, leads to: `stop` ends the run,
    `rollback` goes back to the last checkpoint, at most `max_rollbacks` times; the batch that did it twice is left out.
    With `rollback_serving` the server goes back to that checkpoint's version too. A leap is a loss or gradient norm
    `spike_sigma` standard deviations above the mean of the last `spike_window` steps (0: not watched), `spike_patience`
    steps in a row.
    """

    max_restarts: int = 0
    heartbeat_s: float = 2.0
    heartbeat_timeout_s: float = 60.0
    hang_s: float = 1800.0
    grace_s: float = 120.0
    on_diverged: Literal["stop", "rollback"] = "stop"
    max_rollbacks: int = 3
    rollback_serving: bool = True
    spike_sigma: float = 0.0
    spike_window: int = 32
    spike_patience: int = 1

    def __post_init__(self) -> None:
        positive(self, "heartbeat_s", "heartbeat_timeout_s", "grace_s", "max_rollbacks", "spike_patience")
        in_range(self, "max_restarts", 0, 10**6)
        in_range(self, "hang_s", 0.0, 1e9)
        in_range(self, "spike_sigma", 0.0, 1e6)
        in_range(self, "spike_window", 8, 10**6)
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "heartbeat_timeout_s",
                f"{self.heartbeat_timeout_s:g} is less than two heartbeats of {self.heartbeat_s:g} s",
                "Make it longer, or heartbeat_s shorter",
            )
