"""When samples are taken: which groups a step trains on, and what is sampled meanwhile. Runs on rank 0.

A schedule draws records from the feed, has them sampled (`start`), and hands out finished groups. Those that the
algorithm sends back (`keep` says no: dynamic sampling, as in DAPO, arXiv 2503.14476) are replaced by new draws, within
`max_refills` times the batch a step; beyond that the step takes them, so that it is whole.

Colocated and one-step-off train on records in the order they were drawn. With seeded sampling, what a colocated step
trains on depends on nothing but the weights and the seed.

The asynchronous schedule always has samples in flight and trains on groups about as they finish. It keeps the bound on
staleness by choosing, not by throwing away, which would favour short answers. A group that weights of s optimizer steps
sample may be used up to step s + max_lag. With B groups a step, at most `left + d * B` more groups can be used within
the next d steps; if that many are due by then, the next one must come from these, and is waited for (earliest deadline
first is feasible). Otherwise any finished one will do. At most (max_lag + 1) * B groups are ahead of training, which is
also the back-pressure on sampling (as in AReaL, arXiv 2505.24298, whose rule counts the same first in, first out).

Age counts optimizer steps, not versions (staleness.py): where only every n-th step is published, or publishing fails,
what is sampled is older. Groups that are over the bound for that reason are sampled again, if there are newer weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from trainer.config.sections import AsyncSchedule, OneStepOffSchedule, ScheduleConfig
from trainer.data.records import Contents, Dataset, Record, take
from trainer.staleness import StepsOfVersions
from trainer.trajectory import Group


@dataclass(frozen=True)
class Draw:
    """Record number `number` of a run."""

    number: int
    record: Record


class Feed:
    """Hands the records out. Part of a checkpoint: `drawn` is its whole state."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._contents = Contents(dataset)
        self.drawn = 0

    def draw(self, count: int) -> list[Draw]:
        """The next `count` records."""
        first, self.drawn = self.drawn, self.drawn + count
        indices = take(len(self._dataset), self._seed, first, count)
        return [Draw(first + i, self._dataset[index]) for i, index in enumerate(indices)]

    def at(self, number: int) -> Draw:
        """Any record by its number."""
        (index,) = take(len(self._dataset), self._seed, number, 1)
        return Draw(number, self._dataset[index])

    def state_dict(self) -> dict[str, Any]:
        """JSON: the cursor and what it points into."""
        return {"drawn": self.drawn, "contents": self._contents.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ResumeError when the data set has changed."""
        self._contents.load_state_dict(state["contents"])
        self.drawn = state["drawn"]


Start = Callable[[Draw], Future[Group]]
Keep = Callable[[Group], bool]


@dataclass(eq=False)
class Pending:
    """A draw that was sent off when the server had the weights after `served` optimizer steps."""

    draw: Draw
    future: Future[Group]
    served: int


@dataclass(frozen=True)
class Rollout:
    """A draw and its scored samples."""

    draw: Draw
    group: Group


class Schedule(ABC):
    """The common part: sending off, refilling, counting, and what a checkpoint holds of it."""

    def __init__(self, batch: int, max_refills: int, feed: Feed, start: Start, keep: Keep, max_lag: int) -> None:
        """`max_lag`: how many optimizer steps old a token may be that a step trains on."""
        self.batch, self.feed, self.max_lag = batch, feed, max_lag
        self.steps = StepsOfVersions()
        self._start, self._keep, self._refills_allowed = start, keep, max_refills * batch
        self._refills_left = 0
        self.pending: list[Pending] = []  # in the order they were drawn
        self._interrupted: list[Draw] = []  # was in flight when a checkpoint was taken
        self._counts = {"filtered_groups": 0.0, "stale_groups": 0.0}

    @abstractmethod
    def take(self, step: int, steps_left: int) -> Iterator[Rollout]:
        """`batch` rollouts for a step from weights of `step` optimizer steps, each as soon as it is ready. `steps_left`
        counts this step: nothing is sampled that no step will use. Raises what sampling raised."""

    @abstractmethod
    def ahead(self, step: int, steps_left: int) -> None:
        """Called when a step has its rollouts: sample what the steps after it (`steps_left` of them) will need."""

    def stats(self) -> dict[str, float]:
        """Since the last call: groups sent back by the algorithm or too old; now: in flight, and ready."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        ready = sum(pending.future.done() for pending in self.pending)
        return counts | {"groups_ready": float(ready), "groups_in_flight": float(len(self.pending) - ready)}

    def state_dict(self) -> dict[str, Any]:
        """JSON: how many records were drawn, and those that no step has used yet, with their samples if finished."""
        pending = [{"number": p.draw.number, "served": p.served, "group": _finished(p.future)} for p in self.pending]
        interrupted = [{"number": draw.number, "served": 0, "group": None} for draw in self._interrupted]
        return {"drawn": self.feed.drawn, "pending": pending + interrupted, "steps": self.steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: what was finished is kept, what was in flight is sampled again."""
        for pending in self.pending:
            pending.future.cancel()
        self.feed.drawn = state["drawn"]
        self.steps.load_state_dict(state["steps"])
        entries = [(self.feed.at(entry["number"]), entry) for entry in state["pending"]]
        finished = [(draw, entry) for draw, entry in entries if entry["group"] is not None]
        self.pending = [_done(draw, Group.from_json(e["group"]), e["served"]) for draw, e in finished]
        self._interrupted = [draw for draw, entry in entries if entry["group"] is None]

    def skip_to(self, drawn: int) -> None:
        """Use no record before number `drawn` any more, nor what was sampled for one."""
        self.load_state_dict({**self.state_dict(), "drawn": drawn, "pending": []})

    def _begin(self) -> None:
        """For `take`: a step starts."""
        self._refills_left = self._refills_allowed

    def _send(self, draw: Draw) -> None:
        self.pending.append(Pending(draw, self._start(draw), self.steps.served))

    def _send_next(self, count: int) -> None:
        """What a checkpoint interrupted comes first, now that the server has its weights."""
        again, self._interrupted = self._interrupted[:count], self._interrupted[count:]
        for draw in [*again, *self.feed.draw(count - len(again))]:
            self._send(draw)

    def _group(self, finished: Pending) -> Group:
        return finished.future.result().dated(self.steps)

    def _sent_again(self, finished: Pending, step: int) -> bool:
        """Whether its group was over the bound, and another is to come for it. What the newest weights that the server
        has were asked for is as young as can be."""
        oldest = self._group(finished).oldest
        if finished.served >= self.steps.served or oldest is None or step - oldest <= self.max_lag:
            return False
        self.pending.remove(finished)
        self._counts["stale_groups"] += 1
        self._send(finished.draw)
        return True

    def _sent_back(self, group: Group) -> bool:
        """Whether the algorithm does not want it and there is another to come for it."""
        if self._keep(group) or self._refills_left == 0:
            return False
        self._refills_left -= 1
        self._counts["filtered_groups"] += 1
        self._send_next(1)
        return True


def _done(draw: Draw, group: Group, served: int) -> Pending:
    future: Future[Group] = Future()
    future.set_result(group)
    return Pending(draw, future, served)


def _finished(future: Future[Group]) -> dict[str, Any] | None:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result().to_json()


class InOrder(Schedule):
    """A whole batch at a time, and nothing meanwhile: training has the device to itself."""

    def take(self, step: int, steps_left: int) -> Iterator[Rollout]:
        """The batch sampled ahead, or a new one. A group that is not wanted is replaced at the end of the line."""
        self._begin()
        self._send_up_to_batch()
        self._renew(step)
        for _ in range(self.batch):
            rollout = None
            while rollout is None:
                first = self.pending[0]
                if self._sent_again(first, step):
                    self._line_up()
                    continue
                group = self._group(first)
                del self.pending[0]  # not before: a checkpoint or a retry must still find it
                rollout = None if self._sent_back(group) else Rollout(first.draw, group)
            yield rollout

    def ahead(self, step: int, steps_left: int) -> None:
        """Nothing."""

    def _send_up_to_batch(self) -> None:
        """More than a batch may be there after another schedule: then it is used first."""
        self._send_next(max(self.batch - len(self.pending), 0))
        self._line_up()

    def _renew(self, step: int) -> None:
        """What is known to be too old is sampled again now, all at the same time."""
        for pending in [pending for pending in self.pending[: self.batch] if pending.future.done()]:
            self._sent_again(pending, step)
        self._line_up()

    def _line_up(self) -> None:
        self.pending.sort(key=lambda pending: pending.draw.number)


class OneStepOff(InOrder):
    """The next batch is sampled while this one trains."""

    def ahead(self, step: int, steps_left: int) -> None:
        if steps_left > 0:
            self._send_up_to_batch()


class Asynchronous(Schedule):
    """`max_lag` in optimizer steps, `buffer` in groups (None: the most that the bound allows)."""

    def __init__(
        self, batch: int, max_refills: int, feed: Feed, start: Start, keep: Keep, max_lag: int, buffer: int | None
    ) -> None:
        super().__init__(batch, max_refills, feed, start, keep, max_lag)
        self._buffer = (max_lag + 1) * batch if buffer is None else max(buffer, batch)

    def take(self, step: int, steps_left: int) -> Iterator[Rollout]:
        """Tops up what is in flight, then takes groups as they finish, those first that would be too old."""
        self._begin()
        in_time = max(self._in_time(step), self.batch)  # the step must get its groups, however old the weights are
        self._fill(min(in_time, steps_left * self.batch))
        for left in range(self.batch, 0, -1):
            rollout = None
            while rollout is None:
                rollout = self._next(step, left)
            yield rollout

    def ahead(self, step: int, steps_left: int) -> None:
        """While training, the server works on what is ahead; room for more comes with the next version."""
        self._fill(min(self._in_time(step + 1), steps_left * self.batch))

    def _in_time(self, first: int) -> int:
        """How many groups can be used in time, by steps from weights of `first` optimizer steps on, if the weights that
        the server has now write them."""
        return max(self.steps.served + self.max_lag - first + 1, 0) * self.batch

    def _fill(self, groups: int) -> None:
        self._send_next(max(min(groups, self._buffer) - len(self.pending), 0))

    def _next(self, step: int, left: int) -> Rollout | None:
        candidates = self._candidates(step, left)
        done, _ = wait([pending.future for pending in candidates], return_when=FIRST_COMPLETED)
        chosen = next(pending for pending in candidates if pending.future in done)
        if self._sent_again(chosen, step):
            return None
        group = self._group(chosen)
        self.pending.remove(chosen)
        return None if self._sent_back(group) else Rollout(chosen.draw, group)

    def _candidates(self, step: int, left: int) -> list[Pending]:
        """Among which the next one is chosen, those due first in front."""
        by_deadline = sorted(self.pending, key=lambda pending: (pending.served, pending.draw.number))
        for count, pending in enumerate(by_deadline, 1):
            deadline = pending.served + self.max_lag
            if count >= left + (deadline - step) * self.batch:
                return by_deadline[:count]
        return by_deadline


def build_schedule(
    config: ScheduleConfig, batch: int, feed: Feed, start: Start, keep: Keep, publish_every: int = 1
) -> Schedule:
    """The schedule a config entry names. `start` samples and scores a draw, `keep` says whether a group is of use.

    The weights that the server has are up to `publish_every` - 1 steps old when a step begins; a batch that was sampled
    while the step before trained is one step older.
    """
    common = (batch, config.max_refills, feed, start, keep)
    if isinstance(config, AsyncSchedule):
        return Asynchronous(*common, config.max_lag, config.buffer)
    if isinstance(config, OneStepOffSchedule):
        return OneStepOff(*common, publish_every)
    return InOrder(*common, publish_every - 1)
