"""When samples are taken: which groups a step trains on, and what is sampled meanwhile (docs/trainer/schedules.md).
Runs on rank 0.

A schedule draws records from the feed, has them sampled (`start`), and hands out finished groups. Those that the
algorithm sends back (`keep` says no: dynamic sampling, as in DAPO, arXiv 2503.14476) are replaced by new draws, within
`max_refills` times the batch a step.

Colocated and one-step-off decide by what stands in line, never by what is there already, so that a seeded colocated
step depends on nothing but the weights and the seed. With y the share of the groups finished lately that were of use, a
step that lacks n groups has

    min(floor(n / y + reserve) + long, n + oversample * batch)

of them under way at once: `long` are those that an iteration's tokens were too few for, and `reserve` (a quarter of a
batch) makes up for others that will be, where tokens have a budget.

Under the asynchronous schedule a group that weights of s optimizer steps sample may be used up to step s + max_lag.
With B groups a step, at most `left + d * B` more groups can be used within the next d steps; if that many are due by
then, the next one must come from these, and is waited for (earliest deadline first is feasible). At most
(max_lag + 1) * B groups are ahead of training (as in AReaL, arXiv 2505.24298, whose rule counts the same first in,
first out).

With a budget of tokens (partial rollouts, Kimi k1.5, arXiv 2501.12599, section 2.6.2) a group is sampled in rounds, one
an iteration: from the moment a step has its groups to the same moment of the next. The bound of a continuation counts
from the weights that write it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.config.sections import AsyncSchedule, OneStepOffSchedule, ScheduleConfig
from trainer.rollouts.feed import Draw, Feed
from trainer.trajectory import Outcome, Partial, StepsOfVersions, TrajectoryGroup, outcome_from_json

ROUNDING = 1e-9
RESERVE = 0.25  # of a batch
REMEMBERED = 0.8  # of the groups finished until a step, the weight that they have at the next


class Start(Protocol):
    """Samples and scores a draw: its first round, or the one that goes on from `before`."""

    def __call__(self, draw: Draw, before: Future[Outcome] | None = None) -> Future[Outcome]: ...


Keep = Callable[[TrajectoryGroup], bool]


@dataclass(eq=False)
class Pending:
    """A draw whose last round was sent off when the server had the weights after `served` optimizer steps. It may be
    `patience` steps older than others when it is used: it takes several iterations, or has to wait for its turn. It is
    `long` once a step has looked at it and it was not finished."""

    draw: Draw
    rounds: list[Future[Outcome]]
    served: int
    patience: int = 0
    long: bool = False

    @property
    def future(self) -> Future[Outcome]:
        """Its last round."""
        return self.rounds[-1]

    def go_on(self, start: Start, served: int) -> None:
        """Another round; if one is in flight, behind it."""
        del self.rounds[: max((i for i, future in enumerate(self.rounds) if future.done()), default=0)]
        self.rounds.append(start(self.draw, self.future))
        self.served = served

    def entry(self) -> dict[str, Any]:
        """For a checkpoint: what the newest round that is over came to, and how many were sent off after it."""
        for owed, future in enumerate(reversed(self.rounds)):
            if (known := _result(future)) is not None:
                return _entry(self.draw, owed, known.to_json(), self.served, self.patience, self.long)
        return _entry(self.draw, len(self.rounds))

    @property
    def rests(self) -> bool:
        """Whether it waits for another round."""
        return isinstance(_result(self.future), Partial)


@dataclass(frozen=True)
class Rollout:
    """A draw and its scored samples."""

    draw: Draw
    group: TrajectoryGroup


@dataclass(frozen=True)
class Setup:
    """The setup of a schedule. `max_lag`: how many optimizer steps old a token may be that a step trains on. `rounds`:
    iterations that the longest trajectory takes; 1 where they have no budget."""

    batch: int
    max_refills: int
    feed: Feed
    start: Start
    keep: Keep
    max_lag: int
    rounds: int


class Schedule(ABC):
    """The common part: sending off, going on, refilling, counting, and what a checkpoint holds of it."""

    def __init__(self, setup: Setup) -> None:
        self.batch, self.feed, self.max_lag = setup.batch, setup.feed, setup.max_lag
        self.steps = StepsOfVersions()
        self._start, self._keep, self._rounds = setup.start, setup.keep, setup.rounds
        self._refills_allowed = setup.max_refills * setup.batch
        self._refills_left = 0
        self._iterating = False  # the round of the next step has begun
        self.pending: list[Pending] = []  # in the order they were drawn
        self._interrupted: list[Draw] = []  # their first round was in flight when a checkpoint was taken
        self._owed: dict[int, int] = {}  # rounds that were in flight then, by number
        self._counts = {"filtered_groups": 0.0, "stale_groups": 0.0}

    @abstractmethod
    def take(self, step: int, steps_left: int) -> Iterator[Rollout]:
        """`batch` rollouts for a step from weights of `step` optimizer steps, each as soon as it is ready. `steps_left`
        counts this step: nothing is sampled that no step will use. Raises what sampling raised."""

    @abstractmethod
    def ahead(self, step: int, steps_left: int) -> None:
        """Called when a step has its rollouts: sample what the steps after it (`steps_left` of them) will need."""

    def stats(self) -> dict[str, float]:
        """Since the last call: groups sent back by the algorithm or too old; now: in flight, ready, and waiting for
        another round."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        done, rest = sum(p.future.done() for p in self.pending), sum(p.rests for p in self.pending)
        if self._rounds > 1:
            counts["groups_unfinished"] = float(rest)
        return counts | {"groups_ready": float(done - rest), "groups_in_flight": float(len(self.pending) - done)}

    def state_dict(self) -> dict[str, Any]:
        """JSON: how many records were drawn, and those that no step has used yet, with what is known of their
        samples."""
        entries = [pending.entry() for pending in self.pending]
        for entry in entries:
            entry["owed"] += self._owed.get(entry["number"], 0)  # a checkpoint right after going back to one
        entries += [_entry(draw, self._owed.get(draw.number, 1)) for draw in self._interrupted]
        about = {"iterating": self._iterating, "steps": self.steps.state_dict()}
        return {"drawn": self.feed.drawn, "pending": entries, **about}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: what was finished is kept, what was begun goes on, the round in flight is sampled again."""
        for future in (future for pending in self.pending for future in pending.rounds):
            future.cancel()
        self.feed.drawn, self._iterating = state["drawn"], state["iterating"]
        self.steps.load_state_dict(state["steps"])
        entries = [(self.feed.at(entry["number"]), entry) for entry in state["pending"]]
        known = [(draw, entry) for draw, entry in entries if entry["group"] is not None]
        self.pending = [
            Pending(draw, [_done(outcome_from_json(e["group"]))], e["served"], e["patience"], e["long"])
            for draw, e in known
        ]
        self._interrupted = [draw for draw, entry in entries if entry["group"] is None]
        self._owed = {entry["number"]: entry["owed"] for _, entry in entries if entry["owed"]}

    def skip_to(self, drawn: int) -> None:
        """Use no record before number `drawn` any more, nor what was sampled for one."""
        self.load_state_dict({**self.state_dict(), "drawn": drawn, "pending": []})

    def _begin(self) -> None:
        """For `take`: a step starts, and an iteration, unless it has begun while the step before trained."""
        self._refills_left = self._refills_allowed
        for pending in self.pending:
            for _ in range(self._owed.pop(pending.draw.number, 0)):
                pending.go_on(self._start, self.steps.served)
        if not self._iterating:
            self._go_on()
        self._iterating = False

    @abstractmethod
    def _go_on(self) -> None:
        """Another round for what is not finished."""

    def _send(self, draw: Draw, patience: int = 0) -> None:
        pending = Pending(draw, [self._start(draw)], self.steps.served, patience)
        for _ in range(self._owed.pop(draw.number, 1) - 1):
            pending.go_on(self._start, self.steps.served)
        self.pending.append(pending)

    def _send_next(self, count: int) -> None:
        """The draws that a checkpoint interrupted come first, now that the server has its weights."""
        again, self._interrupted = self._interrupted[:count], self._interrupted[count:]
        for draw in [*again, *self.feed.draw(count - len(again))]:
            self._send(draw)

    def _group(self, finished: Pending) -> TrajectoryGroup:
        outcome = finished.future.result()
        assert isinstance(outcome, TrajectoryGroup)
        return outcome.dated(self.steps)

    def _rollout(self, finished: Pending, group: TrajectoryGroup, step: int) -> Rollout:
        if self._rounds > 1:
            group = group.within(step, self.max_lag + finished.patience)
        return Rollout(finished.draw, group)

    def _sent_again(self, finished: Pending, step: int) -> bool:
        """Whether its group was over the bound, and another is to come for it. A group that the server's newest weights
        were asked for is as young as can be. Of a group that took several rounds, the last round counts: the tokens
        before it that are too old are left out."""
        group = self._group(finished)
        wrote = group.oldest if self._rounds == 1 else group.newest
        if finished.served >= self.steps.served or wrote is None or step - wrote <= self.max_lag + finished.patience:
            return False
        self.pending.remove(finished)
        self._counts["stale_groups"] += 1
        self._send(finished.draw, finished.patience)
        return True

    def _sent_back(self, draw: Draw, group: TrajectoryGroup) -> bool:
        """Whether the algorithm does not want the group and another may come for it. The group's success counts."""
        self.feed.measured(draw, group)
        if self._keep(group) or self._refills_left == 0:
            return False
        self._refills_left -= 1
        self._counts["filtered_groups"] += 1
        return True


def _done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def _result(future: Future[Outcome]) -> Outcome | None:
    """None before it is there, and of one that failed."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def _entry(
    draw: Draw,
    owed: int,
    group: dict[str, Any] | None = None,
    served: int = 0,
    patience: int = 0,
    long: bool = False,
) -> dict[str, Any]:
    about = {"number": draw.number, "served": served, "patience": patience, "long": long}
    return about | {"owed": owed, "group": group}


class InOrder(Schedule):
    """A whole batch at a time, and nothing meanwhile: training has the device to itself."""

    def __init__(self, setup: Setup, oversample: float) -> None:
        super().__init__(setup)
        self._oversample = oversample
        self._seen, self._useful = float(setup.batch), float(setup.batch)  # groups that were finished, and those of use

    def take(self, step: int, steps_left: int) -> Iterator[Rollout]:
        """In the order they were drawn, those that are finished and of use. When all in line have been looked at and
        some are lacking, the unfinished ones get another round."""
        self._begin()
        self._seen, self._useful = REMEMBERED * self._seen, REMEMBERED * self._useful
        self._top_up(self.batch, steps_left)
        self._renew(step)
        lacking, place = self.batch, 0
        while lacking:
            if place == len(self.pending):
                self._go_on()
                self._top_up(lacking, steps_left)
                place = 0
                continue
            pending = self.pending[place]
            if isinstance(pending.future.result(), Partial):
                pending.long, place = True, place + 1
                continue
            if self._sent_again(pending, step):
                self._line_up()
                continue
            group = self._group(pending)
            del self.pending[place]  # not before: a checkpoint or a retry must still find it
            self._seen += 1
            if self._sent_back(pending.draw, group):
                self._top_up(lacking, steps_left)
                continue
            self._useful, lacking = self._useful + 1, lacking - 1
            yield self._rollout(pending, group, step)
        self._rest()

    def ahead(self, step: int, steps_left: int) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """With the share of groups that are of use."""
        return super().state_dict() | {"seen": self._seen, "useful": self._useful}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From another schedule's state that share begins anew."""
        super().load_state_dict(state)
        whole = float(self.batch)
        self._seen, self._useful = state.get("seen", whole), state.get("useful", whole)

    def _go_on(self) -> None:
        """One that still has a round in flight gets its next behind it, so that who is how fast decides nothing."""
        for pending in self.pending:
            if pending.rests or (self._rounds > 1 and not pending.future.done()):
                pending.go_on(self._start, self.steps.served)

    def _rest(self) -> None:
        """Nothing is sampled while the device trains: what is left over ends its round first."""
        wait([pending.future for pending in self.pending])

    def _top_up(self, lacking: int, steps_left: int) -> None:
        """As many in line as a step that lacks so many groups asks for. More than that may be there after another
        schedule: then it is used first."""
        spare = min(self._oversample, steps_left - 1) * self.batch
        reserve = RESERVE * self.batch if self._rounds > 1 else 0.0
        expected = math.floor(lacking * self._seen / max(self._useful, 1.0) + reserve + ROUNDING)
        wanted = min(expected + sum(pending.long for pending in self.pending), math.floor(lacking + spare))
        waiting = math.ceil(self._oversample) if wanted > lacking or self._rounds > 1 else 0
        line = sorted([p.draw.number for p in self.pending] + [draw.number for draw in self._interrupted])
        again = [draw for draw in self._interrupted if draw.number in line[:wanted]]
        self._interrupted = [draw for draw in self._interrupted if draw not in again]
        for draw in [*again, *self.feed.draw(max(wanted - len(line), 0))]:
            self._send(draw, waiting + self._rounds - 1)
        self._line_up()

    def _renew(self, step: int) -> None:
        """The groups known to be too old are sampled again now, all at the same time."""
        for pending in self.pending[: self.batch]:
            if isinstance(_result(pending.future), TrajectoryGroup):
                self._sent_again(pending, step)
        self._line_up()

    def _line_up(self) -> None:
        self.pending.sort(key=lambda pending: pending.draw.number)


class OneStepOff(InOrder):
    """The next batch is sampled while this one trains."""

    def ahead(self, step: int, steps_left: int) -> None:
        if steps_left > 0:
            self._go_on()
            self._iterating = True
            self._top_up(self.batch, steps_left)

    def _rest(self) -> None:
        """It samples all the time."""


class Asynchronous(Schedule):
    """`buffer` in groups (None: the most that the bound on staleness allows)."""

    def __init__(self, setup: Setup, buffer: int | None) -> None:
        super().__init__(setup)
        self._buffer = (setup.max_lag + 1) * setup.batch if buffer is None else max(buffer, setup.batch)

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
        if steps_left > 0:
            self._go_on()
            self._iterating = True
        self._fill(min(self._in_time(step + 1), steps_left * self.batch))

    def _go_on(self) -> None:
        """The groups still in their round stay in it: they have the deadline of the weights that began it."""
        for pending in self.pending:
            if pending.rests:
                pending.go_on(self._start, self.steps.served)

    def _in_time(self, first: int) -> int:
        """How many groups can be used in time, by steps from weights of `first` optimizer steps on, if the weights that
        the server has now write them."""
        return max(self.steps.served + self.max_lag - first + 1, 0) * self.batch

    def _fill(self, groups: int) -> None:
        self._send_next(max(min(groups, self._buffer) - len(self.pending), 0))

    def _next(self, step: int, left: int) -> Rollout | None:
        candidates = self._candidates(step, left)
        if not candidates:
            self._go_on()
            return None
        done, _ = wait([pending.future for pending in candidates], return_when=FIRST_COMPLETED)
        chosen = next(pending for pending in candidates if pending.future in done)
        if chosen.rests or self._sent_again(chosen, step):
            return None
        group = self._group(chosen)
        self.pending.remove(chosen)
        if self._sent_back(chosen.draw, group):
            self._send_next(1)
            return None
        return self._rollout(chosen, group, step)

    def _candidates(self, step: int, left: int) -> list[Pending]:
        """Among which the next one is chosen, those due first in front. None: all wait for another round."""
        moving = [pending for pending in self.pending if not pending.rests]
        by_deadline = sorted(moving, key=lambda pending: (pending.served, pending.draw.number))
        for count, pending in enumerate(by_deadline, 1):
            deadline = pending.served + self.max_lag
            if count >= left + (deadline - step) * self.batch:
                return by_deadline[:count]
        return by_deadline


def build_schedule(
    config: ScheduleConfig,
    batch: int,
    feed: Feed,
    start: Start,
    keep: Keep,
    publish_every: int = 1,
    rounds: int = 1,
) -> Schedule:
    """The schedule a config entry names. `start` samples and scores a draw, `keep` says whether a group is of use.

    The weights that the server has are up to `publish_every` - 1 steps old when a step begins; a batch that was sampled
    while the step before trained is one step older.
    """

    def setup(max_lag: int) -> Setup:
        return Setup(batch, config.max_refills, feed, start, keep, max_lag, rounds)

    if isinstance(config, AsyncSchedule):
        return Asynchronous(setup(config.max_lag), config.buffer)
    if isinstance(config, OneStepOffSchedule):
        return OneStepOff(setup(publish_every), config.oversample)
    return InOrder(setup(publish_every - 1), config.oversample)
