"""When samples are taken and when weights are trained: one dataclass per schedule; its first field chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range, positive


@dataclass(frozen=True)
class ColocatedSchedule:
    """A step's rollouts, then its training, by turns: the two may share one device. Every token a step trains on was
    sampled from the weights that the step starts from. `max_refills` bounds how many more prompts, as a multiple of
    `batch`, a step may draw for groups that the algorithm sends back (dynamic sampling)."""

    name: Literal["colocated"] = "colocated"
    max_refills: int = 3

    def __post_init__(self) -> None:
        in_range(self, "max_refills", 0, 1000)


@dataclass(frozen=True)
class OneStepOffSchedule:
    """The next step's rollouts are under way while this one trains: tokens are at most one version old."""

    name: Literal["one-step-off"] = "one-step-off"
    max_refills: int = 3

    def __post_init__(self) -> None:
        in_range(self, "max_refills", 0, 1000)


@dataclass(frozen=True)
class AsyncSchedule:
    """The server never stops: groups are taken as they finish, answers go on across swaps.

    No token is trained on that is more than `max_lag` versions old. `buffer` is how many groups may be sampled ahead,
    in flight and finished together; null is the most that the bound allows, (`max_lag` + 1) x `batch`.
    """

    name: Literal["async"] = "async"
    max_lag: int = 2
    buffer: int | None = None
    max_refills: int = 3

    def __post_init__(self) -> None:
        in_range(self, "max_lag", 1, 1000)
        in_range(self, "max_refills", 0, 1000)
        positive(self, "buffer")


ScheduleConfig = ColocatedSchedule | OneStepOffSchedule | AsyncSchedule
