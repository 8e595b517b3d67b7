"""A sampler whose answers come when the test says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from tests.trainer.rollouts.trajectories import answer
from trainer.data.records import Record
from trainer.rewards.scorer import Score
from trainer.rollouts.feed import Draw
from trainer.rollouts.schedules import Rollout, Schedule
from trainer.trajectory import (
    UNFINISHED,
    Outcome,
    Partial,
    PartialSample,
    StepsOfVersions,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
)


class Records:
    """Endless enough; the prompt is the index."""

    def __init__(self, count: int = 1000) -> None:
        self.held_out: list[Record] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Record:
        return Record(index, f"{index}=", "0", (index,), ())


def group(prompt: int, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> TrajectoryGroup:
    """Samples of one token each, written by `version`."""
    sample = answer((7,), (-0.5,), "stop", (VersionSpan(version, 0, 1),))
    return TrajectoryGroup(
        (prompt,), (sample,) * len(rewards), tuple(Score(reward, {"r": reward}) for reward in rewards)
    )


class EveryStep(StepsOfVersions):
    """Every step is published, as the version of its number; the server has the sampler's."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def __getitem__(self, version: int) -> int:
        return version

    @property
    def served(self) -> int:
        return self._sampler.version


def published(schedule: Schedule, sampler: Sampler) -> Schedule:
    """The schedule of a run that publishes every step."""
    schedule.steps = EveryStep(sampler)
    return schedule


Round = tuple[Future[Outcome], int, Future[Outcome] | None]


class Sampler:
    """The sampler that a schedule starts. `version` is what the server runs; `sent` is in order, first rounds only;
    `finish` ends a draw's round. Those in `rounds` take so many, with a token in each."""

    def __init__(self, rounds: dict[int, int] | None = None) -> None:
        self.version = 0
        self.sent: list[Draw] = []
        self.rounds = rounds or {}
        self._open: dict[int, list[Round]] = {}
        self._lock = threading.Condition()

    def __call__(self, draw: Draw, before: Future[Outcome] | None = None) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            if before is None:
                self.sent.append(draw)
                self._open[draw.number] = []
            if before is not None and before.done() and isinstance(found := before.result(), TrajectoryGroup):
                future.set_result(found)
                return future
            self._open.setdefault(draw.number, []).append((future, self.version, before))
            self._lock.notify_all()
        return future

    @property
    def in_flight(self) -> list[int]:
        with self._lock:
            return sorted(number for number, rounds in self._open.items() if rounds)

    def soon(self, action: Callable[[], object]) -> threading.Thread:
        """Do it on a thread, so that the schedule may wait for it."""
        thread = threading.Thread(target=action)
        thread.start()
        return thread

    def taken(self, rollouts: Iterator[Rollout], *finished: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> list[int]:
        """The numbers of the rollouts, of which some come when these are finished."""
        thread = self.soon(lambda: self.finish(*finished, rewards=rewards))
        found = numbers(rollouts)
        thread.join()
        return found

    @contextlib.contextmanager
    def finishing(
        self, choose: Callable[[list[int]], list[int]] = list, rewards: tuple[float, ...] = (0.0, 1.0)
    ) -> Iterator[None]:
        """Meanwhile all that is in flight is finished, or what is chosen of it."""
        over = threading.Event()

        def finish() -> None:
            while not over.is_set():
                if flying := self.in_flight:
                    self.finish(*choose(flying), rewards=rewards)

        thread = self.soon(finish)
        try:
            yield
        finally:
            over.set()
            thread.join(10)

    def finish(self, *numbers: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        """When all of them have been sent off."""
        self._wait_for(*numbers)
        for number in numbers:
            with self._lock:
                future, version, before = self._open[number].pop(0)
                outcome = self._further(number, version, before, rewards)
                behind = self._open[number] if isinstance(outcome, TrajectoryGroup) else []
                self._open[number] = [] if behind else self._open[number]
            for each in (future, *(waiting for waiting, _, _ in behind)):
                each.set_result(outcome)

    def fail(self, number: int, error: Exception) -> None:
        self._wait_for(number)
        self._open.pop(number)[0][0].set_exception(error)

    def _further(
        self, number: int, version: int, before: Future[Outcome] | None, rewards: tuple[float, ...]
    ) -> Outcome:
        if self.rounds.get(number, 1) == 1:
            return group(number, version, rewards)
        begun = before.result() if before is not None else Partial.fresh((number,), len(rewards))
        assert isinstance(begun, Partial)
        assert begun.samples[0] is not None
        turns = begun.samples[0].trajectory.turns
        there, spans = len(turns[0].token_ids) if turns else 0, turns[0].versions if turns else ()
        turn = Turn((7,) * (there + 1), (-0.5,) * (there + 1), (*spans, VersionSpan(version, there, there + 1)))
        if there + 1 == self.rounds[number]:
            scores = tuple(Score(reward, {"r": reward}) for reward in rewards)
            return TrajectoryGroup((number,), (Trajectory((turn,), "stop"),) * len(rewards), scores)
        return Partial((PartialSample((number,), Trajectory((turn,), UNFINISHED)),) * len(rewards))

    def _wait_for(self, *numbers: int) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: set(self.in_flight) >= set(numbers), timeout=60), (
                f"{numbers} were not sent"
            )


class AtOnce(Sampler):
    """Every round is over at once, but for those of the `slow`; the rewards of a group differ where it `teaches`."""

    def __init__(
        self,
        rounds: dict[int, int] | None = None,
        slow: tuple[int, ...] = (),
        version: int = 0,
        teaches: Callable[[int], bool] = lambda number: True,
    ) -> None:
        super().__init__(rounds)
        self.slow, self.version, self._teaches = slow, version, teaches

    def __call__(self, draw: Draw, before: Future[Outcome] | None = None) -> Future[Outcome]:
        future = super().__call__(draw, before)
        if not future.done() and draw.number not in self.slow:
            self.finish(draw.number, rewards=(0.0, 1.0) if self._teaches(draw.number) else (1.0, 1.0))
        return future


Keep = Callable[[TrajectoryGroup], bool]


def useful(group: TrajectoryGroup) -> bool:
    """DAPO's filter."""
    return len(set(group.rewards)) > 1


def everything(group: TrajectoryGroup) -> bool:
    return True


def numbers(rollouts: Iterator[Rollout]) -> list[int]:
    return [rollout.draw.number for rollout in rollouts]
