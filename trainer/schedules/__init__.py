"""Schedules by the name of their config entry."""

from trainer.config.schedule import AsyncSchedule, OneStepOffSchedule, ScheduleConfig
from trainer.schedules.asynchronous import Asynchronous
from trainer.schedules.base import Keep, Pending, Rollout, Schedule, Start
from trainer.schedules.feed import Draw, Feed
from trainer.schedules.in_order import InOrder, OneStepOff

__all__ = ["Asynchronous", "Draw", "Feed", "InOrder", "OneStepOff", "Pending", "Rollout", "Schedule", "build_schedule"]


def build_schedule(config: ScheduleConfig, batch: int, feed: Feed, start: Start, keep: Keep) -> Schedule:
    """The schedule a config entry names. `start` samples and scores a draw, `keep` says whether a group is of use."""
    common = (batch, config.max_refills, feed, start, keep)
    if isinstance(config, AsyncSchedule):
        return Asynchronous(*common, config.max_lag, config.buffer)
    return OneStepOff(*common) if isinstance(config, OneStepOffSchedule) else InOrder(*common)
