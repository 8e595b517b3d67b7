"""The record that comes next: the shuffled order of the data set, thinned out by a curriculum and by success.

A run passes through the shuffled epochs of its records (trainer/data/records.py). Record i, at place t of this order,
is drawn with probability

    w_i(t) = max(floor, e_i(t) (1 - s_i))    prioritised sampling
    w_i(t) = max(floor, e_i(t))              otherwise

and left for the next epoch if it is not. So within an epoch problem i is drawn in proportion to w_i, and none of them
twice. s_i is the success rate of problem i: the share of right answers (every reward at its best) in its group, as a
moving average over the groups that were sampled for it,

    s_i <- (1 - rate) s_i + rate (right answers / answers),  the first group's share to begin with, 0 before that.

e_i(t) is 1 for a problem that is easy enough for the curriculum, and 0 for others: its difficulty d_i is at most

    D(t) = first + (last - first) min(1, draws so far / records).

d_i is a number in the record, or, measured, 1 - s_i; what has not been measured yet counts as easy. Both are Kimi
k1.5's (arXiv 2501.12599, section 2.3.4). `floor` lets a few of the others through, so that their success is measured
again. A problem is known by its prompt: copies of it share their success.

Whether a place is drawn is decided by the seed, its number, and what was measured before, so a resumed run draws what
the uninterrupted one does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config.sections import CurriculumConfig, OrderConfig
from trainer.data.records import Contents, Dataset, Record, take
from trainer.errors import DataError
from trainer.trajectory import TrajectoryGroup

_SALT = 0x0D7A  # decides draws by other random numbers than the shuffle and the samples


@dataclass(frozen=True)
class Draw:
    """The record at place `number` of a run's order."""

    number: int
    record: Record


class Feed:
    """Hands the records out. Part of a checkpoint: `drawn` is the next place of the order; beside it stands what the
    weights w_i depend on."""

    def __init__(self, dataset: Dataset, seed: int, order: OrderConfig | None = None) -> None:
        self._dataset, self._seed = dataset, seed
        self._order = order or OrderConfig()
        self._contents = Contents(dataset)
        self._successes: dict[str, float] = {}
        self._draws = 0
        self.drawn = 0

    def draw(self, count: int) -> list[Draw]:
        """The next `count` records. Raises DataError for one without the curriculum's number."""
        found: list[Draw] = []
        while len(found) < count:
            wanted = 1 if self._order.thins else count - len(found)  # one weight depends on the draws before
            first, self.drawn = self.drawn, self.drawn + wanted
            indices = take(len(self._dataset), self._seed, first, wanted)
            draws = [Draw(first + i, self._dataset[index]) for i, index in enumerate(indices)]
            found += [draw for draw in draws if not self._order.thins or self._chosen(draw)]
        return found

    def at(self, number: int) -> Draw:
        """Any record by its place."""
        (index,) = take(len(self._dataset), self._seed, number, 1)
        return Draw(number, self._dataset[index])

    def measured(self, draw: Draw, group: TrajectoryGroup) -> None:
        """Note the success of a draw's samples. A draw without any says nothing."""
        if not self._order.measures or not group.scores:
            return
        share = sum(score.full for score in group.scores) / len(group.scores)
        problem = _problem(draw.record)
        before, rate = self._successes.get(problem, share), self._order.rate
        self._successes[problem] = (1 - rate) * before + rate * share

    def success(self, record: Record) -> float | None:
        """s_i; None before the first measurement."""
        return self._successes.get(_problem(record))

    def weight(self, record: Record) -> float:
        """w_i now."""
        easy = self._order.curriculum is None or self._easy(record, self._order.curriculum)
        left = 1.0 - (self.success(record) or 0.0) if self._order.prioritize else 1.0
        return max(self._order.floor, left if easy else 0.0)

    def stats(self) -> dict[str, float]:
        """Of what was measured: the mean success rate of the problems; the curriculum's D."""
        values = {}
        if self._successes:
            values["success_mean"] = sum(self._successes.values()) / len(self._successes)
        if self._order.curriculum is not None:
            values["curriculum_difficulty"] = self._limit(self._order.curriculum)
        return values

    def state_dict(self) -> dict[str, Any]:
        """JSON: the cursor and what it points into, and the success rates."""
        measured = {"successes": dict(self._successes), "draws": self._draws}
        return {"drawn": self.drawn, "contents": self._contents.state_dict(), **measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ResumeError when the data set has changed."""
        self._contents.load_state_dict(state["contents"])
        self.drawn, self._draws = state["drawn"], state["draws"]
        self._successes = dict(state["successes"])

    def _chosen(self, draw: Draw) -> bool:
        luck = np.random.default_rng([self._seed, _SALT, draw.number]).random()
        chosen = bool(luck < self.weight(draw.record))
        self._draws += chosen
        return chosen

    def _easy(self, record: Record, curriculum: CurriculumConfig) -> bool:
        if curriculum.field is not None:
            return _number(record, curriculum.field) <= self._limit(curriculum)
        success = self.success(record)
        return success is None or 1.0 - success <= self._limit(curriculum)

    def _limit(self, c: CurriculumConfig) -> float:
        return c.first + (c.last - c.first) * min(1.0, self._draws / c.records)


def _problem(record: Record) -> str:
    return hashlib.blake2b(record.prompt.encode(), digest_size=8).hexdigest()


def _number(record: Record, field: str) -> float:
    value: Any = record.extra
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(
            f"record {record.index} has {value!r} where order.curriculum.field ({field}) wants a number. Name a field "
            "of its `extra` (data.extra_keys puts others there), or leave the field out to go by measured success."
        )
    return float(value)
