"""What a schedule is: which groups a step trains on, and what is sampled meanwhile. Runs on rank 0.

A schedule draws records from the feed, has them sampled (`start`), and hands out finished groups. Those that the
algorithm sends back (`keep` says no: dynamic sampling, as in DAPO, arXiv 2503.14476) are replaced by new draws, within
`max_refills` times the batch a step; beyond that the step takes them, so that it is whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from trainer.rollout.record import group_from_json, group_to_json
from trainer.rollout.samples import Group
from trainer.schedules.feed import Draw, Feed

Start = Callable[[Draw], Future[Group]]
Keep = Callable[[Group], bool]


@dataclass(eq=False)
class Pending:
    """A draw that was sent off when the trainer was at `version`."""

    draw: Draw
    future: Future[Group]
    version: int


@dataclass(frozen=True)
class Rollout:
    """A draw and its scored samples."""

    draw: Draw
    group: Group


class Schedule(ABC):
    """The common part: sending off, refilling, counting, and what a checkpoint holds of it."""

    max_lag = 0  # how many versions old a token may be that a step trains on

    def __init__(self, batch: int, max_refills: int, feed: Feed, start: Start, keep: Keep) -> None:
        self.batch, self.feed = batch, feed
        self._start, self._keep, self._refills_allowed = start, keep, max_refills * batch
        self._refills_left = 0
        self.pending: list[Pending] = []  # in the order they were drawn
        self._interrupted: list[Draw] = []  # was in flight when a checkpoint was taken
        self._counts = {"filtered_groups": 0.0, "stale_groups": 0.0}

    @abstractmethod
    def take(self, version: int, steps_left: int) -> Iterator[Rollout]:
        """`batch` rollouts for a step that starts from `version`, each as soon as it is ready. `steps_left` counts this
        step: nothing is sampled that no step will use. Raises what sampling raised."""

    @abstractmethod
    def ahead(self, version: int, steps_left: int) -> None:
        """Called when a step has its rollouts: sample what the steps after it (`steps_left` of them) will need."""

    def stats(self) -> dict[str, float]:
        """Since the last call: groups sent back by the algorithm or too old; now: in flight, and ready."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        ready = sum(pending.future.done() for pending in self.pending)
        return counts | {"groups_ready": float(ready), "groups_in_flight": float(len(self.pending) - ready)}

    def state_dict(self) -> dict[str, Any]:
        """JSON: how many records were drawn, and those that no step has used yet, with their samples if finished."""
        pending = [{"number": p.draw.number, "version": p.version, "group": _finished(p.future)} for p in self.pending]
        interrupted = [{"number": draw.number, "version": 0, "group": None} for draw in self._interrupted]
        return {"drawn": self.feed.drawn, "pending": pending + interrupted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: what was finished is kept, what was in flight is sampled again."""
        for pending in self.pending:
            pending.future.cancel()
        self.feed.drawn = state["drawn"]
        entries = [(self.feed.at(entry["number"]), entry) for entry in state["pending"]]
        finished = [(draw, entry) for draw, entry in entries if entry["group"] is not None]
        self.pending = [_done(draw, group_from_json(e["group"]), e["version"]) for draw, e in finished]
        self._interrupted = [draw for draw, entry in entries if entry["group"] is None]

    def renumber(self, by: int) -> None:
        """The weights that training stands at were published again under a number `by` higher, after a resume: what was
        restored is as old as it was. Nothing is in flight yet."""
        self.pending = [_done(p.draw, p.future.result().renumbered(by), p.version + by) for p in self.pending]

    def _begin(self) -> None:
        """For `take`: a step starts."""
        self._refills_left = self._refills_allowed

    def _send(self, draw: Draw, version: int) -> None:
        self.pending.append(Pending(draw, self._start(draw), version))

    def _send_next(self, count: int, version: int) -> None:
        """What a checkpoint interrupted comes first, now that the server has its weights."""
        again, self._interrupted = self._interrupted[:count], self._interrupted[count:]
        for draw in [*again, *self.feed.draw(count - len(again))]:
            self._send(draw, version)

    def _sent_again(self, finished: Pending, version: int) -> bool:
        """Whether its group was over the bound, and another is to come for it. What was sent off at this very version
        is as young as the server has it."""
        oldest = finished.future.result().oldest
        if finished.version >= version or oldest is None or version - oldest <= self.max_lag:
            return False
        self.pending.remove(finished)
        self._counts["stale_groups"] += 1
        self._send(finished.draw, version)
        return True

    def _sent_back(self, group: Group, version: int) -> bool:
        """Whether the algorithm does not want it and there is another to come for it."""
        if self._keep(group) or self._refills_left == 0:
            return False
        self._refills_left -= 1
        self._counts["filtered_groups"] += 1
        self._send_next(1, version)
        return True


def _done(draw: Draw, group: Group, version: int) -> Pending:
    future: Future[Group] = Future()
    future.set_result(group)
    return Pending(draw, future, version)


def _finished(future: Future[Group]) -> dict[str, Any] | None:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return group_to_json(future.result())
